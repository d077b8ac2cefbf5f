"""Python's operators turn a TypeError into "not implemented" and go on: no error of ours may be lost there."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import thunder_fn as tfn
from thunder_fn.capture import scopes
from thunder_fn.errors import TraceTypeError

NAMES = [name for name in dir(operator) if not name.startswith("__") and callable(getattr(operator, name))]


class Refuses(TorchFunctionMode):
    """Raise a TypeError of the kind that errors of ours are, from within the first function that an operator calls."""

    seen: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or func
        raise TraceTypeError("refused")


def test_every_operator_that_hides_an_error_is_known() -> None:
    x = torch.ones(2)
    hidden: set[Any] = set()
    for name in NAMES:
        for operands in ((x, x), (2, x), (x,)):
            mode = Refuses()
            try:
                with mode:
                    getattr(operator, name)(*operands)
            except TraceTypeError:
                continue
            except Exception:  # noqa: BLE001  # Python's, in the place of ours
                pass
            hidden.add(mode.seen)
    asks = {torch.Tensor.dim, torch.Tensor.__len__}  # of `in` and `length_hint`, which find no number
    assert hidden - {None} - asks <= scopes._OPERATORS
    assert torch.Tensor.add_ in hidden


@pytest.mark.parametrize(
    "operate", [operator.iadd, operator.imul, operator.eq, operator.ne, operator.add, operator.pow]
)
def test_an_error_inside_of_an_operator_reaches_the_user(
    operate: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise TraceTypeError("refused")

    monkeypatch.setattr(scopes.ScopeMode, "_call", refuse)
    with pytest.raises(TraceTypeError, match="refused"):
        tfn.jit(lambda x, y: operate(x, y))(torch.ones(2), torch.ones(2))


def test_comparisons_with_what_is_no_tensor_are_those_of_python() -> None:
    assert tfn.jit(lambda x: (x == "a", x != None))(torch.ones(2)) == (False, True)  # noqa: E711
