"""Random numbers from keys: pure functions, as in JAX.

    key = tfn.random.key(0)
    one, other = tfn.random.split(key)
    x = tfn.random.normal(one, (3, 4))

A key is an i64[2] tensor of two words of 32 bits. The numbers that it gives depend on the key and
the shape alone: not on PyTorch's generators, the device, or the transform around the call. So
`vmap` over keys gives what a loop gives, a `scan` or a checkpoint draws what eager code draws, and
equal draws are merged. Use a key once, and `split` it for more.

The bits are those of Philox 4x32-10: block i of a key is the cipher of the counter i. So the first
numbers of a longer draw are those of a shorter one, and `split(key, 8)[:4]` is `split(key, 4)`.
Bits, uniform numbers, integers and permutations are equal on all devices. What goes through `log`
or `erfinv` may differ in the last bits, as these functions do.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011); jax.random for the
names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch

from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import TraceTypeError, is_int, spelled, with_article
from thunder_fn.ir.ops import leaf
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Op, type_of_value
from thunder_fn.spellings import no_such_name

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "fold_in",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "uniform",
]

Tensor = torch.Tensor
Shape = int | Sequence[int]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BITS, _SPLIT, _FOLD = range(3)
"""The last word of the counter: what the numbers are for."""

_library = torch.library.Library("thunder_fn", "FRAGMENT")
_library.define("philox(Tensor key, SymInt count, int use) -> Tensor")
_library.define("philox_of(Tensor key, Tensor number, int use) -> Tensor")


def philox(keys: Tensor, counters: Tensor) -> Tensor:
    """Encrypt counters, i64[..., 4] words of 32 bits, with keys, i64[..., 2], by Philox 4x32-10."""
    a, b, c, d = counters.unbind(-1)
    first, second = keys.unbind(-1)
    for number in range(_ROUNDS):
        if number:
            first, second = (first + _WEYL[0]) & _MASK, (second + _WEYL[1]) & _MASK
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # all 64 bits of the product
        a, b = ((right >> 32) & _MASK) ^ b ^ first, right & _MASK
        c, d = ((left >> 32) & _MASK) ^ d ^ second, left & _MASK
    return torch.stack((a, b, c, d), -1)


def _words(keys: Tensor, count: int, use: int) -> Tensor:
    """The first words of each key, as i64[..., count]."""
    blocks = (count + 3) // 4
    index = torch.arange(blocks, device=keys.device)
    zeros = torch.zeros_like(index)
    counters = torch.stack((index & _MASK, index >> 32, zeros, zeros + use), -1)
    words = philox(keys.unsqueeze(-2), counters)
    return words.flatten(-2)[..., :count].contiguous()


def _words_at(keys: Tensor, numbers: Tensor, use: int) -> Tensor:
    """The four words of each key at a number, which is the counter."""
    keys, numbers = keys.broadcast_to((*numbers.shape, 2)), numbers.broadcast_to(keys.shape[:-1])
    zeros = torch.zeros_like(numbers)
    return philox(
        keys, torch.stack((numbers & _MASK, (numbers >> 32) & _MASK, zeros, zeros + use), -1)
    )


def _batched_at(
    info: Any, in_dims: Any, keys: Tensor, numbers: Tensor, use: int
) -> tuple[Tensor, int]:
    keys = keys if in_dims[0] is None else keys.movedim(in_dims[0], 0)
    numbers = numbers if in_dims[1] is None else numbers.movedim(in_dims[1], 0)
    shape = (info.batch_size, *(numbers.shape if in_dims[1] is None else numbers.shape[1:]))
    keys, numbers = keys.expand((*shape, 2)), numbers.expand(shape)
    return torch.ops.thunder_fn.philox_of(keys, numbers, use), 0


def _batched(info: Any, in_dims: Any, keys: Tensor, count: int, use: int) -> tuple[Tensor, int]:
    return torch.ops.thunder_fn.philox(keys.movedim(in_dims[0], 0), count, use), 0


_library.impl("philox", _words, "CompositeExplicitAutograd")
torch.library.register_fake(
    "thunder_fn::philox",
    lambda keys, count, use: keys.new_empty((*keys.shape[:-1], count)),
    lib=_library,
)
torch.library.register_vmap("thunder_fn::philox", _batched, lib=_library)
_library.impl("philox_of", _words_at, "CompositeExplicitAutograd")
torch.library.register_fake(
    "thunder_fn::philox_of",
    lambda keys, numbers, use: keys.new_empty((*numbers.shape, 4)),
    lib=_library,
)
torch.library.register_vmap("thunder_fn::philox_of", _batched_at, lib=_library)
IN_ATEN: dict[Op, Callable[..., Tensor]] = {
    leaf(torch.ops.thunder_fn.philox.default): _words,
    leaf(torch.ops.thunder_fn.philox_of.default): _words_at,
}
"""The ops above as functions of PyTorch's own, for programs that leave the process."""


