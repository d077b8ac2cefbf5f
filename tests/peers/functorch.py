"""Run PyTorch's own tests of torch.func with thunder_fn's functions in the place of torch.func's.

    python -m tests.peers.functorch ~/pytorch/test/functorch/test_vmap.py -k randomness --jit
    python -m tests.peers.functorch ~/pytorch/test/functorch/test_ops.py --slice 3/40 --limit 60

The files are PyTorch's and are no part of this repository: the caller names a copy, best of the version that is installed. Names
that both packages have are exchanged in the file, and in files beside it, wherever it imports or writes them (`vmap`,
`torch.func.vmap`, `functorch.vmap`), so PyTorch and thunder_fn themselves go on using torch.func. `not_applicable.py` lists what
is left out.

Prints each test that fails, or runs for long, as it ends. Then prints the failures by kind, most frequent first, and the rate
of those that pass. `--slice i/n` runs each n-th test, since there are thousands of OpInfo tests. `--limit` ends a test after so
many seconds. Tests that PyTorch itself expects to fail count neither way.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict

from tests.peers.not_applicable import NOT_APPLICABLE
from tests.peers.plugin.exchange import Exchange, names
from tests.peers.running import asked, command_line, kind_of, load, name_of, outcomes, split, summarize


def main() -> int:
    """Run the tests that the command line names."""
    parser = command_line(__doc__, limit=0)
    parser.add_argument("--jit", action="store_true", help="jit what each transform makes")
    parser.add_argument("--plain", action="store_true", help="exchange nothing: what the copy does on this PyTorch")
    options = parser.parse_args()
    passed, left_out, total = 0, Counter[str](), 0
    failed: defaultdict[str, list[str]] = defaultdict(list)
    for path in options.files:
        known = {} if options.plain else names(jit=options.jit, control_flow="control_flow" in path.name)
        found, reasons = split(asked(load(path, Exchange(known), known), options), NOT_APPLICABLE)
        left_out.update(reasons)
        begin = time.time()
        for test, (how, text) in zip(found, outcomes(found, options.limit), strict=True):
            took, begin = time.time() - begin, time.time()
            shown = f"{name_of(test)} ({took:.1f} s)" if took > 5 else name_of(test)
            if how in ("skipped", "expected"):
                left_out[text[:100]] += 1
                continue
            total += 1
            passed += how == "passed"
            if how == "failed":
                failed[kind_of(text)].append(shown)
                print("failed", shown, text if options.show else kind_of(text), flush=True)
            elif took > 5:
                print("passed", shown, flush=True)
    summarize(failed, left_out)
    print(f"{passed} of {total} pass ({passed / max(total, 1):.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
