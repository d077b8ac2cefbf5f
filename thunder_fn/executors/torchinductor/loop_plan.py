"""Loops as they are compiled, in whatever language: the step as a region, and how operands and
results lie in memory.

Carries are contiguous inside a loop; at the end they are laid out as eager's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from thunder_fn.executors.torchinductor.codegen import Job, RegionError, Strides
from thunder_fn.executors.torchinductor.loop_sums import Sum, sums_of, without_sums
from thunder_fn.extend.regions import CLONE, SCAN, WHILE, Loop, While, evaluate
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Literal,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    static_shape,
)
from thunder_fn.ir.walking import inline_into
from thunder_fn.torch_internals import inductor as internals

OVERLAPS = "a loop's carry has elements that share memory"
UNSETTLED = "a loop's carry has another layout after each step"


def is_loop(region: Trace) -> bool:
    """Test whether the region is one loop and nothing else."""
    return len(region.equations) == 1 and region.equations[0].op in (SCAN, WHILE)


@dataclass(frozen=True, slots=True)
class Step:
    """A body as a region: every output a contiguous tensor of its own, each once. `places` says
    which output is which.
    """

    trace: Trace
    strides: tuple[Strides, ...]
    places: tuple[int, ...]

    @staticmethod
    def of(body: Trace, strides: Sequence[Strides]) -> Step:
        """The step of a body whose inputs have these strides."""
        found = _eager_strides(body, strides)
        builder = TraceBuilder("step")
        inputs: tuple[Atom, ...] = builder.take(body.input_types)
        results = inline_into(builder, body, inputs)
        places: dict[Atom, int] = {}
        outputs: list[Atom] = []
        for atom, given in zip(results, found, strict=True):
            if atom not in places:
                places[atom] = len(outputs)
                type = tensor_type(atom)
                if atom in inputs or not is_contiguous(static_shape(type), given):
                    memory_format = (("memory_format", Literal(torch.contiguous_format)),)
                    (atom,) = builder.add(CLONE, (atom,), (type,), kwargs=memory_format)
                outputs.append(atom)
        return Step(
            builder.build(tuple(outputs)), tuple(strides), tuple(places[atom] for atom in results)
        )


def tensor_type(atom: Atom) -> TensorType:
    """The type of a variable of a loop: all are tensors."""
    if not isinstance(atom, Var) or not isinstance(atom.type, TensorType):
        raise RegionError("a step of a loop gives something that is no tensor")
    return atom.type


def is_contiguous(shape: Sequence[int], strides: Strides) -> bool:
    """Test whether such a tensor lies in memory in the order of its elements, without gaps."""
    return _that_matter(shape, strides) == contiguous_strides(shape)


def _that_matter(shape: Sequence[int], strides: Strides) -> Strides:
    """The strides; those that say nothing, of dims of size 1 or where there is nothing, are as
    if it were contiguous.
    """
    plain = contiguous_strides(shape)
    if 0 in shape:
        return plain
    return tuple(
        other if size == 1 else stride
        for size, stride, other in zip(shape, strides, plain, strict=True)
    )


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """The strides of a contiguous tensor."""
    found, step = list[int](), 1
    for size in reversed(shape):
        found.insert(0, step)
        step *= max(size, 1)
    return tuple(found)


def _overlaps(shape: Sequence[int], strides: Strides) -> bool:
    """Test whether elements share memory otherwise than by being repeated along a dim."""
    reach = 0
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if stride
    ):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _eager_strides(body: Trace, strides: Sequence[Strides]) -> tuple[Strides, ...]:
    """The strides of what eager computes from inputs of these."""
    with internals.fakes_of(()):
        return tuple(value.stride() for value in evaluate(body, _fakes(body, strides)))


def _fakes(trace: Trace, strides: Sequence[Strides]) -> list[torch.Tensor]:
    types = [tensor_type(var) for var in trace.inputs]
    return [
        torch.empty_strided(static_shape(type), given, dtype=type.dtype, device=type.device)
        for type, given in zip(types, strides, strict=True)
    ]


def loop_on_fakes(region: Trace, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A loop on tensors without values: layouts settle within a few steps, so it takes no more.

    Raises:
        RegionError: they do not, or a while_loop's would tell whether there was a step.
    """
    (equation,) = region.equations
    given = tuple(inputs[var.index] for var in equation.operands)
    if equation.op == WHILE:
        consts, carry = While.of(equation).parts(given)
        outputs = evaluate(equation.bodies[1], (*consts, *carry))
        _check_settled(carry, outputs)
    else:
        loop = Loop.of(equation)
        consts, carry, xs = loop.parts(given)
        last, ys = carry, ()
        for _ in range(min(loop.steps, 4)):
            last = carry
            carry, ys = loop.results(
                evaluate(equation.body, (*consts, *carry, *(x[0] for x in xs)))
            )
        if loop.steps > 4:
            _check_settled(last, carry)
        outputs = (*carry, *(y.new_empty((loop.steps, *y.shape)) for y in ys))
    return tuple(
        outputs[equation.outputs.index(atom)] for atom in region.outputs if isinstance(atom, Var)
    )


