"""The instructions of some code, one step each, in any Python."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from types import CodeType

_SECOND = re.compile("_(?=LOAD_FAST|STORE_FAST)")


def instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of some code. From Python 3.13 on one instruction may load or store
    two locals, such as `STORE_FAST_LOAD_FAST`: it is two here.
    """
    for one in dis.get_instructions(code):
        kinds = _SECOND.split(one.opname)
        if len(kinds) == 1:
            yield one
        else:
            label = getattr(one, "label", None)
            for kind, name in zip(kinds, one.argval, strict=True):
                yield one._replace(opname=kind, argval=name, label=label)
                label = None
