"""Runs a program as text in eager PyTorch and in thunder_fn, and says what differs.

A program defines `inputs(n)`, the arguments, `program(T)`, a function and what it closes over, and a PLAN:

    calls      the `n` of each call of the one function
    via        "jit" or "plain" (the function itself, with thunder_fn's transforms in it)
    options    of `jit`
    backward   whether gradients of all leaves are compared after each call; 2: and the gradients of these
    poke       whether results are written to after each call, to see what shares memory with them
    between    a statement that is run between calls, on the list `closed`
    grad_mode  what surrounds the calls: "", "no_grad" or "inference_mode"
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

SECONDS = 60
"""After so long a program is a hang."""
EXECUTORS: tuple[str, ...] = ()
"""The executors of jitted programs, by name; `python -m tests.fuzz --executors inductor` sets them."""

COARSE = (  # what a program mentions, and how far off results may be then, beside their largest
    (re.compile(r"bfloat16|float16|half\(|autocast"), 0.06),
    (re.compile(r"float32|\.float\(|complex64|torch\.long\b.*/"), 2e-4),
)
EXACT = 1e-8

WRITE = re.compile(
    r"\w_\(|[-+*/|&]=|\b[acvx]\d+\[[^\n]*\] ?=(?!=)|\.data|out=|Dirty|\bm\d+\(|rand|dropout|bernoulli|poisson|multinomial"
)
"""Statements that change a tensor, a module or the generator."""
FORWARD = re.compile(r"jvp|linearize|jacfwd|hessian")
GRADIENTS_OFF = re.compile(r"no_grad|set_grad_enabled\(False")
BATCHED = re.compile(r"vmap|jacrev|jacfwd|hessian")


@dataclass
class Outcome:
    """`kind` says what came of a program.

    "same", "skipped" (eager PyTorch refuses it, or its own ways disagree), "refused" (an error of ours), or a difference.
    """

    kind: str
    why: str = ""
    where: str = field(default="", repr=False)

    @property
    def is_difference(self) -> bool:
        return self.kind not in ("same", "skipped", "refused")


@dataclass
class Observed:
    """The observable effects of one call."""

    error: BaseException | None = None
    results: Any = None
    facts: list[Any] = field(default_factory=list)
    values: dict[str, list[Any]] = field(default_factory=dict)


class TooSlow(BaseException):
    pass


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TooSlow in the middle of whatever has taken so much time of the processor: a busy machine is no hang."""

    def ring(*_: Any) -> None:
        raise TooSlow(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # again: what is raised in a finaliser is lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _snapshot(value: Any) -> Any:
    return value.detach().resolve_conj().resolve_neg().clone() if isinstance(value, torch.Tensor) else value


def _facts(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return {"dtype": value.dtype, "shape": tuple(value.shape), "requires_grad": value.requires_grad}


def _module_values(closed: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for one in closed:
        found += [one] if isinstance(one, torch.Tensor) else [*one.parameters(), *one.buffers()]
    return found


def _moved(args: Any, by: float) -> None:
    """Move float arguments by a relative error, to see what hangs on it."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for arg in pytree.tree_leaves(args):
            if isinstance(arg, torch.Tensor) and (arg.is_floating_point() or arg.is_complex()):
                noise = torch.randn(arg.shape, dtype=torch.float64, generator=generator)
                with contextlib.suppress(RuntimeError):
                    arg.mul_(1 + by * noise.to(arg.dtype))


def calls(
    module: dict[str, Any], T: Any, wrap: Callable[[Any], Any], by: float = 0.0, asks_backward: bool = True
) -> Iterator[Observed]:
    """The calls of the plan, one after the other, each with arguments of its own."""
    plan = module["PLAN"]
    torch.manual_seed(11)
    f, closed = module["program"](T)
    f = wrap(f)
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    for count, n in enumerate(plan["calls"]):
        if count and (between := plan.get("between")):
            with torch.no_grad(), contextlib.suppress(RuntimeError, AttributeError):
                exec(between, {"torch": torch, "closed": closed})
        torch.manual_seed(100 + n)
        args = module["inputs"](n)
        if by:
            _moved(args, by)
        seen = Observed()
        torch.manual_seed(1000 + count)
        try:
            with modes.get(plan.get("grad_mode", ""), contextlib.nullcontext)():
                out = f(*args)
            leaves, spec = pytree.tree_flatten(out)
            seen.results = str(spec)
            seen.facts = [_facts(leaf) for leaf in leaves]
            seen.values["result"] = [_snapshot(leaf) for leaf in leaves]
            seen.values["argument"] = [_snapshot(leaf) for leaf in pytree.tree_leaves(args)]
            seen.values["closed over"] = [_snapshot(one) for one in _module_values(closed)]
            seen.facts += [_facts(one) for one in (*pytree.tree_leaves(args), *_module_values(closed))]
            seen.values["generator"] = [torch.get_rng_state().clone()]
            if plan.get("backward") and asks_backward:
                sources = [*pytree.tree_leaves(args), *_module_values(closed)]
                seen.values["gradient"] = _gradients(leaves, sources, plan["backward"] == 2)
            if plan.get("poke"):
                seen.values["memory"] = _poked(leaves, [*pytree.tree_leaves(args), *_module_values(closed)])
        except TooSlow:
            raise
        except Exception as error:  # noqa: BLE001
            seen.error = error
        yield seen
        if seen.error is not None:
            return


def _poked(leaves: list[Any], others: list[Any]) -> list[Any]:
    """Everything after each result was written to, so that it shows what shares memory with what."""
    if any(leaf.is_inference() for leaf in (*leaves, *others) if isinstance(leaf, torch.Tensor)):
        return []  # which nobody may write to
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            with torch.no_grad(), contextlib.suppress(RuntimeError):  # an expanded one, or one of inference mode
                leaf.mul_(0.5).add_(1)
    return [_snapshot(one) for one in (*leaves, *others)]


def _gradients(leaves: list[Any], args: list[Any], twice: bool = False) -> list[Any]:
    loss: Any = 0.0
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            weights = torch.linspace(0.5, 1.5, leaf.numel(), dtype=torch.float64).reshape(leaf.shape) + at
            loss = loss + ((torch.view_as_real(leaf).sum(-1) if leaf.is_complex() else leaf) * weights).sum()
    sources: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor) and not any(arg is one for one in sources):
            sources.append(arg)
            if arg.is_leaf:
                arg.grad = None
    if not isinstance(loss, torch.Tensor):
        return [None for _ in sources]
    if not twice:
        loss.backward()
        return [_snapshot(arg.grad) if arg.is_leaf and arg.grad is not None else None for arg in sources]
    flags = [arg.is_leaf and arg.requires_grad for arg in sources]
    wanted = [arg for arg, flag in zip(sources, flags, strict=True) if flag]
    first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    again: Any = 0.0
    for one in first:
        if one is not None and one.requires_grad:
            again = again + (one.abs() if one.is_complex() else one * one.detach().cos()).sum()
    second: Any = (None,) * len(wanted)
    if isinstance(again, torch.Tensor):
        second = torch.autograd.grad(again, wanted, allow_unused=True)
    pairs = [iter(first), iter(second)]
    found = [next(each) if flag else None for each in pairs for flag in flags]
    return [None if one is None else _snapshot(one) for one in found]


# ---- comparing ----


def tolerance(text: str) -> float:
    """Relative to the largest value: that of the coarsest dtype which the program mentions."""
    return next((found for pattern, found in COARSE if pattern.search(text)), EXACT)


def largest(values: list[Any]) -> float:
    found = [1e-3]
    for value in values:
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()) and value.numel():
            size = value.abs().double()
            size = size[size.isfinite()]
            found.append(float(size.max()) if size.numel() else 0.0)
    return max(found)


def _off(have: Any, want: Any) -> float | None:
    """The distance, None if not comparable."""
    if isinstance(want, torch.Tensor) != isinstance(have, torch.Tensor):
        return None
    if not isinstance(want, torch.Tensor):
        same = type(have) is type(want) and (have == want or (have != have and want != want))
        if isinstance(want, float) and isinstance(have, float) and not same:
            return abs(have - want)
        return 0.0 if same else math.inf
    if have.shape != want.shape or have.dtype != want.dtype:
        return None
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(have, want) else math.inf
    a, b = ((torch.view_as_real(x) if x.is_complex() else x).double() for x in (have, want))
    equal = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(equal, 0.0, (a - b).abs())
    gap = torch.where(gap.isnan(), math.inf, gap)
    return float(gap.max()) if gap.numel() else 0.0


def compare(have: Observed, want: Observed, rtol: float, facts: bool = True) -> Outcome:
    """One call beside another; without `facts` whether results require gradients is left out."""
    if want.error is not None:
        return Outcome("same") if have.error is not None else Outcome("accepts", _first_line(want.error))
    if have.error is not None:
        return Outcome("error", _named(have.error))
    if have.results != want.results:
        return Outcome("structure", f"{have.results} instead of {want.results}")
    for at, (a, b) in enumerate(zip(have.facts, want.facts, strict=True)):
        if isinstance(a, dict) and isinstance(b, dict):
            name = next((name for name in ("dtype", "shape") if a[name] != b[name]), "")
            if name:
                return Outcome(name, f"result {at}: {a[name]} instead of {b[name]}")
        elif a != b:
            return Outcome("type", f"result {at}: {a} instead of {b}")
    scale = max(largest(values) for values in want.values.values())
    for where, values in want.values.items():
        others = have.values.get(where)
        if where == "memory" and not (others and values):
            continue
        if others is None or len(others) != len(values):
            return Outcome(f"value of {where}", "another number of values")
        for at, (a, b) in enumerate(zip(others, values, strict=True)):
            if where == "gradient" and (a is None) != (b is None):  # None is zero
                one = b if a is None else a
                a, b = (torch.zeros_like(one) if x is None else x for x in (a, b))
            off = _off(a, b)
            if off is None or off > rtol * scale:
                text = f"{where} {at} is\n{a}\nbut should be\n{b}" if where != "generator" else "another state"
                return Outcome(f"value of {where}", text)
    for at, (a, b) in enumerate(zip(have.facts, want.facts, strict=True)):
        if facts and isinstance(a, dict) and a != b:
            return Outcome("requires_grad", f"result {at}: {a['requires_grad']} instead of {b['requires_grad']}")
    return Outcome("same")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _named(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "thunder_fn" in frame.filename] or frames[-1:]
    place = f"{inside[-1].filename.rsplit('/', 1)[-1]}:{inside[-1].name}" if inside else ""
    return f"{_first_line(error)} [{place}]"


# ---- one program ----


def load(text: str) -> dict[str, Any]:
    module: dict[str, Any] = {"__name__": "drawn_program"}
    exec(compile(text, "<program>", "exec", dont_inherit=True), module)
    return module


def ours(plan: dict[str, Any]) -> tuple[Any, Callable[[Any], Any]]:
    """thunder_fn's meaning of `T`, and what makes a function ours."""
    import thunder_fn as tfn
    from tests.fuzz.oracles import FUNC

    T = SimpleNamespace(**{name: getattr(tfn, name) for name in vars(FUNC)})
    if plan["via"] == "plain":
        return T, lambda f: f
    options = {**plan.get("options", {}), **({"executors": list(EXECUTORS)} if EXECUTORS else {})}
    return T, lambda f: tfn.jit(f, **options)


def judge(text: str, seconds: int = SECONDS) -> Outcome:
    """Run a program every way and compare."""
    from tests.fuzz.oracles import FUNC, GRAPH

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), time_limit(seconds):
        warnings.simplefilter("ignore")
        try:
            return _judge(text, FUNC, GRAPH)
        except TooSlow as error:
            return Outcome("hang", str(error))
        finally:
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float32)


def is_internal(error: BaseException) -> bool:
    """Test for an error that says of a trace, which the user has not written, that it is wrong: a defect of ours.

    Other errors of the same class tell of a user's mistake, such as branches that return other types.
    """
    from thunder_fn.errors import InvalidTrace, TraceTypeError

    raised_in = [Path(frame.f_code.co_filename).parent.name for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_trace = isinstance(error, TraceTypeError) and raised_in[-1:] in (["ir"], ["interpreters"])
    return is_of_trace or isinstance(error, InvalidTrace)


def _judge(text: str, FUNC: Any, GRAPH: Any) -> Outcome:
    from thunder_fn.errors import ThunderError

    module, rtol = load(text), tolerance(text)
    same = lambda f: f
    plan = module["PLAN"]
    expected = list(calls(module, FUNC, same))
    if "T." in text:
        other = list(calls(module, GRAPH, same))
        if expected[0].error is not None:
            if BATCHED.search(text) and WRITE.search(text):  # a loop writes as often as it has examples
                return Outcome("skipped", "torch.func refuses it, and a loop would write more often")
            if FORWARD.search(text) and GRADIENTS_OFF.search(text):  # where forward mode goes on, and autograd stops
                return Outcome(
                    "skipped", "torch.func refuses it, and autograd's jvp would stop where gradients are off"
                )
            if "inference_mode" in text:  # in which autograd has no graph
                return Outcome("skipped", "torch.func refuses it, and autograd would record nothing")
            if plan.get("grad_mode") and WRITE.search(
                text
            ):  # the history of a write lies outside, where gradients are off
                return Outcome(
                    "skipped", "torch.func refuses it, and autograd's graph would record what is written outside"
                )
            expected, other = other, expected
        if expected[0].error is not None:
            return Outcome("skipped", f"eager: {_first_line(expected[0].error)}")
        pairs = zip(expected, other, strict=False)
        if other[0].error is None and any(compare(a, b, rtol, False).is_difference for a, b in pairs):
            return Outcome("skipped", "torch.func and autograd disagree")
    if expected[0].error is not None:
        return Outcome("skipped", f"eager: {_first_line(expected[0].error)}")
    T, wrap = ours(plan)
    facts = "T." not in text and "torch.func" not in text
    for at, (have, want) in enumerate(zip(calls(module, T, wrap), expected, strict=False)):
        found = compare(have, want, rtol, facts)
        if found.kind == "same":
            continue
        if isinstance(have.error, ThunderError) and not is_internal(have.error):
            foreign = re.search(r"raised \w+ while it was traced", str(have.error)) is not None
            return Outcome("raised" if foreign else "refused", _named(have.error))
        if (
            found.kind.startswith("value")
            and "generator" not in found.kind
            and _is_unstable(module, FUNC, GRAPH, at, want, rtol)
        ):
            return Outcome("skipped", "hangs on the last bits of the arguments")
        if have.error is not None:
            found.where = "".join(traceback.format_exception(have.error))
        found.why = f"call {at}: {found.why}"
        return found
    return Outcome("same")


def beside(text: str, other: str) -> Outcome:
    """Compare thunder_fn's run of a program with eager PyTorch's of another one, which has no quirk of eager's."""
    from tests.fuzz.oracles import FUNC, GRAPH

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), time_limit(SECONDS):
        warnings.simplefilter("ignore")
        try:
            changed = load(other)
        except SyntaxError as error:  # the quirk stands where nothing else can
            return Outcome("no program", _first_line(error))
        expected = list(calls(changed, FUNC, lambda f: f))
        if re.search("setup_context|attempted to call in-place", str(expected[0].error)):  # which autograd takes
            expected = list(calls(changed, GRAPH, lambda f: f))
        if expected[-1].error is not None:
            return Outcome("raises", _first_line(expected[-1].error))
        module = load(text)
        T, wrap = ours(module["PLAN"])
        found = [
            compare(have, want, tolerance(text), facts=False)
            for have, want in zip(calls(module, T, wrap), expected, strict=False)
        ]
        return next((one for one in found if one.kind != "same"), Outcome("same"))


def _is_unstable(module: Any, FUNC: Any, GRAPH: Any, at: int, want: Observed, rtol: float) -> bool:
    """Test whether arguments that are a little different make eager's results as different."""
    for T in (FUNC, GRAPH):
        moved = list(calls(module, T, lambda f: f, by=rtol / 100))
        if len(moved) > at and moved[at].error is None:
            return compare(moved[at], want, rtol / 3).is_difference
    return False


def main(text: str) -> None:
    found = judge(text)
    print(found.kind, found.why, found.where, sep="\n")
    sys.exit(found.is_difference)
