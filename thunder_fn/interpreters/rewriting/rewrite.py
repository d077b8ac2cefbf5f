"""Rewrites: transforms that change how parameters are stored, as three traces.

    compute: (new parameters, the other inputs) -> outputs
    prepare: old parameters -> new parameters
    restore: new parameters -> old parameters

Composing rewrites composes traces, so "quantize, then shard" and "shard, then quantize" are two
compositions of the same values. A rewrite comes from a **Representation** of some parameters. It
has the parts of each and the way back from the parts. It also has the calls that can work on the
parts, such as a linear layer on int8 weights. `represent` is the interpreter that carries
representations through a trace, into bodies, to where they are used. A rule's results may be
represented, too (`Kept`): each rank has a share of a column layer's results, until an op needs all
of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.rewriting.representation import Asked, Kept, Representation, Step
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import ops
from thunder_fn.ir.equations import operands_in
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import INVARIANT, PARTIAL_EVAL, SLICED
from thunder_fn.ir.trace import Atom, Equation, Literal, TensorType, Trace, TraceBuilder, Type, Var
from thunder_fn.ir.walking import inline_into


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A computation on parameters that are stored in another way.

    Laws: ``compute(prepare(p), x)`` is the original on ``restore(prepare(p))`` and x; composition
        is associative, and `identity` is neutral.

    Args:
        compute: its first inputs are the outputs of `prepare`, in order.
        prepare: old parameters to new ones.
        restore: new parameters to old ones.
        names: of the new parameters.
        codes: those of the names that are parts which encode a weight.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> f = lambda w, x: x @ w
        >>> same = tfn.parameters.identity(tfn.trace(f, torch.ones(2, 3), torch.ones(1, 2)), ["w"])
        >>> tfn.lora(same, rank=1).names
        ('w', 'w.lora_a', 'w.lora_b')
    """

    compute: Trace
    prepare: Trace
    restore: Trace
    names: tuple[str, ...] = field(default=())
    codes: frozenset[str] = field(default=frozenset())

    def __post_init__(self) -> None:
        new = self.prepare.output_types
        if self.compute.input_types[: len(new)] != new or self.restore.input_types != new:
            raise RewriteError(
                f"prepare gives ({_texts(new)}), which compute and restore do not take"
            )
        if self.restore.output_types != self.prepare.input_types:
            raise RewriteError("restore does not give back the types that prepare takes")

    def then(self, step: Step) -> Rewrite:
        """Compose this rewrite with a later step on the new parameters."""
        return compose(rewrite(self.compute, self.names, step, self.codes), self)


def identity(trace: Trace, names: Sequence[str]) -> Rewrite:
    """The rewrite that changes nothing; the first inputs of the trace are the parameters of
    these names.

    Law: `compute` is the trace, and `prepare` and `restore` hand the parameters on.

    Raises:
        RewriteError: two parameters have one name, or there are more names than inputs.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(lambda w, x: x @ w, torch.ones(2, 3), torch.ones(1, 2))
        >>> same = tfn.parameters.identity(trace, ["w"])
        >>> same.names, same.compute == trace
        (('w',), True)
    """
    if len(set(names)) < len(names) or len(names) > len(trace.inputs):
        what = f"identity: {len(names)} names, {', '.join(map(repr, names))}"
        raise RewriteError(
            f"{what}, for the first of {len(trace.inputs)} inputs of {trace.name}",
            fix="Give each parameter a name of its own.",
        )
    builder = TraceBuilder("identity")
    same = builder.build(tuple(builder.input(var.type) for var in trace.inputs[: len(names)]))
    return Rewrite(trace, same, same, tuple(names))


def compose(second: Rewrite, first: Rewrite) -> Rewrite:
    """`second` after `first`: it rewrites the parameters that first makes.

    Raises:
        RewriteError: second does not take the parameters that first makes.
    """
    if first.prepare.output_types != second.prepare.input_types:
        given, taken = _texts(first.prepare.output_types), _texts(second.prepare.input_types)
        raise RewriteError(
            f"cannot compose: the first rewrite makes ({given}), the second takes ({taken})"
        )
    prepare = _chain("prepare", first.prepare, second.prepare)
    restore = _chain("restore", second.restore, first.restore)
    return Rewrite(second.compute, prepare, restore, second.names, second.codes)


