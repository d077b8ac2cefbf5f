"""Run the programs of the gallery and draw their pictures.

python -m gallery [NAME ...] [--folder docs/gallery]
"""

import argparse
import importlib
import time
from pathlib import Path

from gallery import pictures

parser = argparse.ArgumentParser(prog="python -m gallery", description="Draw the pictures of the gallery.")
parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(pictures.DRAWN)}; all, if omitted")
parser.add_argument("--folder", type=Path, default=Path("docs/gallery"), help="where pictures go")
options = parser.parse_args()
if unknown := set(options.names) - set(pictures.DRAWN):
    parser.error(f"there is no program {', '.join(sorted(unknown))}: choose from {', '.join(pictures.DRAWN)}")
options.folder.mkdir(parents=True, exist_ok=True)
for name in options.names or pictures.DRAWN:
    start = time.perf_counter()
    result = importlib.import_module(f"gallery.{name}").main()
    path = options.folder / f"{name}.svg"
    pictures.draw(name, result, path)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB, {time.perf_counter() - start:.0f} s")
