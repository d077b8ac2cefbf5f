"""The torch executor: programs are bitwise `evaluate`, readable, and reuse memory only where nobody can tell."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.unit.small_traces import ADD, MUL, SIN, TRACES, blocks, example_inputs, f32, layer_norm, same_bits
from thunder_fn.executors import claim, lower, reuse
from thunder_fn.executors.spelling import spell
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import facts, memory, ops
from thunder_fn.ir.trace import Arg, Literal, Op, TensorType, Trace, TraceBuilder, Var, type_of_value

aten = torch.ops.aten


def outputs_agree(trace: Trace, inputs: list[torch.Tensor], **options: object) -> bool:
    expected = evaluate(trace, [x.clone() for x in inputs])
    try:
        found = lower(trace, **options)(*(x.clone() for x in inputs))  # type: ignore[arg-type]
    except RuntimeError:
        return False
    return len(expected) == len(found) and all(map(same_bits, expected, found))


@pytest.mark.parametrize("make", TRACES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("below_autograd", [False, True])
def test_is_bitwise_evaluate(make, below_autograd) -> None:
    trace = make()
    assert outputs_agree(trace, example_inputs(trace), below_autograd=below_autograd)


def test_text() -> None:
    b = TraceBuilder()
    x, y = b.input(f32(2, 2)), b.input(f32(2, 2))
    (h,) = b.add(SIN, (x,), (f32(2, 2),))
    (h,) = b.add(MUL, (h, y), (f32(2, 2),))
    (h,) = b.add(ADD, (h, Literal(1)), (f32(2, 2),))
    assert str(lower(b.build((h,)))) == (
        "# torch: sin; torch.Tensor: add_, mul_\n"
        "def program(v0, v1):\n"
        "    # v0: f32[2, 2]\n"
        "    # v1: f32[2, 2]\n"
        "    v2 = sin(v0)  # f32[2, 2]\n"
        "    v3 = mul_(v2, v1)  # f32[2, 2] in v2's memory\n"
        "    del v2\n"
        "    v4 = add_(v3, number_1)  # f32[2, 2] in v3's memory\n"
        "    del v3\n"
        "    return (v4,)\n"
    )


def test_notes_stand_before_what_they_name() -> None:
    flat = claim(blocks(2))
    assert flat.notes[0] == ("model.Block (h.0)", "  torch.nn.functional.layer_norm")
    assert flat.notes[2][0] == "model.Block (h.1)"
    assert all(equation.op.kind == "leaf" for equation in flat.trace.equations)


def test_owned_constants_are_not_handed_out() -> None:
    b = TraceBuilder()
    table = b.constant(torch.ones(2, 2), owned=True)
    (row,) = b.add(ops.leaf(aten.select.int), (table, Literal(0), Literal(0)), (f32(2),))
    program = lower(b.build((table, row)))
    first, view = program()
    first.zero_()
    view.zero_()
    assert all(result.eq(1).all() for result in program())


@pytest.mark.parametrize(
    ("overload", "args", "expected"),
    [
        (aten.add.Tensor, (Var(0, f32(2)), Literal(1)), "torch"),
        (aten.reshape.default, (Var(0, f32(2, 2)), (Literal(-1),)), "torch"),
        (aten.gelu.default, (Var(0, f32(2)),), "torch._C._nn"),
        (aten.add_.Tensor, (Var(0, f32(2)), Var(0, f32(2))), "torch.Tensor"),
        (aten.pow.Scalar, (Literal(2), Var(0, f32(2))), "torch"),
        (aten.index.Tensor, (Var(0, f32(2)), (Var(1, TensorType(torch.int64, (2,))),)), "torch.ops"),
        (aten.rand_like.default, (Var(0, f32(2)),), "torch.ops"),
    ],
)
def test_spelling(overload, args, expected) -> None:
    assert spell(ops.leaf(overload), args, ()).home == expected


def test_overloads_that_a_name_would_not_reach_keep_their_own() -> None:
    """torch.mul(x, 2) is mul.Tensor, so mul.Scalar is called as itself."""
    args = (Var(0, f32(2)), Literal(2))
    assert spell(ops.leaf(aten.mul.Scalar), args, ()).is_overload
    assert not spell(ops.leaf(aten.mul.Tensor), args, ()).is_overload


# ---- reuse of memory ----

UNARY = (aten.sin.default, aten.neg.default, aten.relu.default, aten.exp.default, aten.tanh.default)
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor)
VIEWS = (
    (aten.t.default, ()),
    (aten.reshape.default, ((3, 3),)),
    (aten.select.int, (0, 1)),
    (aten.expand.default, ((3, 3),)),
)
COPIES = ((aten.clone.default, ()), (aten.sum.dim_IntList, ([0], True)), (aten.full_like.default, (2.0,)))


def random_trace(seed: int) -> tuple[Trace, list[torch.Tensor]]:
    """A random program of pointwise ops, views, reductions and scatters; inputs, intermediates and views as outputs."""
    rng = random.Random(seed)
    b = TraceBuilder()
    values: list[tuple[Var, torch.Tensor]] = []
    for _ in range(rng.randint(1, 3)):
        value = torch.randn(3, 3, generator=torch.Generator().manual_seed(rng.randrange(1000)))
        values.append((b.input(f32(3, 3)), value))
    inputs = [value for _, value in values]
    values.append((b.constant(torch.full((3, 3), 0.5)), torch.full((3, 3), 0.5)))
    for _ in range(rng.randint(1, 12)):
        overload, args = random_call(rng, values)
        real = [a[1] if isinstance(a, tuple) and isinstance(a[0], Var) else a for a in args]
        try:
            result = overload(*real)
        except (RuntimeError, IndexError):
            continue
        coded = tuple(map(encode, args))
        (var,) = b.add(ops.leaf(overload), coded, (type_of_value(result),))
        values.append((var, result))
    count = rng.randint(1, 3)
    chosen = [rng.choice(values[-4:])[0] for _ in range(count)]
    return b.build(tuple(chosen)), inputs


def encode(arg: object) -> Arg:
    if isinstance(arg, (tuple, list)):
        return arg[0] if arg and isinstance(arg[0], Var) else tuple(map(encode, arg))
    return Literal(arg)


def random_call(rng: random.Random, values: list[tuple[Var, torch.Tensor]]) -> tuple[torch._ops.OpOverload, tuple]:
    def pick() -> tuple[Var, torch.Tensor]:
        return rng.choice(values[-5:])

    match rng.randrange(5):
        case 0:
            return rng.choice(UNARY), (pick(),)
        case 1:
            return rng.choice(BINARY), (pick(), pick())
        case 2:
            return rng.choice(BINARY), (pick(), rng.choice((1, 0.5)))
        case 3:
            overload, args = rng.choice(VIEWS)
            return overload, (pick(), *args)
        case _:
            overload, args = rng.choice(COPIES)
            return overload, (pick(), *args)


SEEDS = range(400)


def wrong_seeds() -> list[int]:
    return [seed for seed in SEEDS if not outputs_agree(*random_trace(seed))]


def test_random_programs_agree_and_leave_inputs_alone() -> None:
    reused = 0
    for seed in SEEDS:
        trace, inputs = random_trace(seed)
        before = [x.clone() for x in inputs]
        constants = [constant.tensor.clone() for constant in trace.constants]
        assert outputs_agree(trace, inputs), f"seed {seed}:\n{trace}\n{lower(trace)}"
        lower(trace)(*inputs)
        assert all(map(same_bits, before, inputs))
        assert all(same_bits(a, c.tensor) for a, c in zip(constants, trace.constants, strict=True))
        reused += "'s memory" in str(lower(trace))
    assert reused > 100


def test_random_programs_with_donated_inputs_agree() -> None:
    for seed in SEEDS:
        trace, inputs = random_trace(seed)
        assert outputs_agree(trace, inputs, donated=range(len(inputs))), f"seed {seed}:\n{trace}"


def test_random_programs_with_writes_agree_and_write_the_right_values() -> None:
    for seed in SEEDS:
        trace, inputs = random_trace(seed)
        if trace.output_types[-1] != f32(3, 3):
            continue
        expected = evaluate(trace, [x.clone() for x in inputs])
        fresh = [x.clone() for x in inputs]
        *found, new = lower(trace, writes=(0,))(*fresh)
        fresh[0].copy_(new)
        assert all(map(same_bits, expected[:-1], found)), f"seed {seed}:\n{trace}"
        assert same_bits(expected[-1], fresh[0]), f"seed {seed}:\n{trace}"


def test_a_planted_alias_bug_is_caught() -> None:
    """Without views in the alias analysis, a buffer that a view still shows would be overwritten."""

    def blind(trace: Trace, region_of: memory.RegionOf = memory.no_region) -> memory.Aliases:
        found = reuse_find_aliases(trace, region_of)
        return replace(found, buffers=tuple(frozenset((index,)) for index in range(len(found.buffers))))

    reuse_find_aliases = reuse.find_aliases
    with mock.patch.object(reuse, "find_aliases", blind):
        assert wrong_seeds()
    assert not wrong_seeds()


def test_a_planted_liveness_bug_is_caught() -> None:
    """Results would be overwritten if outputs did not count as uses."""

    def forgetful(trace: Trace) -> list[int]:
        end = len(trace.equations)
        return [-1 if last == end else last for last in uses(trace)]

    uses = reuse.last_uses
    with mock.patch.object(reuse, "last_uses", forgetful):
        assert wrong_seeds()


def test_in_place_forms() -> None:
    assert reuse.in_place(ADD) == ops.leaf(aten.add_.Tensor)
    assert reuse.in_place(ops.leaf(aten.addcdiv.default)) == ops.leaf(aten.addcdiv_.default)
    assert reuse.in_place(ops.leaf(aten.index_put.default)) == ops.leaf(aten.index_put_.default)
    none = (aten.mm.default, aten.bernoulli.default, aten.t.default, aten.conj_physical.default, aten.cumsum.default)
    for overload in none:
        assert reuse.in_place(ops.leaf(overload)) is None


def dispatched(op: Op) -> bool:
    """Some overloads of TorchScript are unknown to the dispatcher."""
    return torch._C._dispatch_has_kernel(ops.overload(op).name())


def test_every_in_place_form_gives_the_same_bits() -> None:
    """All pointwise ops of one to three tensors that have one, on permuted memory too: same bits, same strides."""
    names = [name for name in dir(aten) if not name.startswith("_")]
    tried = 0
    for name in names:
        packet = getattr(aten, name)
        for variant in packet.overloads() if hasattr(packet, "overloads") else ():
            op = ops.leaf(getattr(packet, variant))
            required = [a for a in ops.overload(op)._schema.arguments if not a.has_default_value()]
            if not required or any(str(a.type) != "Tensor" for a in required) or op in facts.SOME_OVERWRITTEN:
                continue
            written = reuse.in_place(op) if dispatched(op) else None
            if written is None:
                continue
            for layout in (lambda x: x, lambda x: x.t().contiguous().t()):
                xs = [layout(torch.rand(3, 4) + 0.1) for _ in required]
                try:
                    expected = ops.overload(op)(*xs)
                except (RuntimeError, NotImplementedError):
                    continue
                if expected.dtype != xs[0].dtype:
                    continue
                found = ops.overload(written)(*xs)
                assert same_bits(expected, found) and expected.stride() == found.stride(), op
                tried += 1
    assert tried > 80


def test_a_fresh_op_never_returns_its_input() -> None:
    """The table of ops that allocate, tried on ops that may take a short cut."""
    x = torch.ones(3, 3)
    fresh = (
        (aten.clone.default, ()),
        (aten._to_copy.default, ()),
        (aten.sum.dim_IntList, ([],)),
        (aten.mul.Tensor, (1,)),
    )
    for overload, args in fresh:
        assert memory.is_fresh(ops.leaf(overload))
        assert overload(x, *args).data_ptr() != x.data_ptr()
    not_fresh = (
        aten.conj_physical.default,
        aten.dropout.default,
        aten.contiguous.default,
        aten.reshape.default,
        aten.unsafe_split.Tensor,
    )
    assert not any(memory.is_fresh(ops.leaf(overload)) for overload in not_fresh)


def test_layer_norm_keeps_results_that_nobody_reads_no_longer_than_needed() -> None:
    assert "del v3, v4" in str(lower(layer_norm()))


def test_is_dense() -> None:
    x = torch.randn(2, 3)
    assert all(map(reuse.is_dense, (x, x.t(), x[:, :1].contiguous(), torch.ones(()), torch.ones(1, 4)[:, None])))
    assert not any(map(reuse.is_dense, (x[:, :2], x[:1].expand(4, 3), x[:, ::2])))


def test_copies_of_what_was_just_computed_are_dropped() -> None:
    copy = ops.leaf(aten.copy.default)
    b = TraceBuilder()
    x, y = b.input(f32(3)), b.input(f32(3))
    (h,) = b.add(ADD, (x, y), (f32(3),))
    (h,) = b.add(copy, (x, h), (f32(3),))
    (other,) = b.add(copy, (x, y), (f32(3),))
    (seen,) = b.add(SIN, (x,), (f32(3),))
    (twice,) = b.add(copy, (x, seen), (f32(3),))
    trace = b.build((h, other, seen, twice))
    assert str(lower(trace)).count("copy") == 3, "one in the heading, two in the body"
    assert outputs_agree(trace, example_inputs(trace))
    results = lower(trace)(*example_inputs(trace))
    assert len({result.data_ptr() for result in results}) == 4


NUMBERS = (0, -3, 2**60, 0.1, -0.0, 1e-45, 1e39, math.inf, math.nan, 1 / 3)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_numbers_beside_tensors_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """A program may hold a number as a tensor or not: of any size, on rank 0, and in place."""
    op = getattr(aten, name).Tensor
    values = torch.tensor([0.0, -0.0, 1.0, 1e-40, 3.3e38, -7.7, math.inf, math.nan, *torch.randn(13).tolist()])
    for x in (values.to(dtype), values[5].to(dtype), values[:0].to(dtype), values.to(dtype)[::2]):
        for number in NUMBERS:
            b = TraceBuilder()
            var = b.input(type_of_value(x))
            copied = b.add(ops.leaf(aten.clone.default), (var,), (type_of_value(x),))
            results = [
                b.add(ops.leaf(op), (v, Literal(number)), (type_of_value(op(x, number)),)) for v in (var, *copied)
            ]
            assert outputs_agree(b.build(tuple(result for (result,) in results)), [x]), (x, number)


def test_a_number_is_held_as_a_tensor_where_it_may_be() -> None:
    def text(dtype: torch.dtype, number: object) -> str:
        b = TraceBuilder()
        type = TensorType(dtype, (2,))
        return str(lower(b.build(b.add(MUL, (b.input(type), Literal(number)), (type,)))))

    assert "mul(v0, number_minus_0_5)" in text(torch.float64, -0.5)
    assert "mul(v0, -0.5)" in text(torch.bfloat16, -0.5)
    assert "mul(v0, True)" in text(torch.float32, True)