def _check_key(name: str, key: Any) -> None:
    if (
        isinstance(key, Tensor)
        and key.dtype == torch.int64
        and key.dim() == 1
        and key.shape[0] == 2
    ):
        return
    given = (
        with_article(type_of_value(key))
        if isinstance(key, Tensor)
        else with_article(type(key).__name__)
    )
    fix = "Make one with `tfn.random.key(seed)`; use `vmap` over several."
    raise TraceTypeError(
        f"random.{name}: expected a key, an i64[2], given {given}", source=user_source(), fix=fix
    )


def _sizes(name: str, shape: Shape) -> tuple[int, ...]:
    sizes = (shape,) if _is_size(shape) else shape
    if not isinstance(sizes, (tuple, list)) or not all(map(_is_size, sizes)):
        what = f"random.{name}: expected a shape, given {shown(shape, 60)}"
        raise TraceTypeError(what, source=user_source(), fix="Write a tuple, `(2, 3)`, or an int.")
    return tuple(sizes)


def _is_size(value: Any) -> TypeGuard[int]:
    """Test for a size of a tensor: an int or a symbol."""
    return is_int(value, 0) or isinstance(value, torch.SymInt)


def _check_given(name: str, what: str, value: Any, is_right: bool) -> None:
    if not is_right:
        what = f"random.{name}: expected {what}, given {shown(value, 60)}"
        raise TraceTypeError(what, source=user_source())


def _is_whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.dtype.is_floating_point and not value.dtype.is_complex
    return is_int(value) or isinstance(value, torch.SymInt)


def _check_range(name: str, low: Any, high: Any, *, is_empty: bool) -> None:
    if is_empty:
        what = f"random.{name}: expected low < high, given low={low} and high={high}"
        raise TraceTypeError(what, source=user_source(), fix="Write the lower bound first.")


def _words_of(name: str, key: Tensor, count: int, use: int = _BITS) -> Tensor:
    _check_key(name, key)
    return torch.ops.thunder_fn.philox(key, count, use)


# ---- keys ----


@spelled(impl="Leave it out: all numbers are Philox's.")
def key(seed: int | Tensor, *, device: Any = None) -> Tensor:
    """Make a key of a seed: an int, or a tensor of one.

    Law: keys of seeds that differ in their lowest 64 bits differ.

    Returns:
        An i64[2] of two words of 32 bits.

    Raises:
        TraceTypeError: the seed is no integer.

    Example:
        >>> key(42)
        tensor([42,  0])

    Source: jax.random.key.
    """
    if isinstance(seed, Tensor) and not seed.dtype.is_floating_point and seed.dim() == 0:
        wide = seed.to(dtype=torch.int64, device=device)
        return torch.stack((wide & _MASK, (wide >> 32) & _MASK))
    if not is_int(seed):
        given = with_article(
            type_of_value(seed) if isinstance(seed, Tensor) else type(seed).__name__
        )
        raise TraceTypeError(
            f"random.key: expected an int as seed, given {given}", source=user_source()
        )
    return torch.tensor([seed & _MASK, (seed >> 32) & _MASK], device=device)


@spelled(shape="num")
def split(key: Tensor, num: int = 2) -> Tensor:
    """Make new keys of a key, i64[num, 2], whose numbers are independent of its own and of each
    other's.

    Law: ``split(key, n)[i]`` is the same for every ``n > i``.

    Raises:
        TraceTypeError: key is no key, or num is no size.

    Example:
        >>> one, other = split(key(0))
        >>> one.shape
        torch.Size([2])

    Source: jax.random.split.
    """
    _check_given("split", "a number of keys", num, _is_size(num))
    return _words_of("split", key, 4 * num, _SPLIT).reshape(num, 4)[:, :2]


