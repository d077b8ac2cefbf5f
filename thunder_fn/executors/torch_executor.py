"""The torch executor: a trace becomes a straight-line Python program of PyTorch calls.

    # torch: add, sin; torch.Tensor: mul_
    def program(v0, v1):
        # Block (h.0)
        v2 = sin(v0)  # f32[2, 2]
        v3 = mul_(v2, v1)  # f32[2, 2] in v2's memory
        del v2
        return (v3,)

Composites are unfolded; a comment names each where it begins. Variables are deleted after their last use.
"""

from __future__ import annotations

import builtins
import keyword
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from thunder_fn import ops, torch_internals as internals
from thunder_fn.errors import InvalidTrace
from thunder_fn.executors.reuse import CLONE, drop_copies, find_aliases, in_place, last_uses, plan_reuse
from thunder_fn.executors.spelling import Spelling, spell
from thunder_fn.executors.tidy import tidy
from thunder_fn.interpreters.simplify import dce
from thunder_fn.pretty import identifier, literal_text, object_name
from thunder_fn.rules import lowered
from thunder_fn.structured.call import CALL, call_options
from thunder_fn.structured.running import bodies_compiled_by
from thunder_fn.trace import Arg, Atom, Equation, Literal, Trace, TraceBuilder, Var

BELOW_AUTOGRAD_FROM = 12
"""Programs of so many calls gain more from running below autograd than entering that mode costs."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program that runs: a function of the trace's inputs, and the text that it was made from."""

    text: str
    run: Callable[..., tuple[Any, ...]]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.run(*inputs)

    def __str__(self) -> str:
        return self.text


def lower(
    trace: Trace, donated: Sequence[int] = (), writes: Sequence[int | None] = (), *, below_autograd: bool = False
) -> Program:
    """Lower a trace to PyTorch calls.

    Law: ``lower(t)(*xs)`` is bitwise ``evaluate(t, xs)``; the memory of inputs is untouched but for donated and
    written ones.

    Args:
        trace: closed and checked.
        donated: inputs, by position, whose memory the program may use. They are dense and share memory with nothing.
        writes: one for each of the last outputs: the input, by position, that it will be written to, or None. The
            program may compute it there, and then returns the very tensor. These inputs share memory with nothing.
        below_autograd: the results need no gradient, so autograd may be skipped.
    """
    flat = unfold(dce(trace).renamed(trace.name), below_autograd)
    return _Emitter(flat, donated, writes, below_autograd).program()


# ---- unfolding ----


@dataclass(frozen=True, slots=True)
class Flat:
    """A trace without composites, and which composites began before each equation."""

    trace: Trace
    notes: dict[int, tuple[str, ...]]

    def without(self, trace: Trace, gone: tuple[int, ...]) -> Flat:
        """The notes moved to where their equations are now that some are gone."""
        notes = dict[int, tuple[str, ...]]()
        for position, texts in self.notes.items():
            place = position - bisect_left(gone, position)
            notes[place] = (*notes.get(place, ()), *texts)
        return Flat(trace, notes)


def unfold(trace: Trace, below_autograd: bool = False) -> Flat:
    """Replace composites by their bodies, all the way down, and drop what need not run."""
    builder, notes = TraceBuilder(trace.name), dict[int, tuple[str, ...]]()
    inputs = tuple(builder.input(var.type) for var in trace.inputs)
    outputs = _unfold(builder, trace, inputs, notes, 0, "")
    flat = Flat(builder.build(outputs), notes)
    flat = flat.without(*drop_copies(flat.trace))
    return flat.without(*tidy(flat.trace, below_autograd=below_autograd))


def _unfold(
    builder: TraceBuilder,
    trace: Trace,
    inputs: tuple[Atom, ...],
    notes: dict[int, tuple[str, ...]],
    depth: int,
    module: str,
) -> tuple[Atom, ...]:
    env: dict[int, Atom] = {var.index: atom for var, atom in zip(trace.inputs, inputs, strict=True)}
    for constant in trace.constants:
        env[constant.var.index] = builder.constant(constant.tensor, constant.var.type, owned=constant.owned)
    for equation in trace.equations:
        body = lowered(equation)
        if body is not None:
            path = equation.source.module if equation.source else ""
            note = f"{'  ' * depth}{_called(equation)}" + (f" ({path})" if path and path != module else "")
            position = len(builder.equations)
            notes[position] = (*notes.get(position, ()), note)
            operands = tuple(env[var.index] for var in equation.operands)
            results = _unfold(builder, body, operands, notes, depth + 1, path or module)
        else:
            results = builder.copy(equation, lambda var: env[var.index])
        env.update((var.index, atom) for var, atom in zip(equation.outputs, results, strict=True))
    return tuple(env[atom.index] if isinstance(atom, Var) else atom for atom in trace.outputs)


