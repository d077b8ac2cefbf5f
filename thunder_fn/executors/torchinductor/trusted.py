"""Files on disk that only the user can have written.

    ~/.cache/thunder_fn/key        32 random bytes, made by the first process that needs them

Code that is kept on disk runs in the next process, so three things must hold of it. The folder and
the file belong to the user, and nobody else may write to them. An entry begins with a code of
authentication (HMAC) by the user's key, over its name and all that follows. A library is named in
an entry by the digest of its bytes, and the bytes that were checked are the bytes that are loaded.
Files that fail are ignored; a warning names, once, those that others may have written.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from thunder_fn.errors import CacheWarning

SIZE = 32
"""Bytes of a key."""

_known: list[bytes] = []


class Untrusted(Exception):
    """A file is not the user's own, or does not have the written content."""


def key() -> bytes:
    """The user's key. If none can be kept, it is one of this process, whose files serve itself
    and its children.
    """
    if not _known:
        _known.append(_kept_key())
    return _known[0]


def take_key(given: bytes) -> None:
    """Have the key of the process that started this one."""
    _known[:] = [given]


def _kept_key() -> bytes:
    path = Path.home() / ".cache" / "thunder_fn" / "key"
    with contextlib.suppress(OSError, RuntimeError):
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            put(path, lambda target: Path(target).write_bytes(os.urandom(SIZE)), replace=False)
        with contextlib.suppress(Untrusted):
            found = read(path)
            if len(found) == SIZE:
                return found
    return os.urandom(SIZE)


def signed(name: str, text: str) -> str:
    """A text, after its code of authentication under a name."""
    return f"{_code(name, text)}\n{text}"


def opened(name: str, whole: str) -> str:
    """The text that `signed` was given.

    Raises:
        Untrusted: it was not signed under this name by this user, or is cut short.
    """
    code, _, text = whole.partition("\n")
    if not hmac.compare_digest(code.encode(errors="replace"), _code(name, text).encode()):
        raise Untrusted("not signed by this user")
    return text


def _code(name: str, text: str) -> str:
    return hmac.digest(key(), f"{name}\n{text}".encode(errors="surrogatepass"), "sha256").hex()


def read(path: Path) -> bytes:
    """The content of a file of the user's.

    Raises:
        OSError: there is none.
        Untrusted: it, or its folder, belongs to somebody else, or somebody else may write to it.
    """
    check(path.parent, path.parent.stat())
    with path.open("rb") as file:
        check(path, os.fstat(file.fileno()))
        return file.read()


def check(path: Path, found: os.stat_result) -> None:
    """Refuse files that others may have written.

    Raises:
        Untrusted: as it says.
    """
    if not hasattr(os, "geteuid"):
        return
    if found.st_uid != os.geteuid():
        why = f"belongs to user {found.st_uid}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"may be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return
    _warn(str(path), why)
    raise Untrusted(f"{path} {why}")


@cache
def _warn(path: str, why: str) -> None:
    warnings.warn(
        f"{path} {why}, so compiled code in it is left alone\nTake the right to write to it from"
        " others (`chmod go-w`), or set THUNDER_FN_CACHE_DIR to a folder of your own.",
        CacheWarning,
        stacklevel=2,
    )


def make_folder(path: Path) -> None:
    """Make a folder and those above it, for the user alone.

    Raises:
        OSError: it cannot be made, or is not the user's.
    """
    if not path.exists():
        if not path.parent.exists():
            make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    try:
        check(path, path.stat())
    except Untrusted as error:
        raise PermissionError(str(error)) from None


def put(path: Path, fill: Callable[[str], Any], *, replace: bool = True) -> None:
    """Make a file all at once, for the user alone; where another is there already, in its place
    or not at all.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        fill(name)
        if replace:
            os.replace(name, path)
        else:
            _link(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _link(name: str, path: Path) -> None:
    """Move a file to where none is yet. If the disk has no links, the last one to come wins."""
    try:
        os.link(name, path)
    except FileExistsError:
        raise
    except OSError:
        os.replace(name, path)
    else:
        Path(name).unlink()