@spelled()
def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Make a new key of a key and a number, such as the step of a loop.

    Law: ``fold_in(key, i)`` is independent of what is drawn from key, and of ``fold_in(key, j)``.

    Raises:
        TraceTypeError: key is no key.

    Example:
        >>> bool((fold_in(key(0), 1) == fold_in(key(0), torch.tensor(1))).all())
        True

    Source: jax.random.fold_in.
    """
    _check_key("fold_in", key)
    is_number = isinstance(data, (int, torch.SymInt, Tensor))
    _check_given("fold_in", "an int or a tensor", data, is_number)
    number = (
        data.to(key)
        if isinstance(data, Tensor)
        else torch.full((), data, dtype=torch.int64, device=key.device)
    )
    return torch.ops.thunder_fn.philox_of(key, number, _FOLD)[:2]


# ---- numbers ----


@spelled()
def bits(key: Tensor, shape: Shape = ()) -> Tensor:
    """Draw random words of 32 bits, as i64 numbers from 0 to 2**32 - 1.

    Law: ``bits(key, (n,))[:m] == bits(key, (m,))``.

    Raises:
        TraceTypeError: key is no key.

    Example:
        >>> [hex(word) for word in bits(key(0), (2,)).tolist()]
        ['0x6627e8d5', '0xe169c58d']
    """
    sizes = _sizes("bits", shape)
    return _words_of("bits", key, math.prod(sizes)).reshape(sizes)


def _long_words(name: str, key: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Words of 63 bits."""
    high, low = _words_of(name, key, 2 * math.prod(sizes)).reshape((*sizes, 2)).unbind(-1)
    return ((high >> 1) << 32) | low


_PRECISION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _fractions(
    name: str, key: Tensor, sizes: tuple[int, ...], dtype: torch.dtype | None
) -> tuple[Tensor, int]:
    """Whole numbers of as many random bits as a dtype has digits, as that dtype, and how many
    these are.
    """
    kind = torch.get_default_dtype() if dtype is None else dtype
    if kind not in _PRECISION:
        raise TraceTypeError(
            f"random.{name}: expected a floating dtype, given {kind}",
            source=user_source(),
            fix="Cast the result.",
        )
    digits = _PRECISION[kind]
    words = (
        _long_words(name, key, sizes) >> 10 if digits > 32 else bits(key, sizes) >> (32 - digits)
    )
    return words.to(kind), digits


