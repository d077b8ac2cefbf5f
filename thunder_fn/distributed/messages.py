"""Messages from one rank to another, as leaf ops.

    handle = thunder_fn.send(x, to, tag, group)
    y = thunder_fn.receive(here, shape, dtype, source, tag, group)
    thunder_fn.sent(x, handle)

`send` returns at once, and x travels until `sent`, which reads it: so nobody writes into it before.
`receive` waits; y lies on the device of `here`. Ranks are counted in the group. All three are
effects: no transform drops, repeats or reorders them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.distributed.collectives import SENT, collectives

Tensor = torch.Tensor
_library = torch.library.Library("thunder_fn", "FRAGMENT")
_library.define("send(Tensor x, int to, int tag, str group) -> Tensor")
_library.define(
    "receive(Tensor here, SymInt[] shape, ScalarType dtype, int source, int tag, str group)"
    " -> Tensor"
)
_library.define("sent(Tensor x, Tensor handle) -> ()")


def _as_sent(x: Tensor) -> Tensor:
    """The same memory in a dtype that backends know."""
    if x.is_complex():
        return torch.view_as_real(x)
    return x if x.dtype in SENT else x.view(torch.uint8)


def _send(x: Tensor, to: int, tag: int, group: str) -> Tensor:
    if not x.numel():
        return x.new_empty(0, dtype=torch.uint8)
    return internals.sent_to(_as_sent(x), to, tag, group)


def _receive(
    here: Tensor, shape: Sequence[int], dtype: torch.dtype, source: int, tag: int, group: str
) -> Tensor:
    found = here.new_empty(shape, dtype=dtype)
    if found.numel():
        internals.receive_into(_as_sent(found), source, tag, group)
    return found


def _sent(x: Tensor, handle: Tensor) -> None:
    if x.numel():
        collectives.wait_tensor(handle)


for _name, _run in (("send", _send), ("receive", _receive), ("sent", _sent)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")


def _fake_send(x: Tensor, to: int, tag: int, group: str) -> Tensor:
    return x.new_empty(0, dtype=torch.uint8)


def _fake_receive(
    here: Tensor, shape: Sequence[int], dtype: torch.dtype, source: int, tag: int, group: str
) -> Tensor:
    return here.new_empty(shape, dtype=dtype)


def _fake_sent(x: Tensor, handle: Tensor) -> None:
    pass


torch.library.register_fake("thunder_fn::send", _fake_send, lib=_library)
torch.library.register_fake("thunder_fn::receive", _fake_receive, lib=_library)
torch.library.register_fake("thunder_fn::sent", _fake_sent, lib=_library)
