"""Programs as files: what comes back, what is refused and why, and files that somebody has changed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import PortableError, ThunderError, TraceTypeError
from thunder_fn.extend import OperatorExecutor
from thunder_fn.portable.archive import CONSTANTS, MANIFEST, PROGRAM

X = torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[Any], Any]:
    """A program after it was saved and loaded."""

    def keep(program: Any, **options: Any) -> Any:
        tfn.save(program, tmp_path / "program.tfn")
        return tfn.load(tmp_path / "program.tfn", **options)

    return keep


@tfn.custom_vjp
def clipped(x: torch.Tensor) -> torch.Tensor:
    return x * 1


clipped.defvjp(lambda x: (clipped(x), None), lambda _, ct: (ct.clamp(-0.1, 0.1),))


@tfn.custom_jvp
def halved(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


halved.defjvp(lambda primals, tangents: (primals[0].sin(), tangents[0] * 0.5))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:
        return ct * 7


WITH_RULES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "custom_vjp": lambda x: (clipped(x) * 3).sum(),
    "custom_jvp": lambda x: (halved(x) * 3).sum(),
    "autograd.Function": lambda x: Doubled.apply(x.sin()).sum(),
    "stop_gradient": lambda x: (x.detach() * x).sum(),
    "checkpoint": lambda x: tfn.checkpoint(lambda y: y.sin().exp())(x).sum(),
    "budget": lambda x: tfn.checkpoint(lambda y: y.sin().exp(), policy=tfn.checkpoint_policies.budget(48))(x).sum(),
    "names": lambda x: tfn.checkpoint(
        lambda y: tfn.checkpoint_name(y.sin(), "s").exp(),
        policy=tfn.checkpoint_policies.save_only_these_names("s"),
    )(x).sum(),
    "scan": lambda x: tfn.scan(lambda c, row: ((c * row).tanh(), c), x.sum(0), x)[0].sum(),
    "jit": lambda x: tfn.jit(lambda y: y.sin())(x).sum(),
}


@pytest.mark.parametrize("name", WITH_RULES)
def test_a_loaded_function_has_the_derivatives_of_the_saved_one(name: str, kept: Callable[[Any], Any]) -> None:
    """Rules are bodies in a file: reverse mode of a loaded program is that of the function, and so is forward mode."""
    f = WITH_RULES[name]
    g = kept(tfn.jit(f).lower(X))
    assert torch.equal(g(X), f(X))
    assert torch.equal(tfn.grad(g)(X), tfn.grad(f)(X))
    if name != "autograd.Function":  # it has no jvp
        assert torch.equal(tfn.jvp(g, (X,), (X,))[1], tfn.jvp(f, (X,), (X,))[1])
    x = X.clone().requires_grad_()
    g(x).backward()
    assert torch.equal(x.grad, tfn.grad(f)(X))


def test_a_transformed_function_is_saved_as_what_it_became(kept: Callable[[Any], Any]) -> None:
    f = tfn.vmap(tfn.value_and_grad(lambda x: (clipped(x).exp() * x).sum()))
    found, expected = kept(tfn.jit(f).lower(X))(X), f(X)
    assert all(map(torch.equal, found, expected))


def test_parameters_in_codes(kept: Callable[[Any], Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    small, x = tfn.quantize(model), torch.randn(2, 64)
    found = kept(tfn.jit(lambda x: small(x)).lower(x))
    with torch.no_grad():
        assert torch.equal(found(x), small(x))


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class State:
    w: torch.Tensor
    count: int


def test_structures(kept: Callable[..., Any]) -> None:
    """Named tuples and dataclasses are known by name, and their classes come from who loads."""

    def f(state: State, batch: Any, scale: float = 2.0) -> Any:
        state.w.mul_(scale)
        return {"new": State(state.w + 1, state.count), 3: Pair(batch[0][0].sum(), [None, "text", scale])}

    make = lambda: (State(torch.ones(3), 4), ([X], {"b": None, "a": 1.5}))
    lowered = tfn.jit(f).lower(*make())
    with pytest.raises(PortableError, match=r"Pair|State"):
        kept(lowered)
    g, args, own = kept(lowered, classes=[State, Pair]), make(), make()
    found, expected = g(*args), f(*own)
    assert list(found) == list(expected) and isinstance(found[3], Pair) and found[3].b == [None, "text", 2.0]
    assert torch.equal(found["new"].w, expected["new"].w) and found["new"].count == 4
    assert torch.equal(args[0].w, own[0].w), "the argument is written to"
    with pytest.raises(TraceTypeError, match="scale"):
        g(*make(), scale=2.0)  # the call had none


def swapped(a: torch.Tensor, b: torch.Tensor) -> Any:
    old = a.detach()[:2] + 0
    new, other = b.clone(), a.clone()
    a.copy_(new)
    b.copy_(other)
    return old, a * 2


def test_writes_are_made_at_the_end(kept: Callable[[Any], Any]) -> None:
    """A value that is an argument's old one is not that argument after it was written to."""
    make = lambda: (torch.arange(3.0), torch.arange(3.0) + 10)
    args, own, others = make(), make(), make()
    found, expected = kept(tfn.jit(swapped).lower(*make()))(*args), swapped(*own)
    exported = tfn.export(swapped, make()).module()(*others)
    for values in (found, args), (exported, others):
        assert all(map(torch.equal, [*values[0], *values[1]], [*expected, *own]))


