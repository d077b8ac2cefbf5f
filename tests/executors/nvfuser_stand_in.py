"""A stand-in for `nvfuser_direct`: strict about every call, and computing with PyTorch on the CPU.

It checks each call against the signatures in `nvfuser_ops.json`, which were read out of nvFuser's bindings, and what
nvFuser is known to refuse: reductions over no dims, dims that are squeezed without being broadcast, variances of half
precision, tensors on the CPU. It imitates what surprises: half precision stays float32, results lie in memory as nvFuser
likes and may be an input's memory, and a definition is written once. It knows nothing of scheduling and kernels.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_true as may


class DataType(enum.Enum):
    Double, Float, Half, BFloat16, Int, Int32, Bool, Null = range(8)


TORCH = {
    DataType.Double: torch.float64,
    DataType.Float: torch.float32,
    DataType.Half: torch.float16,
    DataType.BFloat16: torch.bfloat16,
    DataType.Int: torch.int64,
    DataType.Int32: torch.int32,
    DataType.Bool: torch.bool,
}
OURS = {dtype: name for name, dtype in TORCH.items()}
HALF = (torch.float16, torch.bfloat16)


def version() -> str:
    return "0.2.36"


def compute_tensor_descriptor(sizes: Sequence[int], strides: Sequence[int]) -> tuple[list[bool | None], list[int]]:
    """Contiguity in the order of memory, outermost first, and for each dim its place in it, innermost 0."""
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], dim))
    stride_order = [0] * len(sizes)
    contiguity: list[bool | None] = [None] * len(sizes)
    expected = 1
    for place, dim in enumerate(reversed(order)):
        stride_order[dim] = place
        if strides[dim] < 0:
            raise RuntimeError("negative strides")
        if sizes[dim] != 1 and strides[dim] != 0:
            contiguity[len(sizes) - 1 - place] = strides[dim] == expected
            expected = strides[dim] * sizes[dim]
    return contiguity, stride_order


# ---- signatures ----


@cache
def signatures() -> dict[str, tuple[Signature, ...]]:
    ops = json.loads((Path(__file__).parent / "nvfuser_ops.json").read_text())["ops"]
    return {name: tuple(found for text in entry["signatures"] for found in parsed(text)) for name, entry in ops.items()}


def parsed(text: str) -> list[Signature]:
    """`(arg, dim:int, keepdim=False) | (...)` as signatures."""
    found: list[Signature] = []
    for parameters in re.findall(r"\(([^()]*)\)", text):
        kind, items = Parameter.POSITIONAL_OR_KEYWORD, list[Parameter]()
        for part in filter(None, map(str.strip, parameters.split(","))):
            if part == "*":
                kind = Parameter.KEYWORD_ONLY
                continue
            name, _, default = part.partition("=")
            name = name.partition(":")[0]
            name = f"{name}_{len(items)}" if name in (item.name for item in items) else name
            items.append(Parameter(name, kind, default=default or Parameter.empty))
        found.append(Signature(items))
    return found


def check_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The call fits one of the op's signatures.

    Raises:
        TypeError: as pybind does.
    """
    if name not in signatures():
        raise AttributeError(f"nvfuser_direct has no op {name}")
    for signature in signatures()[name]:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        return
    raise TypeError(f"{name}: incompatible arguments {args} {kwargs}")


# ---- definitions ----


@dataclass(frozen=True, eq=False)
class Val:
    """A scalar of a definition: its number once the inputs are there, and one that nobody knows before."""

    meta: Any
    compute: Callable[[dict[Any, Any]], Any]


@dataclass(frozen=True, eq=False)
class TensorView:
    """The result of an op: its values once the inputs are there, and before that its type, on the meta device."""

    meta: torch.Tensor
    compute: Callable[[dict[Any, Any]], torch.Tensor]
    broadcast: tuple[bool, ...]

    @property
    def ndim(self) -> int:
        return self.meta.dim()

    def dtype(self) -> DataType:
        return OURS[self.meta.dtype]

    def size(self, dim: int) -> Val:
        return Val(self.meta.shape[dim], lambda env: self.compute(env).shape[dim])


