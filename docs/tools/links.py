"""Links of pages: written for the repository as it is browsed, and changed to those of the site
when it is built.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
MADE = (
    (r"(tutorials|gallery)/(\w+)\.py", r"\1/\2.md"),
    (r"docs/errors", r"errors/index.md"),
    (r"thunder_fn/__init__\.py", r"api/traces.md"),
    (r"thunder_fn/(\w+)(?:/__init__)?\.py", r"api/\1.md"),
    (r"(ARCHITECTURE|CHANGELOG)\.md", lambda found: f"{found[1].lower()}.md"),
)
"""Files of the repository, and the pages that the site has of them."""


def of_site(markdown: str, page: Path, root: Path) -> str:
    """The text of a page in `docs/` with links to files outside of it changed to the site's
    pages about them.
    """

    def changed(found: re.Match[str]) -> str:
        if ":" in found[0]:
            return found[0]
        target = posixpath.normpath(
            posixpath.join(page.parent.relative_to(root).as_posix(), found[0])
        )
        for pattern, made in MADE:
            if match := re.fullmatch(pattern, target):
                place = made(match) if callable(made) else match.expand(made)
                return os.path.relpath(root / "docs" / place, page.parent).replace(os.sep, "/")
        return found[0]

    return LINK.sub(changed, markdown)
