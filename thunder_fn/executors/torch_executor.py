"""The torch executor: a trace becomes a straight-line Python program of PyTorch calls.

    def program(v0, v1):
        # Block (h.0)
        v2 = sin(v0)  # f32[2, 2]
        v3 = mul_(v2, v1)  # f32[2, 2] in v2's memory
        del v2
        return (v3,)

Composites are unfolded; a comment names each where it begins. Variables are deleted after their
last use. Loops and choices are functions in front (`loops.py`). A claim of another executor is one
call, with its meaning written below it:

    (v2, v3) = multimul(v0, v1, 0, 0)  # f32[2, 2] by myex
        # def multimul(v0, v1): ...
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.watching import made
from thunder_fn.errors import ExecutorError, InvalidTrace, RegionWarning, kind_of, located
from thunder_fn.executors import spoiling
from thunder_fn.executors.base import Executor, FusionExecutor, RunFunction
from thunder_fn.executors.claims import Claim, Claimed, claim
from thunder_fn.executors.eligibility import TORCH, autocasts
from thunder_fn.executors.heap import keep_freed_memory
from thunder_fn.executors.in_front import InFront, in_front
from thunder_fn.executors.lending import Memory
from thunder_fn.executors.loops import Function, function_of
from thunder_fn.executors.names import Names, number_name, number_tensor, stands_for_number
from thunder_fn.executors.private import beside, own, private_variables, with_one_copy
from thunder_fn.executors.reuse import (
    CLONE,
    NO_REUSE,
    Reuse,
    in_place,
    overwritten,
    plan_reuse,
)
from thunder_fn.executors.running import returning_first
from thunder_fn.executors.spelling import Spelling, spell
from thunder_fn.executors.taking import donating, is_worth_handing_over, take
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import facts, ops
from thunder_fn.ir.constraints import close_symbols
from thunder_fn.ir.equations import last_uses
from thunder_fn.ir.memory import is_over_lists
from thunder_fn.ir.memos import kept
from thunder_fn.ir.notebook import Shown
from thunder_fn.ir.pretty import as_comment, binding_line
from thunder_fn.ir.rules import EVALUATE
from thunder_fn.ir.symbols import (
    binders,
    made_by,
    symbols_of,
    symbols_of_options,
    symbols_read,
    unbound_symbols,
)
from thunder_fn.ir.text import identifier, is_keyword_name, literal_text, object_name, tuple_text
from thunder_fn.ir.trace import Arg, Atom, Equation, Literal, Op, TensorType, Trace, Var
from thunder_fn.structured.barrier import BARRIER
from thunder_fn.structured.shared.running import bodies_compiled_by

BELOW_AUTOGRAD_FROM = 12
"""The calls from which running below autograd saves more than entering that mode costs."""


@dataclass(frozen=True, repr=False, slots=True)
class Program(Shown):
    """A program that runs: a function of the trace's inputs, its text, the claims, and the plan for
    memory that nobody needs. `meaning` is the trace from which it was lowered. Programs of one
    function share `memory`. Only these read results from `first_lent` on; None if others do.
    """

    text: str
    run: Callable[..., tuple[Any, ...]]
    claimed: Claimed
    reuse: Reuse
    meaning: Trace | None = None
    memory: Memory | None = None
    first_lent: int | None = None

    @property
    def trace(self) -> Trace:
        """The program's computation: leaves, structured ops, and one composite for each part
        that an executor took.
        """
        return self.claimed.trace

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.run(*inputs)

    def take(self, box: list[Any]) -> tuple[Any, ...]:
        """Run on the values in a list, which is emptied, so that they are freed as soon as that
        may be.
        """
        return take(self.run, box)

    def __str__(self) -> str:
        return self.text


def lower(  # noqa: PLR0913 - options, by keyword
    trace: Trace,
    donated: Sequence[int] | None = (),
    writes: Sequence[int | None] = (),
    *,
    below_autograd: bool = False,
    executors: Sequence[Executor] = (),
    whole: bool = True,
    taken: bool = False,
    memory: Memory | None = None,
    first_lent: int | None = None,
) -> Program:
    """Lower a trace to PyTorch calls, and calls of what other executors take.

    Law: ``lower(t)(*xs)`` is bitwise ``evaluate(t, xs)``, with executors as exactly as their labels
        say; the memory of inputs is untouched but for donated and written ones.

    Args:
        trace: closed and checked.
        donated: inputs, by position, whose memory the program may use. They are dense and share
            memory with nothing. None: autograd follows the program, so it writes to no memory.
        writes: one for each of the last outputs: the input, by position, that it will be written
            to, or None. The program may compute it there, and then returns the very tensor. These
            inputs share memory with nothing.
        below_autograd: the results need no gradient, so autograd may be skipped.
        executors: in order of priority; the torch executor comes after them.
        whole: executors that run whole programs get this one.
        taken: callers hand the inputs over with `take`, and the program lets go of each when it has
            read it last.
        memory, first_lent: as of `Program`, for those who run whole programs.
    """
    keep_freed_memory()
    chosen = (executor.frozen() for executor in executors if executor is not TORCH)
    frozen = tuple(executor for executor in chosen if executor.declines(trace) is None)
    parts = in_front(trace) if whole and any(one.only_gpu for one in frozen) else None
    if parts is not None:
        lent = first_lent and sum(not flag for flag in parts.is_first[:first_lent])
        rest = partial(lower, executors=frozen, memory=memory, first_lent=lent)
        return _lowered_in_two(trace, parts, rest, donated or (), writes, below_autograd)
    claimed = claim(dce(trace).renamed(trace.name), frozen, writes, below_autograd=below_autograd)
    emitter = _Emitter(claimed, frozen, donated, writes, below_autograd, taken=taken)
    program = emitter.program()
    program = replace(program, meaning=trace, memory=memory, first_lent=first_lent)
    made("program", claimed.trace, trace)
    # Who compiles regions comes before who records the whole program.
    ordered = sorted(frozen, key=lambda executor: executor.claims)
    for executor in reversed(ordered) if whole else ():
        program = _finished(executor, program)
    if any(map(autocasts, claimed.trace.equations)):
        program = replace(
            program, run=internals.without_autocast(program.run, partial(take, program.run))
        )
    if spoiling.is_on():
        program = replace(program, run=spoiling.repeated(program.run, trace, donated or ()))
    return program


def _finished(executor: Executor, program: Program) -> Program:
    """The program as an executor runs it.

    Raises:
        ExecutorError: the executor returned something else than a program.
    """
    finished = executor.finish(program)
    if not isinstance(finished, Program):
        raise ExecutorError(
            f"the executor {executor.name}: `finish` must return a program, given"
            f" {kind_of(finished)}: {finished!r}",
            fix="Return `dataclasses.replace(program, run=function)`, or the program as it is.",
        )
    return finished


def _lowered_in_two(
    trace: Trace,
    parts: InFront,
    lower_rest: Callable[..., Program],
    donated: Sequence[int],
    writes: Sequence[int | None],
    below_autograd: bool,
) -> Program:
    """The program of a trace in two: numbers on the CPU, and the rest."""
    sent = len(parts.rest.inputs) - sum(not flag for flag in parts.is_given)
    own = (place for place, flag in enumerate(parts.is_given) if not flag)
    place_of = {place: new for new, place in enumerate(own, start=sent)}
    ends = zip(parts.is_first[len(parts.is_first) - len(writes) :], writes, strict=True)
    first = lower(parts.first, below_autograd=below_autograd)
    rest = lower_rest(
        parts.rest,
        [place_of[place] for place in donated if place in place_of],
        [None if end is None else place_of.get(end) for is_first, end in ends if not is_first],
        below_autograd=below_autograd,
    )
    run = parts.run(first.run, rest.run)
    return replace(rest, text=f"{first.text}\n{rest.text}", run=run, meaning=trace)


# ---- emitting ----


class _Emitter:
    """The writer of one program's text, or of a block in a function; it gathers the values that
    the text names.
    """

    def __init__(
        self,
        flat: Claimed,
        executors: tuple[Executor, ...],
        donated: Sequence[int] | None,
        writes: Sequence[int | None],
        below_autograd: bool,
        names: Names | None = None,
        taken: bool = False,
    ) -> None:
        count = len(flat.trace.outputs) - len(writes)
        written = flat.trace.outputs[count:]
        pairs = zip(writes, written, strict=True)
        finals = {
            target: atom.index
            for target, atom in pairs
            if target is not None and isinstance(atom, Var)
        }
        private = private_variables(flat.trace, finals, flat.region_of)
        flat = replace(flat, trace=with_one_copy(flat.trace, private, count))
        self.claimed, self.executors, self.taken = flat, executors, taken
        self.trace, self.notes, self.private = flat.trace, flat.notes, private
        self.shown: set[Trace] = set()
        self.donated, self.last = tuple(donated or ()), last_uses(flat.trace)
        plan = plan_reuse(flat.trace, self.donated, finals, flat.region_of)
        plan = plan if donated is not None else NO_REUSE
        # autograd may have kept an operand
        self.reuse = plan if below_autograd else replace(plan, given={})
        self.below_autograd = below_autograd
        self.names = names or Names(identifier(flat.trace.name))
        self.name = self.names.name
        self.is_block = names is not None
        self.beside = {} if self.is_block else beside(self.trace, count, flat.region_of)
        self.unbound = set(map(str, symbols_read(flat.trace)))
        if not self.is_block:
            self.names.context |= {
                str(constant.var): constant.tensor for constant in flat.trace.constants
            }

    def program(self) -> Program:
        lines, inputs = list(self.lines()), list(map(str, self.trace.inputs))
        text, run = self.names.function(self.name, inputs, lines, taken=self.taken)
        return Program(text, run, self.claimed, self.reuse)

    def lines(self) -> Iterator[str]:
        indent = ""
        yield from (f"# {var}: {var.type}" for var in self.trace.inputs)
        yield from (
            f"# {constant.var}: {constant.var.type} constant" for constant in self.trace.constants
        )
        if self.below_autograd and _is_long(self.trace):
            below = internals.below_autograd
            yield f"with {self.bind(below, 'below_autograd', below)}():"
            indent = "    "
        yield from (indent + line for line in self.bindings(self.trace.inputs))
        yield from (indent + line for line in self.body())

    def bindings(self, variables: Sequence[Var]) -> Iterator[str]:
        for symbol, (var, dim) in binders(variables).items() if self.unbound else ():
            if str(symbol) in self.unbound:
                self.unbound.remove(str(symbol))
                yield binding_line(symbol, var, dim)

    def body(self) -> Iterator[str]:
        written = {
            var
            for position in self.reuse.in_place
            for var in overwritten(self.trace.equations[position])
        }
        for var in filter(
            written.__contains__, self.overwritten
        ):  # a region gives tensors of its own
            yield f"{var} = {self.bind('detach', 'detach', torch.Tensor.detach)}({var})  # donated"
        yield from (
            *self.statements(),
            *(f"# {note}" for note in self.notes.get(len(self.trace.equations), ())),
        )
        yield from self.names.returned(self.trace.outputs, self.output)

    @property
    def overwritten(self) -> tuple[Var, ...]:
        """The donated inputs that the lines write to."""
        targets = {var.index for var in self.reuse.targets(self.trace)}
        return tuple(self.trace.inputs[index] for index in self.donated if index in targets)

    def statements(self) -> Iterator[str]:
        """The lines of the equations."""
        if self.is_block:
            for constant in self.trace.constants:
                yield (
                    f"{constant.var} ="
                    f" {self.bind(id(constant.tensor), 'constant', constant.tensor)}"
                )
        for position, equation in enumerate(self.trace.equations):
            yield from (f"# {note}" for note in self.notes.get(position, ()))
            dead = self.dead_after(position, equation)
            if given := self.handed_over(equation, dead):
                yield f"{self.bind('given', 'given', None)} = {given}"
                results = set(map(str, equation.outputs))
                yield f"del {', '.join(name for name in dead if name not in results)}"
                dead = [name for name in dead if name in results]
            yield self.line(position, equation, bool(given))
            for var in filter(self.beside.get, equation.outputs):
                names = map(str, (var, *self.beside[var]))
                yield f"{var} = {self.bind(own, 'own', own)}({', '.join(names)})"
            yield from self.bindings(equation.outputs) if made_by(equation) else ()
            if equation.op.kind == "composite" and equation.body not in self.shown:
                self.shown.add(equation.body)
                yield from as_comment(equation.body.renamed(ops.short_name(equation.op)))
            if dead:
                yield f"del {', '.join(dead)}"

    def handed_over(self, equation: Equation, dead: Sequence[str]) -> str:
        """The list of a region's arguments, if the region is to let go of them."""
        if equation.op.kind != "composite" or self.claimed.claim_of(equation).region is None:
            return ""
        last = {var for var in equation.operands if str(var) in dead}
        return (
            f"[{', '.join(self.arguments(equation, None))}]" if is_worth_handing_over(last) else ""
        )

    def line(self, position: int, equation: Equation, given: bool = False) -> str:
        comment = ", ".join(str(var.type) for var in equation.outputs)
        if position in self.reuse.in_place:
            comment += f" in {', '.join(f'{var}' for var in overwritten(equation))}'s memory"
        if equation.op.kind == "structured":
            call = self.structured(equation)
        elif equation.op.kind == "composite":
            call, by = self.claim(equation, given, self.reuse.given.get(position, ()))
            comment += by
        else:
            call = self.leaf(equation, position in self.reuse.in_place)
        text = f"{call}  # {comment}" if comment else call
        self.names.called[text] = equation
        return text

    def leaf(self, equation: Equation, overwrite: bool) -> str:
        if equation.op == BARRIER or (overwrite and equation.op == CLONE):
            return f"{equation.outputs[0]} = {equation.args[0]}"
        op = (in_place(equation.op) if overwrite else None) or equation.op
        if stands_for_number(equation):
            return self.with_number(equation, op)
        spelling = spell(op, equation.args, equation.kwargs)
        if overwrite and is_over_lists(equation.op):
            spelling = replace(spelling, function=returning_first(spelling.function))
        if not all(is_keyword_name(key) for key, _ in equation.kwargs):
            raise InvalidTrace(f"{equation.op}: a keyword that Python does not allow")
        parts = [self.arg(arg, spelling) for arg in equation.args]
        parts += [f"{key}={self.arg(arg, spelling)}" for key, arg in equation.kwargs]
        call = f"{self.function(spelling)}({', '.join(parts)})"
        if spoiling.is_on() and op in facts.EMPTY:
            call = f"{self.bind(spoiling.spoil, 'spoil', spoiling.spoil)}({call})"
        return self.assign(equation, call)

    def with_number(self, equation: Equation, op: Op) -> str:
        """An op of a tensor and a number, which the program holds as a tensor."""
        operand, literal = equation.args
        type = equation.outputs[0].type
        assert isinstance(operand, Var) and isinstance(literal, Literal), "as the test says"
        assert isinstance(type, TensorType), "as the test says"
        spelling = spell(op, (operand, Var(-1, TensorType(type.dtype, ()))), ())
        key = literal, type.dtype
        number = None if key in self.names.names else number_tensor(literal.value, type.dtype)
        name = self.bind(key, number_name(literal.value), number)
        return self.assign(equation, f"{self.function(spelling)}({operand}, {name})")

    def claim(self, equation: Equation, given: bool, donated: tuple[int, ...]) -> tuple[str, str]:
        """A call of an executor's function, with arguments in a list or one by one, and the
        executor's name.
        """
        claim = self.claimed.claim_of(equation)
        run = donating(claim.run or compiled_region(claim), donated)
        name = self.bind((claim.executor, claim.name, id(run)), claim.name, run)
        spelling = Spelling(name, claim.executor.name, run)
        call = f"{name}({', '.join(self.arguments(equation, spelling))})"
        call = (
            f"{self.bind('take', 'take', take)}({name}, {self.bind('given', 'given', None)})"
            if given
            else call
        )
        by = f" by {claim.executor.name}" + "".join(
            f", over {equation.operands[place]}" for place in donated
        )
        return f"{tuple_text(list(map(str, equation.outputs)))} = {call}", by

    def arguments(self, equation: Equation, own: Spelling | None) -> list[str]:
        """The arguments of what an executor runs."""
        parts = [self.arg(arg, own) for arg in equation.args]
        parts += [f"{key}={self.arg(arg, own)}" for key, arg in equation.kwargs]
        return [*parts, *map(str, self.claimed.claim_of(equation).numbers)]

    def structured(self, equation: Equation) -> str:
        """A structured op: a function that has its bodies, or its evaluation rule, called with
        them.
        """
        write = function_of(equation)
        if write is not None:
            numbers = numbers_read(equation)
            name = self.written(write, equation, numbers)
            parts = [*numbers, *map(str, equation.operands)]
        else:
            rule, bodies = EVALUATE.of(equation), equation.bodies
            numbers = tuple(
                dict.fromkeys(symbol for body in bodies for symbol in unbound_symbols(body))
            )
            run = run_compiled(rule, bodies, numbers, self.executors, self.below_autograd)
            name = self.bind((equation.op, bodies), equation.op.name, run)
            own = Spelling(name, "torch.ops", rule)
            parts = [tuple_text(list(map(str, numbers)))] if numbers else []
            parts += [self.arg(arg, own) for arg in equation.args]
            parts += [f"{key}={self.arg(arg, own)}" for key, arg in equation.kwargs]
        call = f"{name}({', '.join(parts)})"
        return (
            f"{tuple_text([str(var) for var in equation.outputs])} = {call}"
            if equation.outputs
            else call
        )

    def written(
        self,
        write: Callable[[FunctionWriter, Equation], Function],
        equation: Equation,
        numbers: tuple[str, ...],
    ) -> str:
        """The name of the function of a structured equation, which is written where it is first
        needed.

        Its first parameters are the symbols that it computes with.
        """
        key = (equation.op, equation.kwargs, equation.bodies)
        if key not in self.names.names:
            name = self.bind(key, equation.op.name, None)
            writer = FunctionWriter(name, self.executors, self.below_autograd, numbers)
            made = write(writer, equation)
            parameters = (*numbers, *made.parameters)
            text, self.names.context[name] = writer.names.function(name, parameters, made.lines)
            self.names.functions.append(text)
        return self.names.names[key]

    def assign(self, equation: Equation, call: str) -> str:
        """`v3, v4 = call`, unpacked as the op's schema nests its results."""
        names = [str(var) for var in equation.outputs]
        if not names:
            return call
        lists = ops.lists_returned(equation.op)
        if lists == (False,):
            return f"{names[0]} = {call}"
        if lists == (True,) or not any(lists):
            return (
                f"{tuple_text(names)} = {call}"
                if len(names) == 1
                else f"{', '.join(names)} = {call}"
            )
        return f"{tuple_text(names)} = {self.bind('flat', 'flat', ops.flatten_result)}({call})"

    def dead_after(self, position: int, equation: Equation) -> list[str]:
        """The variables that are the program's to keep and that nothing after this equation
        reads.
        """
        last = {var.index for var in equation.operands if self.last[var.index] == position}
        first, given = len(self.trace.inputs) + len(self.trace.constants), len(self.trace.inputs)
        read = {index for index in last if index >= first or (self.taken and index < given)}
        unused = {var.index for var in equation.outputs if self.last[var.index] < 0}
        return [f"v{index}" for index in sorted(read | unused)]

    def output(self, atom: Atom) -> str:
        """Write an output; a value in the trace's own memory, or in memory about to be overwritten,
        is handed out as a copy.
        """
        if isinstance(atom, Var) and atom.index in self.private:
            return f"{self.bind('clone', 'clone', torch.clone)}({atom})"
        return self.arg(atom, None)

    def arg(self, arg: Arg, spelling: Spelling | None) -> str:
        """An argument. C functions take tuples for lists, which Python folds; overloads are
        given lists.
        """
        match arg:
            case Var():
                return str(arg)
            case Literal():
                if isinstance(arg.value, (tuple, list)):
                    return self.arg(tuple(Literal(item) for item in arg.value), spelling)
                return literal_text(arg.value, self.name_object)
            case tuple():
                parts = [self.arg(item, spelling) for item in arg]
                return (
                    f"[{', '.join(parts)}]"
                    if spelling and spelling.is_overload
                    else tuple_text(parts)
                )

    def name_object(self, value: Any) -> str:
        return self.bind(Literal(value), object_name(value), value)

    def function(self, spelling: Spelling) -> str:
        key = (spelling.home, spelling.name)
        if key not in self.names.names:
            self.names.homes.setdefault(spelling.home, []).append(
                self.bind(key, spelling.name, spelling.function)
            )
        return self.names.names[key]

    def bind(self, key: Any, wanted: str, value: Any) -> str:
        return self.names.bind(key, wanted, value)