def _called(equation: Equation) -> str:
    """What a comment calls an equation whose body follows."""
    return f"call of {call_options(equation)[0]}" if equation.op == CALL else equation.op.name


# ---- emitting ----


class _Emitter:
    """Writes the text of one program and gathers the values that it names."""

    def __init__(self, flat: Flat, donated: Sequence[int], writes: Sequence[int | None], below_autograd: bool) -> None:
        self.trace, self.notes = flat.trace, flat.notes
        self.donated, self.last = tuple(donated), last_uses(flat.trace)
        written = flat.trace.outputs[len(flat.trace.outputs) - len(writes) :]
        pairs = zip(writes, written, strict=True)
        finals = {target: atom.index for target, atom in pairs if target is not None and isinstance(atom, Var)}
        self.in_place = plan_reuse(flat.trace, donated, finals)
        self.private = self.find_private(finals)
        self.may_skip_autograd = below_autograd
        self.below_autograd = below_autograd and len(flat.trace.equations) >= BELOW_AUTOGRAD_FROM
        self.name = identifier(flat.trace.name)
        self.context: dict[str, Any] = {"torch": torch, self.name: None}
        self.context |= {str(constant.var): constant.tensor for constant in flat.trace.constants}
        self.names: dict[Any, str] = {}
        self.homes: dict[str, list[str]] = {}

    def program(self) -> Program:
        lines = list(self.lines())
        header = f"def {self.name}({', '.join(map(str, self.trace.inputs))}):"
        homes = "; ".join(f"{home}: {', '.join(sorted(names))}" for home, names in sorted(self.homes.items()))
        text = "\n".join([*([f"# {homes}"] if homes else []), header, *lines, ""])
        exec(compile(text, f"<thunder_fn {self.name}>", "exec"), self.context)
        return Program(text, self.context.pop(self.name))

    def lines(self) -> Iterator[str]:
        indent = "    "
        yield from (f"    # {var}: {var.type}" for var in self.trace.inputs)
        yield from (f"    # {constant.var}: {constant.var.type} constant" for constant in self.trace.constants)
        if self.below_autograd:
            yield f"    with {self.bind(internals.below_autograd, 'below_autograd', internals.below_autograd)}():"
            indent = "        "
        yield from (indent + line for line in self.body())

    def body(self) -> Iterator[str]:
        overwritten = {self.trace.equations[i].operands[0].index for i in self.in_place}
        for index in self.donated:
            if index in overwritten:
                yield f"v{index} = {self.bind('detach', 'detach', torch.Tensor.detach)}(v{index})  # donated"
        for position, equation in enumerate(self.trace.equations):
            yield from (f"# {note}" for note in self.notes.get(position, ()))
            yield self.line(position, equation)
            dead = self.dead_after(position, equation)
            if dead:
                yield f"del {', '.join(dead)}"
        yield from (f"# {note}" for note in self.notes.get(len(self.trace.equations), ()))
        yield f"return {_tuple_text([self.output(atom) for atom in self.trace.outputs])}"

    def line(self, position: int, equation: Equation) -> str:
        comment = ", ".join(str(var.type) for var in equation.outputs)
        if position in self.in_place:
            comment += f" in v{equation.operands[0].index}'s memory"
        if equation.op.kind == "structured":
            call = self.structured(equation)
        else:
            call = self.leaf(equation, position in self.in_place)
        return f"{call}  # {comment}" if comment else call

    def leaf(self, equation: Equation, overwrite: bool) -> str:
        if overwrite and equation.op == CLONE:
            return f"{equation.outputs[0]} = {equation.args[0]}"
        op = (in_place(equation.op) if overwrite else None) or equation.op
        spelling = spell(op, equation.args, equation.kwargs)
        if not all(key.isidentifier() and not keyword.iskeyword(key) for key, _ in equation.kwargs):
            raise InvalidTrace(f"{equation.op}: a keyword that Python does not allow")
        parts = [self.arg(arg, spelling) for arg in equation.args]
        parts += [f"{key}={self.arg(arg, spelling)}" for key, arg in equation.kwargs]
        return self.assign(equation, f"{self.function(spelling)}({', '.join(parts)})")

    def structured(self, equation: Equation) -> str:
        """A structured op's evaluation rule, called with its bodies."""
        from thunder_fn.interpreters.evaluate import evaluate_rule

        rule, bodies = evaluate_rule(equation), equation.bodies
        name = self.bind((equation.op, bodies), equation.op.name, _run_compiled(rule, bodies, self.may_skip_autograd))
        own = Spelling(name, "torch.ops", rule)
        parts = [self.arg(arg, own) for arg in equation.args]
        parts += [f"{key}={self.arg(arg, own)}" for key, arg in equation.kwargs]
        targets = _tuple_text([str(var) for var in equation.outputs])
        call = f"{name}({', '.join(parts)})"
        return f"{targets} = {call}" if equation.outputs else call

    def assign(self, equation: Equation, call: str) -> str:
        """`v3, v4 = call`, unpacked as the op's schema nests its results."""
        names = [str(var) for var in equation.outputs]
        if not names:
            return call
        lists = ops.lists_returned(equation.op)
        if lists == (False,):
            return f"{names[0]} = {call}"
        if lists == (True,) or not any(lists):
            return f"{_tuple_text(names)} = {call}" if len(names) == 1 else f"{', '.join(names)} = {call}"
        return f"{_tuple_text(names)} = {self.bind('flat', 'flat', ops.flatten_result)}({call})"

    def dead_after(self, position: int, equation: Equation) -> list[str]:
        """The intermediate variables that nothing after this equation reads."""
        first = len(self.trace.inputs) + len(self.trace.constants)
        read = {var.index for var in equation.operands if self.last[var.index] == position and var.index >= first}
        unused = {var.index for var in equation.outputs if self.last[var.index] < 0}
        return [f"v{index}" for index in sorted(read | unused)]

    def output(self, atom: Atom) -> str:
        """What lies in memory that is the trace's own, or is about to be overwritten, is handed out as a copy."""
        if isinstance(atom, Var) and atom.index in self.private:
            return f"{self.bind('clone', 'clone', torch.clone)}({atom})"
        return self.arg(atom, None)

    def find_private(self, writes: Iterable[int]) -> set[int]:
        """The variables that may lie in the memory of an owned constant or of the old value of a written variable."""
        roots = {constant.var.index for constant in self.trace.constants if constant.owned} | set(writes)
        if not roots:
            return set()
        return {index for index, buffers in enumerate(find_aliases(self.trace).buffers) if buffers & roots}

    def arg(self, arg: Arg, spelling: Spelling | None) -> str:
        """An argument. C functions take tuples for lists, which Python folds; overloads are given lists."""
        match arg:
            case Var():
                return str(arg)
            case Literal():
                if isinstance(arg.value, (tuple, list)):
                    return self.arg(tuple(Literal(item) for item in arg.value), spelling)
                return literal_text(arg.value, self.name_object)
            case tuple():
                parts = [self.arg(item, spelling) for item in arg]
                return f"[{', '.join(parts)}]" if spelling and spelling.is_overload else _tuple_text(parts)

    def name_object(self, value: Any) -> str:
        return self.bind(Literal(value), object_name(value), value)

    def function(self, spelling: Spelling) -> str:
        key = (spelling.home, spelling.name)
        if key not in self.names:
            self.homes.setdefault(spelling.home, []).append(self.bind(key, spelling.name, spelling.function))
        return self.names[key]

    def bind(self, key: Any, wanted: str, value: Any) -> str:
        """The name of a value in the program's context: the same one for the same key."""
        if key not in self.names:
            base = name = wanted if wanted.isidentifier() and not keyword.iskeyword(wanted) else identifier(wanted)
            count = 0
            while name in self.context or (hasattr(builtins, name) and name in ("float", "complex", "getattr")):
                count += 1
                name = f"{base}_{count}"
            self.names[key], self.context[name] = name, value
        return self.names[key]


def _run_compiled(rule: Callable[..., Any], bodies: tuple[Trace, ...], below_autograd: bool) -> Callable[..., Any]:
    """A structured op's evaluation rule, its bodies lowered when they are first run."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with bodies_compiled_by(_lower_body), internals.below_autograd() if below_autograd else nullcontext():
            return rule(bodies, *args, **kwargs)

    return run


@lru_cache(maxsize=4096)
def _lower_body(body: Trace) -> Callable[..., tuple[Any, ...]]:
    return lower(body).run


def _tuple_text(parts: list[str]) -> str:
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