class FusionDefinition:
    """Written once, then executed."""

    made = 0
    executed = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.ops = Ops(self)
        self.inputs: list[Any] = []
        self.outputs: list[TensorView] = []
        self.calls: list[str] = []
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.is_open = False

    def __enter__(self) -> FusionDefinition:
        self.is_open = True
        return self

    def __exit__(self, *error: Any) -> None:
        self.is_open = False

    def define_tensor(
        self,
        shape: list[int],
        contiguity: list[bool | None],
        dtype: DataType = DataType.Float,
        is_cpu: bool = False,
        stride_order: Sequence[int] = (),
    ) -> TensorView:
        assert self.is_open and isinstance(shape, list) and isinstance(contiguity, list) and isinstance(dtype, DataType)
        assert len(shape) == len(contiguity) and sorted(stride_order) in ([], list(range(len(shape))))
        order = list(stride_order) or list(range(len(shape)))[::-1]
        for dim, size in enumerate(shape):
            is_broadcast = contiguity[len(shape) - 1 - order[dim]] is None
            assert is_broadcast or size != 1, "a dim of size 1 is a broadcast one"
        if is_cpu and shape:
            raise RuntimeError("only tensors without dims may be on the CPU")
        position = len(self.inputs)
        with self.mode:
            meta = torch.empty(list(map(self.unknown, shape)), dtype=TORCH[dtype], device="meta")
        view = TensorView(meta, lambda env: env[position], tuple(size == 1 for size in shape))
        self.inputs.append(view)
        return view

    def unknown(self, size: int) -> Any:
        """A size of -1 can be any but 0 and 1: whoever asks about it gets an error."""
        if size != -1:
            return size
        found = self.mode.shape_env.create_unbacked_symint()
        torch._check(found > 1)
        return found

    def define_scalar(self, *, dtype: DataType = DataType.Double) -> Val:
        assert self.is_open and dtype in (DataType.Int, DataType.Double)
        position, numbers = len(self.inputs), self.mode.shape_env
        meta = numbers.create_unbacked_symint() if dtype is DataType.Int else numbers.create_unbacked_symfloat()
        self.inputs.append(Val(meta, lambda env: env[position]))
        return self.inputs[-1]

    def add_output(self, view: TensorView, alias_input: TensorView | None = None) -> None:
        assert self.is_open and isinstance(view, TensorView) and alias_input is None
        self.outputs.append(view)

    def execute(self, inputs: Sequence[torch.Tensor], *, device: Any = None) -> list[torch.Tensor]:
        type(self).executed += 1
        assert not self.is_open and len(inputs) == len(self.inputs)
        for view, value in zip(self.inputs, inputs, strict=True):
            if isinstance(view, Val):
                kind = float if isinstance(view.meta, torch.SymFloat) else int
                assert type(value) is kind, f"a scalar that is {kind.__name__}, given {value!r}"
            elif value.dtype != view.meta.dtype or not fits(value, view.meta):
                raise RuntimeError(f"expected {view.meta}, given {value.dtype} {tuple(value.shape)}")
        env: dict[Any, Any] = dict(enumerate(inputs))
        results = [view.compute(env) for view in self.outputs]
        for view, result in zip(self.outputs, results, strict=True):
            assert result.dtype == view.meta.dtype and fits(result, view.meta)
        return results


def fits(value: torch.Tensor, meta: torch.Tensor) -> bool:
    """The sizes are those that were said; those that were not, are neither 0 nor 1."""
    sizes = zip(value.shape, meta.shape, strict=True) if value.dim() == meta.dim() else [(0, -1)]
    return all(size == known if isinstance(known, int) else size > 1 for size, known in sizes)


class Ops:
    """The ops of a definition: each call is checked, run on the meta device, and kept."""

    def __init__(self, definition: FusionDefinition) -> None:
        self.definition = definition

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.call, name)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        assert self.definition.is_open, "a definition is written once"
        check_call(name, args, kwargs)
        if name not in MEANINGS:
            raise NotImplementedError(f"the stand-in does not know {name} yet")
        self.definition.calls.append(name)
        meaning = MEANINGS[name]
        for arg in (*args, *kwargs.values()):
            kinds = TensorView | Val | bool | int | float | list | DataType | None
            assert isinstance(arg, kinds), f"{name}: a {type(arg).__name__} is nothing for nvFuser"
        CHECKS.get(name, lambda *a, **k: None)(*args, **kwargs)
        with torch._C._EnablePythonDispatcher(), self.definition.mode, torch.device("meta"):
            meta = meaning(*(_read(arg, lambda view: view.meta) for arg in args), **kwargs)

        def compute(env: dict[Any, Any]) -> Any:
            if compute not in env:
                env[compute] = meaning(*(_read(arg, lambda view: view.compute(env)) for arg in args), **kwargs)
            return env[compute]

        if isinstance(meta, tuple):
            return tuple(self.view(item, lambda env, i=i: compute(env)[i]) for i, item in enumerate(meta))
        return self.view(meta, compute)

    def view(self, meta: torch.Tensor, compute: Any) -> TensorView:
        assert meta.device.type == "meta", "computed from no tensor"
        return TensorView(meta, compute, tuple(isinstance(size, int) and size == 1 for size in meta.shape))