@dataclass(frozen=True, slots=True)
class FunctionWriter:
    """The writer of a structured op's function, as `loops.py` says."""

    name: str
    executors: tuple[Executor, ...]
    below_autograd: bool
    numbers: tuple[str, ...] = ()
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", Names(self.name))

    def flat(self, body: Trace) -> Claimed:
        """The body without composites."""
        return claim(dce(body), self.executors, below_autograd=self.below_autograd)

    def block(self, body: Claimed, donated: Sequence[int] = ()) -> _Emitter:
        """The writer of a body's lines in this function."""
        return _Emitter(body, self.executors, donated, (), self.below_autograd, self.names)

    def call(self, body: Claimed, name: str) -> str:
        """The name of another function, which computes the body."""
        called = self.names.bind(body.trace, name, None)
        body = replace(body, trace=body.trace.renamed(called))
        emitter = _Emitter(body, self.executors, (), (), self.below_autograd)
        parameters = [*self.numbers, *map(str, body.trace.inputs)]
        text, self.names.context[called] = emitter.names.function(
            called, parameters, list(emitter.body())
        )
        self.names.functions.append(text)
        return called

    def bind(self, key: Any, wanted: str, value: Any) -> str:
        """The name of a value: the same one for the same key."""
        return self.names.bind(key, wanted, value)


