"""Texts of traced tensors: as eager's under `compile`; under `jit` an error where a program would hand one on."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn import errors

SEEN: list[str] = []


@dataclasses.dataclass
class Held:
    a: Any


def stored(x: torch.Tensor) -> Any:
    SEEN.append(f"{x}")
    return x * 2


def caught(x: torch.Tensor) -> Any:
    try:
        raise ValueError(f"bad {x}")
    except ValueError as error:
        return x * 2, str(error)


TEXTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "str": lambda x: (x * 2, str(x)),
    "repr": lambda x: (x * 2, repr(x * 2)),
    "f-string": lambda x: (x * 2, f"{x}"),
    "f-string with a format": lambda x: (x * 2, f"{x.sum():.3f}"),
    "format": lambda x: (x * 2, "{a} {b!r}".format(a=x, b=x)),  # noqa: UP032
    "percent": lambda x: (x * 2, "%s" % x),  # noqa: UP031
    "method": lambda x: (x * 2, x.__str__()),
    "ascii": lambda x: (x * 2, ascii(x)),
    "join": lambda x: (x * 2, ",".join(map(str, x))),
    "in a list": lambda x: (x * 2, [str([x, {"a": x}])]),
    "in an object": lambda x: (x * 2, repr(Held(x)), repr(types.SimpleNamespace(a=x))),
    "caught": caught,
    "stored": stored,
}


def outcome(f: Callable[..., Any], x: torch.Tensor) -> str:
    SEEN.clear()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        return f"{f(x)!r} {SEEN} {out.getvalue()}"


IN_PARTS = pytest.mark.filterwarnings("ignore::UserWarning")
"""Warnings that it runs in parts, and Dynamo's."""


@IN_PARTS
@pytest.mark.parametrize("name", TEXTS)
def test_compile_is_eager(name: str) -> None:
    f = TEXTS[name]
    compiled = tfn.compile(f)
    for x in (torch.arange(3.0), torch.arange(3.0) + 1):
        assert outcome(compiled, x) == outcome(f, x)


@IN_PARTS
def test_compile_writes_tensors_from_outside() -> None:
    weight = torch.ones(2)
    compiled = tfn.compile(f := lambda x: (x * 2, f"{weight}"))
    for _ in range(2):
        assert outcome(compiled, weight) == outcome(f, weight)
        weight.add_(1)


@IN_PARTS
def test_compile_prints_in_each_call() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        print(x)
        return x * 2

    compiled = tfn.compile(f)
    for x in (torch.arange(3.0), torch.arange(3.0) + 1):
        assert outcome(compiled, x) == outcome(f, x)


@pytest.mark.parametrize("name", TEXTS)
def test_jit_hands_no_text_on(name: str) -> None:
    with pytest.raises(errors.UnsupportedOutput, match=r"the text of a traced tensor(.|\n)*tfn\.debug\.print"):
        tfn.jit(TEXTS[name])(torch.arange(3.0))


def test_a_text_of_the_users_own_is_no_text_of_a_tracer() -> None:
    f = tfn.jit(lambda x: (x * 2, "Tracer(f32[3])", str(x.shape)))
    assert f(torch.ones(3))[1:] == ("Tracer(f32[3])", "torch.Size([3])")


def test_jit_prints_and_logs_while_tracing(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    logger = logging.Logger("of tracers")
    logger.addHandler(logging.StreamHandler(out))

    def f(x: torch.Tensor) -> torch.Tensor:
        print(x)
        logger.warning("x is %s", x)
        return x * 2

    tfn.jit(f)(torch.arange(3.0))
    assert capsys.readouterr().out == "Tracer(f32[3])\n"
    assert out.getvalue() == "x is Tracer(f32[3])\n"
