"""The parts of the build that a table cannot say: the pages of errors inside the wheel, and the
README of the index.
"""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithPages(build_py):
    """Build the package, and put a copy of `docs/errors/` beside `explain.py`, which prints
    them.
    """

    def run(self) -> None:
        """Copy what setuptools copies, then the pages. An editable installation reads them where
        they are.
        """
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "thunder_fn" / "error_pages"
            shutil.copytree(ROOT / "docs" / "errors", folder, dirs_exist_ok=True)


def readme_of_index(text: str, repository: str | None) -> str:
    """The README as an index shows it: relative links lead to the repository; without one,
    pictures are left out.
    """
    if repository is None:
        text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n\n?", "", text, flags=re.MULTILINE)
        return re.sub(r"(?<!!)\[([^]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)
    address = repository.rstrip("/")
    text = re.sub(r"(!\[[^]]*\])\((?!https?:)([^)]*)\)", rf"\1({address}/raw/HEAD/\2)", text)
    return re.sub(
        r"(?<!!)(\[[^]]*\])\((?!https?:|#)([^)]*)\)", rf"\1({address}/blob/HEAD/\2)", text
    )


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text()).get("project", {}).get("urls", {})
    setup(
        cmdclass={"build_py": BuildWithPages},
        long_description=readme_of_index(
            (ROOT / "README.md").read_text(encoding="utf-8"), urls.get("Repository")
        ),
        long_description_content_type="text/markdown",
    )