def _check_settled(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
    for old, new in zip(before, after, strict=True):
        if _that_matter(old.shape, old.stride()) != _that_matter(new.shape, new.stride()):
            raise RegionError(UNSETTLED)


@dataclass(frozen=True, slots=True)
class Rows:
    """The factors that steps multiply for a sum. Each is a matrix of `shape`: slices of an operand
    (`of` is "x") or a result of the step.
    """

    of: str
    number: int
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """A loop: its operands as the region's inputs, the steps, the strides that its carries have at
    the end.

    `sums` are carries that the steps do not have, by number, and the factors of each.
    """

    equation: Equation
    region: Trace
    num_consts: int
    num_carry: int
    steps: tuple[Step, ...]
    x_strides: tuple[int, ...]
    final: tuple[Strides, ...]
    sums: tuple[tuple[int, tuple[tuple[Rows, Rows], ...]], ...] = ()

    @staticmethod
    def of(job: Job, *, has_sums: bool = False) -> Plan:
        """Plan how a job's loop is compiled.

        Args:
            has_sums: carries that are sums of products are left to whoever runs the steps.

        Raises:
            RegionError: a carry has another layout after each step.
        """
        (equation,) = job.region.equations
        strides = [job.static_strides[var.index] for var in equation.operands]
        types = [tensor_type(var) for var in equation.operands]
        if equation.op == SCAN:
            loop = Loop.of(equation)
            num_consts, num_carry, body = loop.num_consts, loop.num_carry, equation.body
        else:
            num_consts, body = While.of(equation).num_consts, equation.bodies[1]
            num_carry = len(equation.operands) - num_consts
        last = num_consts + num_carry
        shapes = [static_shape(type) for type in types]
        inner = [
            *strides[:num_consts],
            *(contiguous_strides(shape) for shape in shapes[num_consts:last]),
            *(given[1:] for given in strides[last:]),
        ]
        final = _final_strides(
            body, (num_consts, num_carry), [*strides[:last], *inner[last:]], equation
        )
        x_strides = tuple(given[0] for given in strides[last:])
        if has_sums and equation.op == SCAN and (sums := sums_of(equation)):
            rows, results = _rows(equation, sums, inner[last:], x_strides)
            kept = [
                given for number, given in enumerate(inner) if number - num_consts not in dict(rows)
            ]
            steps = (Step.of(without_sums(equation, sums, results), kept),)
            return Plan(equation, job.region, num_consts, num_carry, steps, x_strides, final, rows)
        steps = tuple(Step.of(one, inner) for one in equation.bodies)
        return Plan(equation, job.region, num_consts, num_carry, steps, x_strides, final)

    @property
    def is_scan(self) -> bool:
        """Test for a scan; otherwise it is a while_loop."""
        return self.equation.op == SCAN

    @property
    def kept(self) -> tuple[int, ...]:
        """The numbers of the carries that the steps have."""
        return tuple(number for number in range(self.num_carry) if number not in dict(self.sums))

    @property
    def xs(self) -> tuple[Var, ...]:
        """The operands of which a step sees a slice."""
        return self.equation.operands[self.num_consts + self.num_carry :]

    @property
    def carry(self) -> tuple[Var, ...]:
        """The carries of the first step."""
        return self.equation.operands[self.num_consts : self.num_consts + self.num_carry]

    @property
    def body(self) -> Step:
        """The step itself; before it may come a condition."""
        return self.steps[-1]


def _rows(
    equation: Equation, sums: tuple[Sum, ...], strides: Sequence[Strides], x_strides: Sequence[int]
) -> tuple[tuple[tuple[int, tuple[tuple[Rows, Rows], ...]], ...], tuple[Var, ...]]:
    """The places of the factors of sums, and those among them that are results of the step."""
    _, _, xs = Loop.of(equation).parts(equation.body.inputs)
    first = len(equation.outputs) - len(sums)
    results = list[Var]()

    def found(var: Var) -> Rows:
        k, n = static_shape(tensor_type(var))
        if (
            var in xs
            and is_contiguous((k, n), strides[xs.index(var)])
            and x_strides[xs.index(var)] == k * n
        ):
            return Rows("x", xs.index(var), (k, n))
        if var not in results:
            results.append(var)
        return Rows("result", first + results.index(var), (k, n))

    rows = tuple(
        (one.carry, tuple((found(left), found(right)) for left, right in one.products))
        for one in sums
    )
    return rows, tuple(results)


def _final_strides(
    body: Trace, numbers: tuple[int, int], strides: Sequence[Strides], equation: Equation
) -> tuple[Strides, ...]:
    """The strides of eager's carries after the last step, which must be the same after any
    number of steps.
    """
    num_consts, num_carry = numbers
    consts, xs = strides[:num_consts], strides[num_consts + num_carry :]
    shapes = [
        static_shape(tensor_type(var)) for var in body.inputs[num_consts : num_consts + num_carry]
    ]

    def plain(found: Sequence[Strides]) -> tuple[Strides, ...]:
        return tuple(_that_matter(shape, given) for shape, given in zip(shapes, found, strict=True))

    carries = [plain(strides[num_consts : num_consts + num_carry])]
    for _ in range(3):
        carries.append(plain(_eager_strides(body, (*consts, *carries[-1], *xs))[:num_carry]))
    if any(itertools.starmap(_overlaps, zip(shapes, carries[-1], strict=True))):
        raise RegionError(OVERLAPS)
    if carries[-1] != carries[-2] or (equation.op == WHILE and len(set(carries)) > 1):
        raise RegionError(UNSETTLED)
    steps = Loop.of(equation).steps if equation.op == SCAN else 3
    return carries[min(steps, 3)]


def end_lines(plan: Plan, names: Sequence[str]) -> Iterator[str]:
    """Carries in eager's layout."""
    for name, var, strides in zip(names, plan.carry, plan.final, strict=True):
        shape = static_shape(tensor_type(var))
        if not is_contiguous(shape, strides):
            own = tuple(
                size if stride else min(size, 1)
                for size, stride in zip(shape, strides, strict=True)
            )
            values = f"{name}[{', '.join(f':{size}' for size in own)}]"
            yield (
                f"    {name} = torch.empty_strided({own}, {strides}, dtype={name}.dtype,"
                f" device={name}.device).copy_({values})"
            )
            if own != shape:
                yield f"    {name} = {name}.expand({shape})"


def return_line(plan: Plan, outputs: Sequence[str]) -> str:
    """The region's outputs, in its order."""
    wanted = [
        outputs[plan.equation.outputs.index(atom)]
        for atom in plan.region.outputs
        if isinstance(atom, Var)
    ]
    return f"    return ({''.join(f'{name}, ' for name in wanted)})"


def header_line(plan: Plan) -> str:
    """The beginning of the region's function."""
    return f"def region({', '.join(map(str, plan.region.inputs))}):"