def _read(arg: Any, read: Callable[[Any], Any]) -> Any:
    if isinstance(arg, list):
        return [_read(item, read) for item in arg]
    return read(arg) if isinstance(arg, TensorView | Val) else arg


# ---- what ops do ----


def up(x: Any) -> Any:
    """nvFuser computes half precision in float32, and leaves it there."""
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x


def as_float(x: torch.Tensor) -> torch.Tensor:
    return up(x) if x.dtype.is_floating_point else x.float()


def floating(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x: f(as_float(x))


def tensors(*args: Any) -> tuple[Any, ...]:
    """Numbers as tensors without dims, which weigh as little in promotion; where there is a tensor at all."""
    device = next(x.device for x in args if isinstance(x, torch.Tensor))
    return tuple(x if isinstance(x, torch.Tensor) else torch.full((), x, device=device) for x in map(up, args))


def same_ranks(*args: Any, **kwargs: Any) -> None:
    ranks = {x.ndim for x in args if isinstance(x, TensorView)}
    assert len(ranks) == 1, "ranks differ: broadcast explicitly"


def binary(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda a, b: f(*(up(x) for x in (a, b)))


def weak(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An op that PyTorch has for tensors only; numbers take the tensor's dtype where that is of their kind."""

    def meaning(a: Any, b: Any) -> torch.Tensor:
        a, b = tensors(a, b)
        dtype = torch.result_type(a, b)
        return f(a.to(dtype), b.to(dtype))

    return meaning


def check_reduction(x: TensorView, dims: list[int], *args: Any, **kwargs: Any) -> None:
    if not dims:
        raise RuntimeError("No reduction axis specified")
    assert isinstance(dims, list) and len(set(dims)) == len(dims) and all(0 <= dim < x.ndim for dim in dims)


def check_variance(x: TensorView, dims: list[int], correction: int = 1, keepdim: bool = False) -> None:
    check_reduction(x, dims)
    if x.meta.dtype in HALF:
        raise RuntimeError("var_mean of half precision")
    if not isinstance(correction, int) or correction < 0:
        raise RuntimeError("correction")


def check_squeeze(x: TensorView, dims: list[int], squeeze_expanded: bool = False) -> None:
    if not all(x.broadcast[dim] for dim in dims):
        raise RuntimeError("Can not squeeze non-broadcasting dimension(s)")


def check_slice(x: TensorView, starts: list[int], ends: list[int], *args: Any) -> None:
    assert len(starts) == len(ends) == x.ndim
    for a, b, size in zip(starts, ends, x.meta.shape, strict=True):
        a, b = _read(a, lambda val: val.meta), _read(b, lambda val: val.meta)
        assert may(a >= 0) and may(a <= b) and may(b <= size)


def check_broadcast_in_dim(x: TensorView, shape: list[int], dims: list[int]) -> None:
    assert len(dims) == x.ndim and sorted(set(dims)) == dims
    full = _read(shape, lambda val: val.meta)
    assert all(
        is_one or may(size == full[dim]) for size, dim, is_one in zip(x.meta.shape, dims, x.broadcast, strict=True)
    )


def check_pad(x: TensorView, widths: list[int], value: Any = None) -> None:
    assert len(widths) == 2 * x.ndim and all(may(width >= 0) for width in _read(widths, lambda val: val.meta))
    kinds = float if x.meta.dtype.is_floating_point else bool if x.meta.dtype is torch.bool else int
    assert value is None or type(value) is kinds


def check_factory(shape: list[int], value: Any, dtype: DataType) -> None:
    assert isinstance(shape, list) and isinstance(dtype, DataType)


def check_index_select(x: TensorView, index: TensorView, dim: int) -> None:
    assert index.ndim <= 1 and index.meta.dtype in (torch.int32, torch.int64)


def check_gather(x: TensorView, index: TensorView, dim: int) -> None:
    assert index.ndim == x.ndim and index.meta.dtype in (torch.int32, torch.int64)


def check_select(x: TensorView, index: Val, dim: int) -> None:
    assert isinstance(index, Val), "a number is no index for select"


def check_cat(views: list[TensorView], dim: int = 0) -> None:
    assert len({view.meta.dtype for view in views}) == 1 and all(may(view.meta.numel() > 0) for view in views)


def broadcast_in_dim(x: torch.Tensor, shape: list[int], dims: list[int]) -> torch.Tensor:
    full = [1] * len(shape)
    for dim, size in zip(dims, x.shape, strict=True):
        full[dim] = size
    return x.reshape(full).expand(shape)


def stride_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    outermost_first = sorted(range(x.dim()), key=lambda dim: -order[dim])
    back = [outermost_first.index(dim) for dim in range(x.dim())]
    return x.permute(outermost_first).contiguous().permute(back)


def squeeze(x: torch.Tensor, dims: list[int], squeeze_expanded: bool = False) -> torch.Tensor:
    return x.squeeze(tuple(dims))


def slices(x: torch.Tensor, starts: list[int], ends: list[int], *args: Any) -> torch.Tensor:
    return x[tuple(slice(a, b) for a, b in zip(starts, ends, strict=True))]


def pad(x: torch.Tensor, widths: list[int], value: Any = None) -> torch.Tensor:
    return torch.nn.functional.pad(x, widths, value=0 if value is None else value)


def full(shape: list[int], value: Any, dtype: DataType) -> torch.Tensor:
    return torch.full(shape, value, dtype=TORCH[dtype])


def iota(length: int, start: int, step: int, dtype: DataType) -> torch.Tensor:
    return torch.arange(start, start + length * step, step, dtype=TORCH[dtype])[:length]


def prod(x: torch.Tensor, dims: list[int], keepdim: bool = False) -> torch.Tensor:
    dtype = None if x.dtype.is_floating_point else torch.int64
    for dim in sorted(dims, reverse=True):
        x = x.prod(dim, keepdim, dtype=dtype)
    return x


def where(c: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    assert c.dtype is torch.bool
    return torch.where(c, a, b)


def divided(a: Any, b: Any) -> torch.Tensor:
    """On integers as in C."""
    a, b = tensors(a, b)
    is_float = torch.result_type(a, b).is_floating_point
    return torch.div(a, b) if is_float else torch.div(a, b, rounding_mode="trunc")


_UNARY_FLOAT = (
    *(
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "cos",
        "cosh",
        "erf",
        "erfc",
        "erfinv",
        "exp",
        "exp2",
        "expm1",
    ),
    *(
        "lgamma",
        "log",
        "log10",
        "log1p",
        "log2",
        "reciprocal",
        "rsqrt",
        "sigmoid",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    ),
)
_UNARY_SAME = ("abs", "ceil", "floor", "frac", "neg", "relu", "round", "sign", "trunc", "bitwise_not")
_UNARY_BOOL = ("logical_not", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "signbit")
_BINARY = ("add", "sub", "mul", "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge", "pow")
_BINARY_TENSORS = (
    *("atan2", "maximum", "minimum", "gcd", "nextafter", "logical_and", "logical_or"),
    *("bitwise_and", "bitwise_or", "bitwise_xor"),
)

MEANINGS: dict[str, Callable[..., Any]] = {
    **{name: floating(getattr(torch, name)) for name in _UNARY_FLOAT},
    **{name: getattr(torch, name) for name in (*_UNARY_SAME, *_UNARY_BOOL)},
    **{name: binary(getattr(torch, name)) for name in _BINARY},
    **{name: weak(getattr(torch, name)) for name in _BINARY_TENSORS},
    "set": lambda x: x,
    "div": divided,
    "where": where,
    "cast": lambda x, dtype: x.to(TORCH[dtype]),
    "sum": lambda x, dims, keepdim=False: x.sum(dims, keepdim),
    "prod": prod,
    "max": lambda x, dims, keepdim=False: x.amax(dims, keepdim),
    "min": lambda x, dims, keepdim=False: x.amin(dims, keepdim),
    "var": lambda x, dims, correction=1, keepdim=False: x.var(dims, correction=correction, keepdim=keepdim),
    "var_mean": lambda x, dims, correction=1, keepdim=False: torch.var_mean(
        x, dims, correction=correction, keepdim=keepdim
    ),
    "broadcast": lambda x, flags: broadcast(x, flags),
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": lambda x, dims: x.permute(dims),
    "squeeze": squeeze,
    "slice": slices,
    "stride_order": stride_order,
    "index_select": lambda x, index, dim: x.index_select(dim, index),
    "gather": lambda x, index, dim: x.gather(dim, index),
    "select": lambda x, index, dim: x.select(dim, index),
    "pad": pad,
    "cat": lambda views, dim=0: torch.cat(views, dim),
    "full": full,
    "iota": iota,
}
CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys((*_BINARY, *_BINARY_TENSORS, "div", "where"), same_ranks),
    **dict.fromkeys(("sum", "prod", "max", "min"), check_reduction),
    **dict.fromkeys(("var", "var_mean"), check_variance),
    "squeeze": check_squeeze,
    "slice": check_slice,
    "broadcast_in_dim": check_broadcast_in_dim,
    "pad": check_pad,
    "full": check_factory,
    "index_select": check_index_select,
    "gather": check_gather,
    "select": check_select,
    "cat": check_cat,
}


def broadcast(x: torch.Tensor, flags: list[bool]) -> torch.Tensor:
    assert flags.count(False) == x.dim()
    for dim, flag in enumerate(flags):
        x = x.unsqueeze(dim) if flag else x
    return x
