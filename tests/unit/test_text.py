"""Names and values that try to be code, in every text that is generated."""

from __future__ import annotations

import enum
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import inspect
from thunder_fn.errors import CaptureError, JitError
from thunder_fn.executors.torch_executor import lower
from thunder_fn.extend import OperatorExecutor
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import ops
from thunder_fn.ir.text import identifier, is_usable, literal_text, program_text, shown
from thunder_fn.ir.trace import TensorType, TraceBuilder

UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")
CODE = "getattr(__import__('sys'),'__dict__').update(code_ran=1)"
NAMES = (
    *(f"x{end}    {CODE}  #" for end in ("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029", "\0")),
    *(f"x{end}{CODE}{end}" for end in ("'", '"', "'''", '"""', "')", '")', "\\", "{", "}", "#", ";", "%s")),
    *(CODE, "</script><script>alert(1)</script>", "]]><x>", "*/ #error /*", "[red]x[/x]", "\x1b[31m", "\u202e"),
    *("\ud800", "\udfff", "class", "None", "self", "args", "kwargs", "__import__", "__builtins__", "torch", "math"),
    *("float", "range", "int", "zip", "v0", "v1", "s0", "y0", "x0", "a0", "l0", "r0", "choice", "run", "result", "_"),
    *(
        "__",
        "_lines",
        "_taken",
        "ﬁ",
        "\uff56\uff10",
        "²",
        "٣",
        "µ",
        "x" * 10_000,
        "{0}",
        "%(x)s",
        " ",
        "a b",
        "\t",
        "ß'\"\n",
    ),
)
TEXTS = st.text(st.characters(), max_size=20) | st.sampled_from(NAMES)


@pytest.fixture(autouse=True)
def _nothing_runs() -> Iterator[None]:
    yield
    assert not vars(sys).pop("code_ran", None), "a name ran as code"


@given(TEXTS)
def test_identifiers_are_usable(name: str) -> None:
    found = identifier(name)
    assert is_usable(found) and identifier(found) in (found, found.strip("_"))
    scope: dict[str, object] = {}
    exec(f"{found} = 1", scope)
    assert scope[found] == 1  # Python itself reads the name as it is


@given(TEXTS)
def test_lines_stay_lines(text: str) -> None:
    whole = program_text([f"x = 1  # {text}", "y = 2"])
    assert len(whole.splitlines()) == 2 and whole.encode()
    scope: dict[str, object] = {}
    exec(whole, scope)
    assert (scope["x"], scope["y"]) == (1, 2)


class Text(str):
    def __repr__(self) -> str:
        return CODE


class Number(float):
    def __repr__(self) -> str:
        return CODE

    __str__ = __repr__


class Whole(int):
    __repr__ = Number.__repr__
    __str__ = Number.__repr__


class Kind(enum.Enum):
    A = CODE

    def __repr__(self) -> str:
        return CODE


@given(TEXTS | st.binary(max_size=9) | st.integers() | st.floats() | st.complex_numbers())
def test_literals_are_what_they_say(value: object) -> None:
    again = eval(literal_text(value, lambda _: pytest.fail("by name")))
    assert type(again) is type(value) and repr(again) == repr(value)


CAREFUL = {
    "long": 10**9999,
    "negative": -(10**9999),
    "float": Number(1.5),
    "nan": Number("nan"),
    "tuple": (Number(-0.0), ["\ud800"]),
}


@pytest.mark.parametrize("kind", CAREFUL)
def test_literals_that_need_care(kind: str) -> None:
    value = CAREFUL[kind]
    assert CODE not in literal_text(value, lambda _: pytest.fail("by name"))
    assert CODE not in literal_text([value], lambda _: pytest.fail("by name"))


@pytest.mark.parametrize(
    "value", [Text("a"), Whole(1), Kind.A, object(), types.SimpleNamespace(__name__=CODE)], ids=range(5)
)
def test_other_objects_go_by_name(value: object) -> None:
    found: list[object] = []
    assert literal_text(value, lambda one: found.append(one) or "name") == "name"
    assert found == [value]


# ---- every writer ----