def _chain(name: str, first: Trace, second: Trace) -> Trace:
    builder = TraceBuilder(name)
    middle = inline_into(builder, first, builder.take(first.input_types))
    return builder.build(inline_into(builder, second, middle))


def _texts(types: Sequence[Type]) -> str:
    return ", ".join(map(str, types))


def rewrite(
    trace: Trace, names: Sequence[str], step: Step, codes: frozenset[str] = frozenset()
) -> Rewrite:
    """Store the parameters, which are the first inputs of a trace, as a step decides.

    Law: ``evaluate(r.compute, [*evaluate(r.prepare, p), *x])`` is ``evaluate(trace, [*q, *x])``
        where ``q = evaluate(r.restore, evaluate(r.prepare, p))``, for steps whose restore is their
        decode.

    Args:
        trace: closed and checked.
        names: of the first inputs, which are tensors.
        step: asked once for each parameter.
        codes: names that steps of weights are not asked about.

    Raises:
        RewriteError: two parts would have one name.
    """
    passed_over = codes if getattr(step, "of_weights", False) else frozenset[str]()
    chosen = tuple(
        None if name in passed_over else _chosen(step, name, var)
        for name, var in zip(names, trace.inputs, strict=False)
    )
    others = (None,) * (len(trace.inputs) - len(chosen))
    parts = [
        (f"{name}.{suffix}" if suffix else name, name in codes or (kept is not None and kept.codes))
        for name, kept in zip(names, chosen, strict=True)
        for suffix in (kept.suffixes if kept else ("",))
    ]
    new_names = tuple(name for name, _ in parts)
    if len(set(new_names)) < len(new_names):
        twice = next(name for name in new_names if new_names.count(name) > 1)
        raise RewriteError(
            f"a step makes a part {twice!r}, which there is already; a weight is changed once in"
            " this way"
        )
    types = [var.type for var in trace.inputs[: len(chosen)]]
    return Rewrite(
        represent(trace, (*chosen, *others)),
        _side_by_side(
            "prepare",
            [
                (kept.encode if kept else None, (type,))
                for kept, type in zip(chosen, types, strict=True)
            ],
        ),
        _side_by_side(
            "restore", [_restored(kept, type) for kept, type in zip(chosen, types, strict=True)]
        ),
        new_names,
        frozenset(name for name, is_code in parts if is_code),
    )


def _chosen(step: Step, name: str, var: Var) -> Representation | None:
    return step(name, var.type) if isinstance(var.type, TensorType) else None


def _restored(kept: Representation | None, type: Type) -> tuple[Trace | None, tuple[Type, ...]]:
    return (None, (type,)) if kept is None else (kept.restore or kept.decode, kept.part_types)


def _side_by_side(name: str, columns: list[tuple[Trace | None, tuple[Type, ...]]]) -> Trace:
    """Traces next to each other, each on inputs of its own; None passes its inputs on."""
    builder, outputs = TraceBuilder(name), list[Atom]()
    for column, types in columns:
        inputs = builder.take(types)
        outputs += inputs if column is None else inline_into(builder, column, inputs)
    return builder.build(tuple(outputs))


# ---- the interpreter ----


Entering = tuple[Representation | None, ...]
"""The representation of the parts that enter the bodies of a loop or a branch, for each operand;
None where no parts do.
"""


@dataclass(frozen=True, slots=True)
class _Parts:
    """A parameter inside a trace that is being rewritten: its parts instead of its value."""

    kept: Representation
    atoms: tuple[Atom, ...]


@memo(4096)
def represent(trace: Trace, representations: tuple[Representation | None, ...]) -> Trace:
    """The trace on the parts of some inputs.

    Law: on the parts of w it computes what the trace computes on ``decode(parts)``.

    Args:
        trace: closed and checked.
        representations: one per input; None leaves it as it is. The inputs of the new trace are the
            parts, in order.
    """
    return _Walk(trace, representations).run(decode=True).trace


