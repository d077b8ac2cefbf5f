"""Random numbers from keys: known answers of the cipher, the same bits under every transform, the right distributions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn import random
from thunder_fn.errors import TraceTypeError, UnsupportedCall

KEY = random.key(7)
LOGITS = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.5, 0.0]])
DRAWS: dict[str, Callable[[Any], Any]] = {
    "split": lambda k: random.split(k, 3),
    "fold_in": lambda k: random.fold_in(k, 5),
    "bits": lambda k: random.bits(k, (3, 5)),
    "uniform": lambda k: random.uniform(k, (5,)),
    "uniform64": lambda k: random.uniform(k, (5,), torch.float64, -1, 2),
    "uniform16": lambda k: random.uniform(k, (2, 2), torch.bfloat16),
    "normal": lambda k: random.normal(k, (5,)),
    "normal of none": lambda k: random.normal(k),
    "bernoulli": lambda k: random.bernoulli(k, torch.tensor([0.1, 0.5, 0.9])),
    "randint": lambda k: random.randint(k, (4,), -3, 9),
    "categorical": lambda k: random.categorical(k, LOGITS),
    "permutation": lambda k: random.permutation(k, 6),
    "permutation of slices": lambda k: random.permutation(k, LOGITS, 1),
}
EVERY = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def equal(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def test_the_cipher_gives_the_known_answers() -> None:
    """Those of the authors' own test, Random123's `kat_vectors`."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    for counter, key, answer in (
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi[:4], pi[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert random.philox(torch.tensor(key), torch.tensor(counter)).tolist() == list(answer)


# ---- the same bits everywhere ----


@EVERY
def test_a_batch_draws_what_each_key_draws(draw: Callable[[Any], Any]) -> None:
    keys = random.split(KEY, 4)
    wanted = torch.stack([draw(key) for key in keys])
    for batched in (tfn.vmap(draw), tfn.jit(tfn.vmap(draw)), torch.func.vmap(draw)):
        assert equal(batched(keys), wanted)
    assert equal(tfn.vmap(draw, in_dims=1)(keys.t().contiguous()), wanted)
    assert equal(tfn.vmap(tfn.vmap(draw))(keys.reshape(2, 2, 2)).flatten(0, 1), wanted)
    assert equal(torch.stack([*tfn.scan(lambda c, k: (c, draw(k)), KEY, keys)[1]]), wanted)
    assert equal(tfn.vmap(lambda k: draw(k), randomness="error")(keys[:2]), wanted[:2])


@EVERY
def test_programs_draw_the_same_and_nothing_else_moves(draw: Callable[[Any], Any]) -> None:
    before = torch.get_rng_state()
    jitted = tfn.jit(draw)
    assert equal(jitted(KEY), draw(KEY)) and equal(jitted(KEY + 1), draw(KEY + 1))
    assert tfn.cache_info(jitted).misses == 1
    assert equal(tfn.checkpoint(draw)(KEY), draw(KEY))
    assert torch.equal(before, torch.get_rng_state())


def set_back(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    first = torch.rand(2)
    torch.set_rng_state(state)
    return x * (first - torch.rand(2))


def forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        x = x * torch.rand(2)
    return x + torch.rand(2)


USES_OF_A_STATE: dict[str, Callable[[torch.Tensor], Any]] = {
    "number": lambda x: x * torch.get_rng_state()[0].item(),
    "numbers": lambda x: x * torch.get_rng_state().tolist()[0],
    "operand": lambda x: x + torch.get_rng_state().sum(),
    "operand after a draw": lambda x: x * torch.rand(2) + torch.get_rng_state()[8],
    "copy": lambda x: x * torch.get_rng_state().clone()[0],
    "result": lambda x: (x * 2, torch.get_rng_state()),
    "array": lambda x: x * float(torch.get_rng_state().numpy()[0]),
    "set back": set_back,
    "forked": forked,
}


@pytest.mark.parametrize("way", [tfn.jit, lambda f: tfn.jit(tfn.vmap(f, randomness="same"))])
@pytest.mark.parametrize("name", USES_OF_A_STATE)
def test_a_state_can_be_set_back_and_nothing_else(name: str, way: Callable[[Any], Any]) -> None:
    """Its numbers are those of the trace, and others in the next call."""
    f, x = USES_OF_A_STATE[name], torch.ones(2, 2)
    if name not in ("set back", "forked"):
        with pytest.raises(UnsupportedCall, match=r"get_rng_state"):
            way(f)(x)
        return
    jitted = way(f)
    for _ in range(3):
        torch.manual_seed(3)
        got = jitted(x)
        torch.manual_seed(3)
        assert equal(got, f(x))


def test_gradients_go_past_draws() -> None:
    def loss(w: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        noise = random.normal(key, (3,))
        return ((w * noise).sin() * random.bernoulli(random.fold_in(key, 1), 0.5, (3,))).sum()

    w = torch.tensor([0.5, 1.0, -2.0])
    noise, kept = random.normal(KEY, (3,)), random.bernoulli(random.fold_in(KEY, 1), 0.5, (3,))
    for f in (loss, tfn.jit(loss), tfn.checkpoint(loss)):
        torch.testing.assert_close(tfn.grad(f)(w, KEY), (w * noise).cos() * noise * kept)


def test_equal_draws_are_merged() -> None:
    trace = tfn.simplify(tfn.trace(lambda k: random.uniform(k, (3,)) + random.uniform(k, (3,)), KEY))
    assert sum(equation.op.name == "thunder_fn.philox.default" for equation in trace.equations) <= 1


def test_sizes_may_be_symbols() -> None:
    jitted = tfn.jit(lambda k, x: random.normal(k, x.shape) + x, cache="symbolic values")
    for n in (2, 5, 9):
        assert equal(jitted(KEY, torch.zeros(n)), random.normal(KEY, (n,)))
    assert tfn.cache_info(jitted).misses == 1


def test_longer_draws_begin_as_shorter_ones_and_chain_0_of_8_is_chain_0_of_4() -> None:
    assert equal(random.bits(KEY, (9,))[:4], random.bits(KEY, (4,)))
    assert equal(random.uniform(KEY, (3, 4)).flatten(), random.uniform(KEY, (12,)))
    chains = tfn.vmap(lambda key: random.normal(key, (6,)))
    assert equal(chains(random.split(KEY, 8))[:4], chains(random.split(KEY, 4)))


# ---- keys ----


def test_keys_of_different_origin_differ() -> None:
    keys = [random.key(seed) for seed in (0, 1, 2, -1, 1 << 32, (1 << 64) - 2)]
    keys += [random.fold_in(key, i) for key, i in itertools.product(keys[:3], (0, 1, 2, 1 << 40))]
    keys += [key for old in keys[:3] for key in random.split(old, 3)]
    assert len({tuple(key.tolist()) for key in keys}) == len(keys)
    draws = [tuple(random.bits(key, (4,)).tolist()) for key in keys]
    assert len(set(draws)) == len(draws)


def test_a_seed_may_be_a_tensor() -> None:
    for seed in (0, 5, -1, 1 << 40):
        assert equal(random.key(torch.tensor(seed)), random.key(seed))
        assert equal(tfn.jit(random.key)(torch.tensor(seed)), random.key(seed))
    assert equal(tfn.vmap(random.fold_in, (None, 0))(KEY, torch.arange(3))[2], random.fold_in(KEY, 2))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: random.uniform(3), r"random.uniform: expected a key, an i64\[2\], given an int"),  # type: ignore[arg-type]
        (
            lambda: random.normal(random.split(KEY, 3)),
            r"random.normal: expected a key, an i64\[2\], given an i64\[3, 2\]",
        ),
        (lambda: random.split(torch.ones(2)), r"random.split: expected a key, an i64\[2\], given an f32\[2\]"),
        (lambda: random.key(0.5), "random.key: expected an int as seed, given a float"),  # type: ignore[arg-type]
        (lambda: random.uniform(KEY, 2, torch.int32), "random.uniform: expected a floating dtype, given torch.int32"),
    ],
)
def test_misuse(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(TraceTypeError, match=text):
        call()


# ---- distributions ----

N = 1 << 16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_fill_their_interval(dtype: torch.dtype) -> None:
    x = random.uniform(KEY, (N,), dtype)
    assert x.dtype == dtype and x.min() >= 0 and x.max() < 1
    counts = torch.bincount((x.double() * 16).long(), minlength=16).double()
    assert (counts - N / 16).square().sum() / (N / 16) < 45  # chi-squared of 15 degrees: 1 in 10,000


def test_normal_numbers_have_the_moments() -> None:
    x = random.normal(KEY, (N,), torch.float64)
    for power, wanted, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - wanted) < 4 * math.sqrt(spread / N)
    assert random.normal(KEY, (N,)).isfinite().all()


def test_integers_and_indices_are_as_often_as_they_should_be() -> None:
    counts = torch.bincount(random.randint(KEY, (N,), -2, 5) + 2, minlength=7).double()
    assert counts.shape == (7,) and (counts - N / 7).square().sum() / (N / 7) < 28
    kept = random.bernoulli(KEY, 0.3, (N,)).double().mean()
    assert abs(kept - 0.3) < 4 * math.sqrt(0.21 / N)
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    found = torch.bincount(random.categorical(KEY, logits.expand(N, 3)), minlength=3).double() / N
    assert (found - logits.exp()).abs().max() < 4 * math.sqrt(0.25 / N)


def test_permutations_are_all_there() -> None:
    found = tfn.vmap(lambda key: random.permutation(key, 3))(random.split(KEY, 600))
    counts = torch.unique(found, dim=0, return_counts=True)[1]
    assert counts.shape == (6,) and (counts - 100).abs().max() < 40