GROUPS = tuple(NAMES[start::6] for start in range(6))
NUMBERS = pytest.mark.parametrize("number", range(len(GROUPS)))


class Net(nn.Module):
    """A module whose parts, parameters and buffers have these names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict()
        for name in (name.replace(".", "_") for name in names):
            part = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
            self.parts[name if not hasattr(nn.ModuleDict, name) else f"{name} part"] = part
            self.register_buffer(f"{name} buffer", torch.ones(2))
            self.register_parameter(name if not hasattr(self, name) else f"{name} weight", nn.Parameter(torch.ones(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x)
        for parameter in self.parameters(recurse=False):
            x = x * parameter
        for buffer in self.buffers():
            x = x + buffer
        return x


def called(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of this name."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x).cos() + 1

    f.__name__ = f.__qualname__ = f.__module__ = name
    if "\0" not in name and name.isprintable():
        f.__code__ = f.__code__.replace(co_name=name, co_qualname=name)
    return f


def all_called(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that calls composites of these names, and has one of them itself."""
    functions = [tfn.composite(called(name)) for name in GROUPS[number]]

    def f(x: torch.Tensor) -> torch.Tensor:
        for function in functions:
            x = function(x)
        return x

    f.__name__ = f.__qualname__ = GROUPS[number][0]
    return f


def same(got: object, expected: object) -> None:
    torch.testing.assert_close(got, expected)


@NUMBERS
def test_programs(number: int) -> None:
    x, net, f = torch.ones(2), Net(GROUPS[number]), all_called(number)
    same(tfn.jit(net)(x), net(x))
    same(tfn.jit(tfn.vmap(f))(x), f(x))
    same(tfn.jit(tfn.grad(lambda x: f(x).sum()))(x), torch.func.grad(lambda x: f(x).sum())(x))
    for function in (net, f, tfn.checkpoint(f)):
        trace = tfn.trace(function, x)
        expected = evaluate(trace, [x])
        same(trace.python_callable()(x), expected)
        program, module = lower(trace), trace.to_fx()
        same(program(x), expected)
        same(tuple(module(x)), expected)
        for text in (str(trace), program.text, module.print_readable(print_output=False)):
            assert CODE not in "".join(line.partition("#")[0] for line in text.splitlines())


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_of_traces(name: str) -> None:
    """A trace that was built by hand may have any name, and a composite of any name."""
    inner, outer = TraceBuilder(name), TraceBuilder(name)
    v, x = (builder.input(TensorType(torch.float32, (2,))) for builder in (inner, outer))
    body = inner.build(inner.add(ops.leaf(torch.ops.aten.sin.default), (v,), (v.type,)))
    trace = outer.build(outer.add(ops.composite(name), (x,), (x.type,), bodies=(body,)))
    for run in (trace.python_callable(), lower(trace), trace.to_fx()):
        same(run(torch.ones(2))[0], torch.ones(2).sin())
    for text in (str(trace), lower(trace).text):
        assert len(text.splitlines()) == len(text.rstrip("\n").split("\n"))


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_calls(name: str) -> None:
    """Keys of dicts, keyword arguments and strings among arguments and results."""
    x = torch.ones(2)

    def f(tree: dict[str, torch.Tensor], /, mode: str = "", **more: torch.Tensor) -> dict[object, torch.Tensor]:
        return {name: tree[name] * 2, (name, 1): more[name] + len(mode), Text(name): x}

    found = tfn.jit(f, static_argnames="mode")({name: x}, mode=name, **{name: x})
    again = tfn.jit(f)({name: x}, name, **{name: x})
    for key, value in f({name: x}, name, **{name: x}).items():
        same((found[key], again[key]), (value, value))


@NUMBERS
def test_names_beside_variables_of_loops(number: int) -> None:
    """Functions that are written for loops and choices have variables of their own."""
    f, x = all_called(number), torch.ones(2)
    for g in (
        lambda x: tfn.cond(x.sum() > 0, f, torch.cos, (x,)),
        lambda x: tfn.scan(lambda c, y: (f(c), f(y)), x, torch.ones(3, 2))[1],
        lambda x: tfn.while_loop(lambda x: x.sum() < 3, lambda x: (f(x) + 1,), (x,))[0],
    ):
        same(tfn.jit(g)(x), g(x))