@memo(4096)
def _kept(body: Trace, representations: tuple[Representation | None, ...]) -> Kept:
    """A composite's body on parts, its results as parts where that is how they are computed."""
    return _Walk(body, representations).run(decode=False)


@memo(4096)
def _within(body: Trace, representations: Entering) -> Kept:
    """A body of a loop or a branch on parts, its results as they were."""
    return _Walk(body, representations).run(decode=True)


def _inside(equation: Equation, entering: Entering) -> list[Kept]:
    """The bodies of an equation on the parts that go into them."""
    return [_within(body, entering[_first_of_bodies(equation) :]) for body in equation.bodies]


def _entering(kept: Representation, is_constant: bool, is_sliced: bool) -> Representation | None:
    """Return the representation with which an operand enters the bodies of a loop or a branch; None
    for its plain value.
    """
    return kept.slices if is_sliced else kept if is_constant and kept.in_bodies else None


class _Walk:
    """The environment of one trace: atoms, and parts that become atoms where an op needs the
    value.
    """

    def __init__(self, trace: Trace, representations: tuple[Representation | None, ...]) -> None:
        self.trace, self.builder = trace, TraceBuilder(trace.name)
        self.builder.require(trace.constraints)
        self.env: dict[int, Atom | _Parts] = {}
        self.decoded: dict[int, Var] = {}
        self.decoded_inside = set[int]()
        self.forms: dict[tuple[int, Representation], _Parts] = {}
        self.asking = list[tuple[int, Representation]]()
        for var, kept in zip(trace.inputs, representations, strict=True):
            if kept is None:
                self.env[var.index] = self.builder.input(var.type)
            else:
                self.env[var.index] = _Parts(kept, tuple(map(self.builder.input, kept.part_types)))
        for constant in trace.constants:
            tensor, type = constant.tensor, constant.var.type
            self.env[constant.var.index] = self.builder.constant(tensor, type, owned=constant.owned)

    def run(self, decode: bool) -> Kept:
        for equation in self.trace.equations:
            results = self.equation(equation)
            self.env.update(
                (var.index, value) for var, value in zip(equation.outputs, results, strict=True)
            )
        outputs, results = list[Atom](), list[Representation | None]()
        for atom in self.trace.outputs:
            held = self.env[atom.index] if isinstance(atom, Var) else atom
            if isinstance(held, _Parts) and held.kept.of_results and not decode:
                outputs += held.atoms
                results.append(held.kept)
            else:
                outputs.append(self.value(atom) if isinstance(atom, Var) else atom)
                results.append(None)
        decoded = tuple(
            var.index in self.decoded or var.index in self.decoded_inside
            for var in self.trace.inputs
        )
        asked = self.asked()
        return Kept(dce(self.builder.build(tuple(outputs))), tuple(results), decoded, asked)

    def asked(self) -> tuple[Representation | None, ...]:
        """For each input the form in which all that read it want it."""
        uses = Counter(var.index for var in operands_in(self.trace.equations))
        uses.update(atom.index for atom in self.trace.outputs if isinstance(atom, Var))
        wanted = {at: form for (at, form), n in Counter(self.asking).items() if n == uses[at]}
        return tuple(wanted.get(var.index) for var in self.trace.inputs)

    def equation(self, equation: Equation) -> tuple[Atom | _Parts, ...]:
        held = [self.env[var.index] for var in equation.operands]
        entering = self.entering(equation, held)
        if any(entering):
            return self.entered(equation, held, entering)
        while any(isinstance(value, _Parts) for value in held):
            found = self.body(equation, held)
            if found is None:
                known, held = held, self.without_parameters(equation, held)
                if held == known:
                    break
                continue
            if isinstance(found, Asked):
                held = self.in_forms(equation, held, found)
                continue
            needed = self.needed(held, found[1].decoded)
            if not needed:
                self.note_decoded(equation, 0, found[1])
                return self.bound(equation, held, *found)
            held = [
                self.value(var) if at in needed else value
                for at, (var, value) in enumerate(zip(equation.operands, held, strict=True))
            ]
        return self.builder.copy(equation, self.value)

    def without_parameters(
        self, equation: Equation, held: list[Atom | _Parts]
    ) -> list[Atom | _Parts]:
        """Operands where parameters are what they are, and results of equations are still parts:
        an op that knows no such parameter may know such results.
        """
        results = [isinstance(value, _Parts) and value.kept.of_results for value in held]
        if not any(results):
            return held
        pairs = zip(equation.operands, held, results, strict=True)
        return [value if is_result else self.value(var) for var, value, is_result in pairs]

    def in_forms(
        self, equation: Equation, held: list[Atom | _Parts], asked: Asked
    ) -> list[Atom | _Parts]:
        """Operands in the forms that somebody asks for, each converted once."""
        pairs = zip(equation.operands, held, asked.forms, strict=True)
        return [value if form is None else self.in_form(var, form) for var, value, form in pairs]

    def in_form(self, var: Var, form: Representation) -> _Parts:
        """A value in a form."""
        self.asking.append((var.index, form))
        if (var.index, form) not in self.forms:
            held, op = self.env[var.index], ops.composite(f"{form.label}_encode")
            trace = form.converted(held.kept) if isinstance(held, _Parts) else None
            given = held.atoms if trace and isinstance(held, _Parts) else (self.value(var),)
            body = trace or form.encode
            atoms = self.builder.add(op, given, body.output_types, bodies=(body,))
            self.forms[var.index, form] = _Parts(form, atoms)
        return self.forms[var.index, form]

    def entering(self, equation: Equation, held: list[Atom | _Parts]) -> Entering:
        """Tell which operands enter the bodies of a loop or a branch as parts, and what they stand
        for there. A weight that each step needs whole is decoded before the loop. A slice is
        decoded in its step, and a weight of a branch in the branch.
        """
        invariant, sliced = INVARIANT.find(equation.op), SLICED.find(equation.op)
        if invariant is None:
            return ()
        constants = invariant(equation)
        slices = sliced(equation) if sliced is not None else (False,) * len(held)
        found = tuple(
            None if not isinstance(value, _Parts) else _entering(value.kept, is_constant, is_sliced)
            for value, is_constant, is_sliced in zip(held, constants, slices, strict=True)
        )
        if not any(found) or not _is_loop(equation):
            return found
        first = _first_of_bodies(equation)
        needed = {
            first + at
            for kept in _inside(equation, found)
            for at, flag in enumerate(kept.decoded)
            if flag
        }
        places = enumerate(zip(found, constants, strict=True))
        return tuple(
            None if is_constant and at in needed else one for at, (one, is_constant) in places
        )

    def note_decoded(self, equation: Equation, first: int, kept: Kept) -> None:
        """Note that a body decodes some of the operands, which begin with the first of its
        inputs.
        """
        pairs = zip(equation.operands[first:], kept.decoded, strict=False)
        self.decoded_inside.update(var.index for var, flag in pairs if flag)

    def entered(
        self, equation: Equation, held: list[Atom | _Parts], entering: Entering
    ) -> tuple[Atom, ...]:
        """A loop or a branch on parts."""
        operands = [
            self.value(var) if one is None else value
            for var, value, one in zip(equation.operands, held, entering, strict=True)
        ]
        kwargs = dict(equation.kwargs)
        if _is_loop(equation):
            count = kwargs["num_consts"]
            assert isinstance(count, Literal), (
                "the operands of a loop are counted when it is traced"
            )
            kwargs["num_consts"] = Literal(len(_flat(operands[: count.value])))
        inside = _inside(equation, entering)
        if not _is_loop(equation):
            for kept in inside:
                self.note_decoded(equation, _first_of_bodies(equation), kept)
        args, bodies = _flat(operands), tuple(kept.trace for kept in inside)
        types = equation.output_types
        return self.builder.add(
            equation.op,
            args,
            types,
            kwargs=tuple(kwargs.items()),
            bodies=bodies,
            source=equation.source,
        )

    def needed(self, held: list[Atom | _Parts], decoded: tuple[bool, ...]) -> set[int]:
        """The results among the operands that are needed whole inside of a body: they are
        decoded outside of it, once.
        """
        flags = decoded or (False,) * len(held)
        return {
            at
            for at, (value, flag) in enumerate(zip(held, flags, strict=True))
            if flag and isinstance(value, _Parts) and value.kept.of_results
        }

    def bound(
        self, equation: Equation, held: list[Atom | _Parts], by: Representation | None, kept: Kept
    ) -> tuple[Atom | _Parts, ...]:
        """The results of an equation that became a trace on parts, by a rule or by what its body
        became.
        """
        body = kept.trace
        if by is None and equation.op.kind == "structured":
            return self.wrapped(equation, held, kept)
        arguments = _flat(held)
        is_one = len(body.equations) == 1
        is_named = not body.equations or (is_one and body.equations[0].op.kind == "composite")
        if by is not None and (is_named or (is_one and by.of_results)):
            return _grouped(
                inline_into(self.builder, body, arguments, equation.source), kept.results
            )
        word = (
            ops.short_name(equation.op)
            if equation.op.kind == "composite"
            else equation.op.name.split(".")[1]
        )
        op = ops.composite(word if by is None else f"{by.label}_{word}")
        found = self.builder.add(
            op, arguments, body.output_types, bodies=(body,), source=equation.source
        )
        return _grouped(found, kept.results)

    def wrapped(
        self, equation: Equation, held: list[Atom | _Parts], kept: Kept
    ) -> tuple[Atom | _Parts, ...]:
        """The op of an equation, a checkpoint say, around what its body became."""
        body = kept.trace
        found = self.builder.add(
            equation.op,
            _flat(held),
            body.output_types,
            kwargs=equation.kwargs,
            bodies=(body,),
            source=equation.source,
        )
        return _grouped(found, kept.results)

    def body(
        self, equation: Equation, held: list[Atom | _Parts]
    ) -> tuple[Representation | None, Kept] | Asked | None:
        """Rewrite an equation on parts by a representation's rule, or through the body of a
        composite, a checkpoint or a call.

        None for an op that needs the value. A rule or a composite may ask for other forms first.
        """
        kept = tuple(value.kept if isinstance(value, _Parts) else None for value in held)
        for by in dict.fromkeys(one for one in kept if one is not None):
            answer = by.rule(equation, kept)
            if isinstance(answer, Asked):
                return answer
            if answer is not None:
                return by, (
                    answer
                    if isinstance(answer, Kept)
                    else Kept(answer, (None,) * len(answer.outputs))
                )
        is_composite = equation.op.kind == "composite"
        if not is_composite and not has_one_body(equation):
            return None
        found = _kept(equation.body, kept)
        if is_composite and any(found.asked):
            return Asked(found.asked)
        return None, found

    def value(self, var: Var) -> Atom:
        held = self.env[var.index]
        if not isinstance(held, _Parts):
            return held
        if var.index not in self.decoded:
            op = ops.composite(f"{held.kept.label}_decode")
            (self.decoded[var.index],) = self.builder.add(
                op, held.atoms, (held.kept.type,), bodies=(held.kept.decode,)
            )
        return self.decoded[var.index]


def _is_loop(equation: Equation) -> bool:
    return "num_consts" in dict(equation.kwargs)


def _first_of_bodies(equation: Equation) -> int:
    """The operand that is the first input of the bodies."""
    return len(equation.operands) - len(equation.bodies[0].inputs)


def has_one_body(equation: Equation) -> bool:
    """Test whether the equation is an op around one body on its operands: a checkpoint, or a
    call.
    """
    return PARTIAL_EVAL.find(equation.op) is not None


def _flat(held: Sequence[Atom | _Parts]) -> tuple[Atom, ...]:
    """Values, parts one by one."""
    return tuple(
        atom for value in held for atom in (value.atoms if isinstance(value, _Parts) else (value,))
    )


def _grouped(
    atoms: tuple[Atom, ...], results: tuple[Representation | None, ...]
) -> tuple[Atom | _Parts, ...]:
    """Results, parts of one together."""
    supply = iter(atoms)
    return tuple(
        next(supply) if one is None else _Parts(one, tuple(next(supply) for _ in one.part_types))
        for one in results
    )