def _is_long(trace: Trace) -> bool:
    """Test whether the program makes enough calls for running below autograd to pay."""
    is_loop = (equation.op.kind == "structured" and equation.bodies for equation in trace.equations)
    return len(trace.equations) >= BELOW_AUTOGRAD_FROM or any(is_loop)


# ---- callees beside ops: structured ops by their evaluation rule, and regions ----


def numbers_read(equation: Equation) -> tuple[str, ...]:
    """The symbols from outside that the function of a structured equation computes with."""
    found = {
        str(symbol) for body in equation.bodies for symbol in symbols_read(body) & symbols_of(body)
    }
    return tuple(sorted(found.union(map(str, symbols_of_options(equation)))))


def run_compiled(
    rule: Callable[..., Any],
    bodies: tuple[Trace, ...],
    numbers: tuple[Any, ...],
    executors: tuple[Executor, ...],
    below_autograd: bool,
) -> Callable[..., Any]:
    """A structured op's evaluation rule, its bodies lowered when they are first run.

    If bodies read symbols from outside, their values are the first argument.
    """

    def run(values: Mapping[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lowered = partial(_body_function, executors=executors, values=values)
        with (
            bodies_compiled_by(lowered),
            internals.below_autograd() if below_autograd else nullcontext(),
        ):
            return rule(bodies, *args, **kwargs)

    if not numbers:
        return lambda *args, **kwargs: run({}, args, kwargs)
    return lambda values, *args, **kwargs: run(
        dict(zip(numbers, values, strict=True)), args, kwargs
    )


def _body_function(
    body: Trace, executors: tuple[Executor, ...], values: Mapping[Any, Any]
) -> Callable[..., tuple[Any, ...]]:
    """The body's program, given the values of its symbols."""
    if not values:
        return _lower_body(body, executors)
    closed, numbers = close_symbols(body)
    run, given = _lower_body(closed, executors), tuple(values[number.value] for number in numbers)
    return lambda *inputs: run(*inputs, *given)


@kept(4096)
def _lower_body(body: Trace, executors: tuple[Executor, ...]) -> Callable[..., tuple[Any, ...]]:
    return lower(body, executors=executors, whole=False).run


def compiled_region(claim: Claim) -> RunFunction:
    """The function of a region. One that its executor cannot compile runs on the torch executor,
    with a warning.
    """
    region, executor = claim.closed_region, claim.executor
    assert region is not None and isinstance(executor, FusionExecutor), (
        "a claim has a function or a region"
    )
    try:
        return executor.compiled(region)
    except Exception as error:  # noqa: BLE001  # the program runs without the compiler
        return not_compiled(executor, region, claim.name, error)


def not_compiled(executor: Executor, region: Trace, name: str, error: Exception) -> RunFunction:
    """The function of a region that its executor failed to compile, on the torch executor; with
    a warning.
    """
    source = next((equation.source for equation in region.equations if equation.source), None)
    what = (
        f"{executor.name} could not compile the region {name} of {len(region.equations)}"
        " equations, "
    )
    what += f"which runs on the torch executor instead\n{type(error).__name__}: {error}"
    fix = (
        f"The results are right. Leave {executor.name} out of `executors` to run without this"
        " warning."
    )
    warnings.warn(located(what, source=source, fix=fix), RegionWarning, stacklevel=3)
    return lower(region).run