def test_operators_beside_variables() -> None:
    own, x = OperatorExecutor("own_names"), torch.ones(2)
    for name in (
        "v0",
        "v1",
        "choice",
        "x0",
        "x1",
        "y0",
        "_",
        "torch",
        "math",
        "float",
        "range",
        "zip",
        "int",
        "_lines",
    ):
        one = own.register_operator(name, fn=lambda x: x + 1, like=lambda x: x + 1)
        for f in (
            lambda x, one=one: tfn.cond(x.sum() > 0, lambda x: one(x) * 2, torch.cos, (x,)),
            lambda x, one=one: tfn.scan(lambda c, y: (one(c), one(y) * 2), x, torch.ones(3, 2))[1],
        ):
            same(tfn.jit(f, executors=[own])(x), f(x))


@NUMBERS
def test_reports(number: int, tmp_path: Path) -> None:
    x = torch.ones(2)
    for f in (Net(GROUPS[number]), all_called(number)):
        saved = inspect.show(f, x).save(tmp_path / "page.html").read_text()
        assert saved.count("<script") == 2
        for report in (inspect.chain, inspect.memory, inspect.residuals, inspect.cost):
            text = str(report(f, x))
            if not text.encode() or len(text.splitlines()) != len(text.split("\n")):
                pytest.fail(f"{report} has lines that it did not write")
        ElementTree.parse(inspect.graph(f, x).save(tmp_path / "picture.svg"))
    inspect.chrome_trace(tmp_path / "chrome.json", all_called(number), x)
    json.loads((tmp_path / "chrome.json").read_text())


class Silent:
    """An object whose own code fails wherever it can."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_errors_show_what_has_no_repr() -> None:
    with pytest.raises(JitError, match="whose repr raises RuntimeError"):
        tfn.jit(Silent())
    assert "\n" not in shown("a\nb") and shown(Text("a")) == CODE


def test_numbers_that_python_does_not_print() -> None:
    """Ints of more than some thousand digits have no decimal text."""
    f = lambda x, n: x * (n % 7)
    torch.testing.assert_close(tfn.jit(f, static_argnums=1)(torch.ones(2), 10**9999), f(torch.ones(2), 10**9999))
    torch.testing.assert_close(tfn.jit(f)(torch.ones(2), 10**9999), f(torch.ones(2), 10**9999))
    assert math.isnan(tfn.jit(lambda x, n: x * n, static_argnums=1)(torch.ones(1), float("nan")).item())


class Asking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Held:
    pass


ODD_NAMES = [name for name in NAMES if UNPRINTABLE.search(name)]


@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_errors_and_reasons(name: str) -> None:
    """Paths of modules, attributes and keys enter messages as one line that a terminal takes."""
    held, box, x = Held(), {name: 1.0}, torch.ones(2)
    setattr(held, name, 1.0)
    net = Net((name,))
    net.parts[f"{name} asks".replace(".", "_")] = Asking()
    messages = list[str]()
    for f in (net, tfn.checkpoint(net), tfn.composite(called(name)), lambda x: x * getattr(held, name) * box[name]):
        jitted = tfn.jit(f)
        try:
            jitted(x)
            setattr(held, name, getattr(held, name) + 1)
            jitted(x)
            box[name] += 1
            jitted(x)
        except CaptureError as error:
            messages.append(str(error))
        messages += map(str, tfn.explain_misses(jitted))
    assert len(messages) == 4
    for message in messages:
        assert not UNPRINTABLE.search(message)


@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_errors_name_functions_and_classes(name: str) -> None:
    def f() -> None: ...

    f.__name__ = name
    odd = type("Odd", (), {})
    odd.__name__ = name.replace("\0", "\n").encode(errors="replace").decode()  # Python asks for that
    for call in (lambda: tfn.jit(f)(torch.ones(2)), lambda: tfn.jit(lambda x: x)(x=odd(), y=1), lambda: tfn.jit(odd())):
        with pytest.raises(Exception) as error:
            call()
        assert not UNPRINTABLE.search(message_of(error.value).replace("\n", ""))