CONSTANTS_OF = {
    str(dtype): torch.arange(12).reshape(4, 3).to(dtype)
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.int16)
} | {
    "transposed": torch.randn(3, 4).t(),
    "expanded": torch.randn(3).expand(4, 3),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(float("nan")),
    "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


@pytest.mark.parametrize("name", CONSTANTS_OF)
def test_constants_come_back(name: str, kept: Callable[[Any], Any]) -> None:
    tensor = CONSTANTS_OF[name]
    builder = tfn.ir.TraceBuilder()
    once, again = builder.constant(tensor), builder.constant(tensor)
    trace = kept(builder.build((once, again, tfn.ir.Literal(-0.0), tfn.ir.Literal(complex("nan")))))
    (constant,) = trace.constants
    found = constant.tensor
    assert (type(found), found.requires_grad) == (type(tensor), tensor.requires_grad)
    assert found.dtype == tensor.dtype and found.shape == tensor.shape
    if name not in ("expanded", "scalar"):
        assert found.stride() == tensor.stride()
    assert found.tolist() == tensor.tolist() or name == "scalar"
    assert str(trace.outputs[2].value) == "-0.0"


def test_equal_programs_make_equal_files(tmp_path: Path) -> None:
    f = lambda x: tfn.scan(lambda c, row: (c + row, c), x[0], x)[0] @ torch.ones(3, 3)
    for name in "ab":
        tfn.save(tfn.trace(f, X), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def asked(equation: Any) -> bool:
    return True


@tfn.custom_vmap
def looped(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


looped.def_vmap(lambda size, batched, x: (x.sin(), True))
own_executor = OperatorExecutor("portable_tests")
outside = own_executor.register_operator("outside", fn=lambda x: x + 1, meta=lambda x: x)
generator = torch.Generator()
counted = torch.zeros(())
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "policy": (lambda x: tfn.checkpoint(torch.sin, policy=asked)(x), "a function cannot be written as data: asked"),
    "custom_vmap": (lambda x: looped(x), "custom_vmap: the rule of looped is Python code"),
    "opaque": (lambda x: outside(x), "cannot be written as data"),
    "print": (lambda x: tfn.debug.print("{}", x) or x, "calls a Python function, which is not saved"),
    "generator": (lambda x: x + torch.rand(3, generator=generator), "a Generator cannot be written as data"),
    "outside": (lambda x: counted.add_(x.sum()), "changes a tensor that it closes over"),
    "twice": (lambda x: (lambda a, b: a + b)(x, x), ""),
}


@pytest.mark.parametrize("name", [name for name, (_, text) in REFUSED.items() if text])
def test_refused(name: str, tmp_path: Path) -> None:
    f, text = REFUSED[name]
    with pytest.raises(PortableError) as raised:
        tfn.save(tfn.jit(f).lower(X), tmp_path / "f")
    assert text in message_of(raised.value)
    assert not list(tmp_path.iterdir()), "no file is left"


def test_refused_calls(tmp_path: Path) -> None:
    save = lambda program: tfn.save(program, tmp_path / "f")
    with pytest.raises(PortableError, match="a tensor is passed twice"):
        save(tfn.jit(lambda a, b: a + b).lower(X, X))
    with pytest.raises(PortableError, match="expected a trace or a lowered function, given a function"):
        save(lambda x: x)
    with pytest.raises(PortableError, match="is static"):
        save(tfn.jit(lambda a, n: a + n, static_argnums=1).lower(X, 2))


# ---- files ----


def _file(tmp_path: Path) -> Path:
    w, path = torch.randn(3, 3), tmp_path / "good"
    f = lambda x: tfn.scan(lambda c, row: ((c + row @ w) * x.shape[0], c), x[0], x)[0]
    tfn.save(tfn.jit(f, dynamic={"x": {0: (2, 9)}}).lower(X), path)
    return path


def _members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _written(path: Path, members: dict[str, bytes], *, signed: bool = True, **manifest: Any) -> Path:
    """A file with these members, its digests right."""
    known = json.loads(members[MANIFEST]) | manifest
    if signed:
        known["sha256"] = {n: hashlib.sha256(c).hexdigest() for n, c in members.items() if n != MANIFEST}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (members | {MANIFEST: json.dumps(known).encode()}).items():
            archive.writestr(name, content)
    return path


def test_why_a_file_cannot_be_read(tmp_path: Path) -> None:
    good = _file(tmp_path)
    members, bad = _members(good), tmp_path / "bad"
    data = json.loads(members[PROGRAM])
    place = next(i for i, op in enumerate(data["ops"]) if op[1] == "aten.mm.default")
    with_op = lambda kind, name: {
        **members,
        PROGRAM: json.dumps(
            data | {"ops": [op if i != place else [kind, name] for i, op in enumerate(data["ops"])]}
        ).encode(),
    }
    cases: list[tuple[Path, str]] = [
        (
            _written(tmp_path / "version", members, version=2),
            "version 2 of the format, and this thunder_fn reads version 1",
        ),
        (_written(tmp_path / "format", members, format="other"), "is not a program of thunder_fn"),
        (_written(tmp_path / "digest", members | {PROGRAM: members[PROGRAM] + b" "}, signed=False), "digests differ"),
        (_written(tmp_path / "op", with_op("leaf", "lib.missing.default")), "no op lib.missing.default"),
        (_written(tmp_path / "getattr", with_op("leaf", "__class__.__init__.x")), "no op __class__"),
        (_written(tmp_path / "effect", with_op("leaf", "aten.add_.Tensor")), "aten.add_.Tensor has an effect"),
        (_written(tmp_path / "file", with_op("leaf", "aten.from_file.default")), "reads a file"),
        (_written(tmp_path / "structured", with_op("structured", "eval")), "no structured op eval"),
        (_written(tmp_path / "more", members | {"code.py": b"1"}), "is none of `tfn.save`'s"),
        (_written(tmp_path / "less", {k: v for k, v in members.items() if k != CONSTANTS}), "constants are missing"),
    ]
    bad.write_bytes(good.read_bytes()[:-40])
    (tmp_path / "text").write_text("hello")
    cases += [(bad, "cut or no program"), (tmp_path / "text", "cut or no program")]
    for path, text in cases:
        with pytest.raises(PortableError) as raised:
            tfn.load(path)
        assert text in message_of(raised.value), path.name
    with pytest.raises(FileNotFoundError):
        tfn.load(tmp_path / "nothing")


def _text(program: Any) -> str:
    return f"{program.trace} {program.relations} {program.arguments}"


def test_any_changed_byte_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    good = _file(tmp_path)
    content, expected, draw = good.read_bytes(), _text(tfn.load(good)), random.Random(0)
    for _ in range(100):
        at, bad = draw.randrange(len(content)), bytearray(content)
        bad[at] ^= 1 << draw.randrange(8)
        cut = bytes(bad) if draw.random() < 0.8 else content[:at]
        (tmp_path / "bad").write_bytes(cut)
        try:
            found = _text(tfn.load(tmp_path / "bad"))
        except ThunderError:
            continue
        assert found == expected


def _mutated(data: Any, draw: random.Random) -> Any:
    """The data with one part of it replaced, dropped or moved."""
    if isinstance(data, (list, dict)) and data and draw.random() < 0.9:
        keys = list(range(len(data))) if isinstance(data, list) else list(data)
        key, new = draw.choice(keys), data.copy()
        if draw.random() < 0.1:
            del new[key]
        else:
            new[key] = _mutated(data[key], draw)
        return new
    return draw.choice([None, -1, 0, 1, 2, 10**30, "x", "__class__", [], {}, [0], {"int": 1}, 1.5, True])


def test_a_forged_file_is_an_error_of_ours_or_a_trace(tmp_path: Path) -> None:
    """Digests keep nobody from writing another program. Whatever it says, it is data."""
    members, draw, loaded = _members(_file(tmp_path)), random.Random(0), 0
    data = json.loads(members[PROGRAM])
    for _ in range(100):
        forged = members | {PROGRAM: json.dumps(_mutated(data, draw)).encode()}
        try:
            found = tfn.load(_written(tmp_path / "forged", forged))
        except ThunderError:
            continue
        str(getattr(found, "trace", found))
        loaded += 1
    assert loaded < 50


LATE = {
    "torch._dynamo",
    "torch._inductor",
    *(f"thunder_fn.{name}" for name in ("inspect", "optim", "parameters", "planning", "portable", "recipes")),
}
"""Modules that no program waits for which does not ask for them."""


def test_another_process_runs_a_saved_step_and_traces_nothing(tmp_path: Path) -> None:
    """It starts without Dynamo, whose import takes longer than all else, and without what few programs need. So does
    a first jitted call.
    """
    step = tfn.jit(tfn.value_and_grad(lambda w, x: (x @ w).sin().sum()))
    w, x = torch.ones(3), X
    tfn.save(step.lower(w, x), tmp_path / "step")
    text = (
        "import sys, torch, thunder_fn as tfn\n"
        f"late = {LATE}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)\n"
        "step = tfn.load(sys.argv[1])\n"
        "value, grad = step(torch.ones(3), torch.linspace(-1, 1, 12).reshape(4, 3))\n"
        "print(value.item(), grad.tolist(), 'torch._dynamo' in sys.modules)\n"
        "tfn.jit(lambda x: x.sin().relu().sum())(torch.ones(3, requires_grad=True)).backward()\n"
        "tfn.jit(tfn.vmap(tfn.grad(lambda x: x.sin().sum())))(torch.ones(3, 2))\n"
        "late -= {'thunder_fn.portable'}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)"
    )
    command = [sys.executable, "-c", text, str(tmp_path / "step")]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    value, grad = step(w, x)
    assert found == f"{value.item()} {grad.tolist()} False"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"save: there is no folder '.*none' for 'f\.tfn'"):
        tfn.save(tfn.trace(torch.sin, X), tmp_path / "none" / "f.tfn")