@spelled(minval="low", maxval="high")
def uniform(
    key: Tensor,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """Draw numbers that are uniform in [low, high), as many as `shape` says.

    Law: ``vmap(lambda k: uniform(k, s))(keys)[i] == uniform(keys[i], s)``, bitwise, on every
        device.

    Args:
        dtype: a floating dtype; the default one if it is left out.

    Raises:
        TraceTypeError: key is no key, or dtype is not floating, or low > high.

    Example:
        >>> uniform(key(0), (3,))
        tensor([0.3990, 0.8805, 0.7357])

    Source: jax.random.uniform.
    """
    _check_key("uniform", key)
    _check_range("uniform", low, high, is_empty=low > high)
    words, digits = _fractions("uniform", key, _sizes("uniform", shape), dtype)
    unit = words * 2.0**-digits
    return unit if (low, high) == (0.0, 1.0) else unit * (high - low) + low


@spelled()
def normal(key: Tensor, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Draw numbers of the standard normal distribution, as many as `shape` says.

    Law: as `uniform`'s, up to the last bits of `erfinv` on different devices.

    Raises:
        TraceTypeError: key is no key, or dtype is not floating.

    Example:
        >>> normal(key(0), (3,))
        tensor([-0.2558,  1.1776,  0.6302])

    Source: jax.random.normal.
    """
    _check_key("normal", key)
    words, digits = _fractions("normal", key, _sizes("normal", shape), dtype)
    middle = (words.to(torch.float64) + 0.5) * 2.0 ** (1 - digits) - 1  # inside of (-1, 1)
    return (math.sqrt(2) * torch.erfinv(middle)).to(words.dtype)


@spelled(mode="Leave it out.")
def bernoulli(key: Tensor, p: float | Tensor = 0.5, shape: Shape | None = None) -> Tensor:
    """Draw booleans that are True with probability p, as many as `shape` says, or p has.

    Law: a function of its arguments: the same key gives the same result, in a trace or not.

    Raises:
        TraceTypeError: key is no key, or p is no probability.

    Example:
        >>> bernoulli(key(0), 0.5, (4,))
        tensor([ True, False, False, False])

    Source: jax.random.bernoulli.
    """
    _check_key("bernoulli", key)
    is_number = isinstance(p, (int, float, torch.SymInt, torch.SymFloat, Tensor))
    _check_given("bernoulli", "a number or a tensor", p, is_number)
    if isinstance(p, (int, float)):
        _check_given("bernoulli", "a probability from 0 to 1", p, 0 <= p <= 1)
    sizes = (
        _sizes("bernoulli", shape)
        if shape is not None
        else tuple(p.shape)
        if isinstance(p, Tensor)
        else ()
    )
    return uniform(key, sizes, torch.float32) < p


@spelled(minval="low", maxval="high")
def randint(
    key: Tensor,
    shape: Shape,
    low: int | Tensor,
    high: int | Tensor,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Draw integers that are uniform in [low, high), as many as `shape` says.

    The probabilities of two integers differ by less than (high - low) / 2**63.

    Law: a function of its arguments: the same key gives the same result, in a trace or not.

    Raises:
        TraceTypeError: key is no key, or low and high are no integers with low < high.

    Example:
        >>> randint(key(0), (4,), 0, 10)
        tensor([3, 4, 1, 9])

    Source: jax.random.randint.
    """
    _check_key("randint", key)
    for bound in (low, high):
        is_whole = (
            not bound.dtype.is_floating_point if isinstance(bound, Tensor) else _is_whole(bound)
        )
        _check_given("randint", "integers as low and high", bound, is_whole)
    _check_given("randint", "a dtype", dtype, isinstance(dtype, torch.dtype))
    if not isinstance(low, Tensor) and not isinstance(high, Tensor):
        _check_range("randint", low, high, is_empty=low >= high)
    words = _long_words("randint", key, _sizes("randint", shape))
    return (torch.remainder(words, high - low) + low).to(dtype)


@spelled(
    axis="dim",
    shape="Expand the logits to `(*shape, *logits.shape)`.",
    replace="Without replacement take the largest of `logits` plus Gumbel noise, by `topk`.",
    mode="Leave it out.",
)
def categorical(key: Tensor, logits: Tensor, dim: int = -1) -> Tensor:
    """Draw an index along a dim with probabilities ``softmax(logits, dim)``.

    Law: a function of its arguments: the same key gives the same result, in a trace or not.

    Raises:
        TraceTypeError: key is no key.

    Example:
        >>> categorical(key(0), torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]]))
        tensor([0, 1])

    Source: jax.random.categorical, by the Gumbel trick.
    """
    _check_key("categorical", key)
    _check_given("categorical", "a tensor of logits", logits, isinstance(logits, Tensor))
    kind = logits.dtype if logits.dtype == torch.float64 else torch.float32
    words, digits = _fractions("categorical", key, tuple(logits.shape), kind)
    inside = (words.to(torch.float64) + 0.5) * 2.0**-digits
    return (logits - torch.log(-torch.log(inside)).to(kind)).argmax(dim)


@spelled(
    axis="dim",
    independent="Batch it with `tfn.vmap` over keys, one for each row.",
)
def permutation(key: Tensor, x: int | Tensor, dim: int = 0) -> Tensor:
    """Draw a random order of the numbers below an int, or of the slices of a tensor along a dim.

    Law: a function of its arguments: the same key gives the same result, in a trace or not.

    Raises:
        TraceTypeError: key is no key.

    Example:
        >>> permutation(key(0), 5)
        tensor([4, 0, 3, 1, 2])

    Source: jax.random.permutation.
    """
    _check_key("permutation", key)
    _check_given("permutation", "an int or a tensor", x, isinstance(x, Tensor) or _is_size(x))
    length = x.shape[dim] if isinstance(x, Tensor) else x
    order = torch.argsort(_long_words("permutation", key, (length,)), stable=True)
    return x.index_select(dim, order) if isinstance(x, Tensor) else order


def __getattr__(name: str) -> object:
    raise no_such_name(__name__, name)
