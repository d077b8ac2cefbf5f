"""Parameters as a rewrite stores them, by name, and facts about their preparation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import optree
import torch

from thunder_fn.capture import pytree
from thunder_fn.distributed.agreement import check_same
from thunder_fn.distributed.groups import check_there
from thunder_fn.errors import RewriteError, kind_of
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.quantize.scheme import INPUT_SCALE
from thunder_fn.interpreters.rewriting.filters import ADAPTERS, NOTHING, Patterns
from thunder_fn.interpreters.rewriting.representation import Step
from thunder_fn.interpreters.rewriting.rewrite import Rewrite, identity, rewrite
from thunder_fn.interpreters.rewriting.units import scheduled, then
from thunder_fn.interpreters.tensor_parallel.step import TensorParallel
from thunder_fn.ir.trace import TensorType, Trace, TraceBuilder, static_shape, type_of_value


@dataclass(frozen=True)
class Layout:
    """The way in which parameters were prepared: their names, types and structure, and the
    steps.
    """

    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    spec: pytree.PyTreeSpec
    steps: tuple[Step, ...]

    @cached_property
    def rewrite(self) -> Rewrite:
        """The steps on the parameters alone, for what they make of them and back."""
        return self.rewritten(_nothing(self.types))

    @cached_property
    def decode(self) -> Trace:
        """The parts to the parameters as computations see them, which need not be the restored
        ones.
        """
        builder = TraceBuilder("decode")
        return self.rewritten(builder.build(builder.take(self.types))).compute

    @cached_property
    def part_shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the parts."""
        types = self.rewrite.prepare.output_types
        return {
            name: static_shape(type)
            for name, type in zip(self.rewrite.names, types, strict=True)
            if isinstance(type, TensorType)
        }

    def __getstate__(self) -> dict[str, Any]:
        """The fields: derived values are computed again."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def rewritten(self, trace: Trace) -> Rewrite:
        """The steps on a trace whose first inputs are the parameters."""
        done = identity(trace, self.names)
        for step in self.steps:
            check_left(step, done)
            done = then(done, step)
        return replace(done, compute=scheduled(done.compute, self.steps))

    def prepare(self, params: Any) -> Prepared:
        """Parameters of this structure and these types, as the steps store them."""
        leaves = [leaf.detach() for leaf in pytree.flatten(params)[0]]
        with torch.no_grad():
            return Prepared(self, _in_order(self.rewrite, evaluate(self.rewrite.prepare, leaves)))

    def prepare_alike(self, params: Any) -> Prepared:
        """Prepare, like `prepare`, parameters that all ranks are given.

        Raises:
            DistributedError: ranks that share them were given others.
        """
        check_same(
            self.steps,
            dict(zip(self.names, pytree.flatten(params)[0], strict=True)),
            self.rewrite.prepare,
        )
        return self.prepare(params)

    def only(self, names: Iterable[str]) -> Layout:
        """The layout of some of the parameters, as a dict of them."""
        types = dict(zip(self.names, self.types, strict=True))
        return layout_of_types({name: types[name] for name in names}, self.steps)

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Layout:
        """The layout of parameters of which `move` changes dtype or device."""
        types = (move(torch.empty(0, dtype=type.dtype, device=type.device)) for type in self.types)
        return replace(
            self,
            types=tuple(
                replace(old, dtype=new.dtype, device=new.device)
                for old, new in zip(self.types, types, strict=True)
            ),
        )


def _in_order(rewrite: Rewrite, values: Sequence[Any]) -> list[Any]:
    """Codes lie as kernels read them, row after row, however the weight lay."""
    named = zip(rewrite.names, values, strict=True)
    return [value.contiguous() if name in rewrite.codes else value for name, value in named]


def _nothing(types: Sequence[Any]) -> Trace:
    builder = TraceBuilder("nothing")
    for type in types:
        builder.input(type)
    return builder.build(())


class Prepared(Mapping[str, torch.Tensor]):
    """Parameters as a rewrite stores them, by name. A pytree, so gradients, optimizers and jit
    take it as it is.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> q = tfn.quantize(lambda params, x: x @ params["w"].T, "int8")
        >>> parts = q.prepare({"w": torch.ones(2, 3)})
        >>> sorted(parts), parts.restore()["w"].shape
        (['w.scales', 'w.values'], torch.Size([2, 3]))
    """

    def __init__(self, layout: Layout, values: Sequence[Any]) -> None:
        self.layout = layout
        self._values = dict(zip(layout.rewrite.names, values, strict=True))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        texts = (
            type_of_value(value) if isinstance(value, torch.Tensor) else value
            for value in self.values()
        )
        parts = (f"{name}: {text}" for name, text in zip(self, texts, strict=True))
        return f"Prepared({', '.join(parts)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": for_pickle(self._values)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _values=from_pickle(state["_values"]))

    def restore(self) -> Any:
        """The parameters in their own structure, dtypes and shapes: decoded, adapters merged.

        Law: preparing and restoring changes a parameter by no more than its scheme's bound.
        """
        check_there(self.layout.steps)
        return pytree.unflatten(
            self.layout.spec, evaluate(self.layout.rewrite.restore, list(self.values()))
        )

    def partition(
        self, chosen: Callable[[str], bool]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The parts whose names are chosen, and the others: those to train, say, and those that
        stay.
        """
        first = {name: value for name, value in self.items() if chosen(name)}
        return first, {name: value for name, value in self.items() if name not in first}

    def replaced(self, *parts: Mapping[str, torch.Tensor]) -> Prepared:
        """Replace the values of some parts.

        Raises:
            RewriteError: there is no part of a name.
        """
        values = dict(self._values)
        for given in parts:
            for name, value in given.items():
                if name not in values:
                    raise RewriteError(
                        f"there is no part {name!r}; the parts are {', '.join(values)}"
                    )
                values[name] = value
        return Prepared(self.layout, list(values.values()))

    @property
    def calibrated(self) -> dict[str, torch.Tensor]:
        """The steps of activations, which come from samples."""
        codes = self.layout.rewrite.codes
        return {
            name: value
            for name, value in self.items()
            if name in codes and name.endswith(f".{INPUT_SCALE}")
        }

    def renewed(self, params: Any) -> Prepared:
        """Other values of the parameters in these steps. Steps of activations stay."""
        return self.layout.prepare(params).replaced(self.calibrated)

    def without_adapters(self) -> Prepared:
        """Replace adapters by some that add nothing."""
        return self.replaced(
            {name: torch.zeros_like(v) for name, v in self.items() if name.endswith(ADAPTERS[1])}
        )

    def with_step(self, step: Step) -> Prepared:
        """Add a step, which works on these parts as they are."""
        before = self.layout.rewrite
        after = rewrite(_nothing(before.prepare.output_types), before.names, step, before.codes)
        check_same((step,), self, after.prepare)
        with torch.no_grad():
            values = _in_order(
                after, evaluate(after.prepare, [value.detach() for value in self.values()])
            )
        return Prepared(replace(self.layout, steps=(*self.layout.steps, step)), values)

    def merge(self) -> tuple[Prepared, dict[str, torch.Tensor]]:
        """The adapters of `lora` added to their matrices, and those adapters. The new adapters are
        zero.

        Law: functions compute the same on both, up to rounding and, where matrices are codes, the
            scheme's bound.
        """
        adapters, _ = self.partition(is_adapter)
        merged = self.renewed(self.restore())
        second = {
            name: torch.zeros_like(value)
            for name, value in adapters.items()
            if name.endswith(ADAPTERS[1])
        }
        return merged.replaced(adapters, second), adapters

    def unmerge(self, adapters: Mapping[str, torch.Tensor]) -> Prepared:
        """Adapters taken out of the matrices that `merge` added them to.

        Law: ``merged.unmerge(adapters)`` is the original, up to rounding and, where matrices are
            codes, twice the scheme's bound.
        """
        negated = {
            name: -value if name.endswith(ADAPTERS[1]) else value
            for name, value in adapters.items()
        }
        return self.renewed(self.replaced(negated).restore()).replaced(adapters)


@dataclass(frozen=True)
class Bits:
    """A tensor of floats of eight bits as integers: `pickle` cannot read the former, only
    `torch.load` can.
    """

    integers: torch.Tensor
    dtype: torch.dtype


def for_pickle(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as `pickle` takes them."""
    is_small = lambda value: (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype.itemsize == 1
    )
    return {
        key: Bits(v.view(torch.int8), v.dtype) if is_small(v) else v for key, v in values.items()
    }


def from_pickle(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors that `for_pickle` was given."""
    return {
        key: v.integers.view(v.dtype) if isinstance(v, Bits) else v for key, v in values.items()
    }


def moved_part(part: torch.Tensor, type: Any) -> torch.Tensor:
    """A part where its type says; without values where it had none."""
    data = part.data
    new = (
        torch.empty_like(data, device=type.device, dtype=type.dtype)
        if data.is_meta
        else data.to(type.device, type.dtype)
    )
    if not isinstance(part, torch.nn.Parameter):
        return new
    if data.is_meta:
        return torch.nn.Parameter(new, requires_grad=part.requires_grad)
    part.data = new  # optimizers hold the parameter
    return part


def is_adapter(name: str) -> bool:
    """Test whether the part is an adapter of `lora`."""
    return name.endswith(ADAPTERS)


def _flatten(prepared: Any) -> tuple[tuple[Any, ...], Layout, tuple[str, ...]]:
    return tuple(prepared.values()), prepared.layout, tuple(prepared)


def _unflatten(layout: Any, values: Iterable[Any]) -> Prepared:
    return Prepared(layout, tuple(values))


optree.register_pytree_node(Prepared, _flatten, _unflatten, namespace=pytree.NAMESPACE)


def check_left(step: Step, done: Rewrite) -> None:
    """Check that a step that encodes weights finds some that are not codes yet.

    Raises:
        RewriteError: a filter's pattern, or the filter as a whole, chooses none.
    """
    chosen = getattr(step, "chosen", None)
    if chosen is None or not done.codes:
        return
    parts = zip(done.names, done.prepare.output_types, strict=True)
    left = [
        (name, static_shape(type))
        for name, type in parts
        if name not in done.codes and isinstance(type, TensorType)
    ]
    every = (
        [Patterns((pattern,)) for pattern in chosen.patterns]
        if isinstance(chosen, Patterns)
        else [chosen]
    )
    for one in every:
        if not any(one(name, shape) for name, shape in left):
            word, codes = type(step).__name__.lower(), ", ".join(sorted(done.codes)[:3])
            named = (
                f"the filter {one.patterns[0]!r} chooses"
                if isinstance(one, Patterns)
                else "there is"
            )
            raise RewriteError(
                f"{word}: {named} no weight that is not stored as codes already ({codes}, ...)",
                fix=(
                    "A weight is quantised once, and has its adapter before that. To store it"
                    " in another way, begin with `restored()` or the parameters."
                ),
            )


def layout_of_types(types: Mapping[str, TensorType], steps: tuple[Step, ...]) -> Layout:
    """The layout of a dict of parameters."""
    names = tuple(sorted(types))
    return Layout(
        names,
        tuple(types[name] for name in names),
        pytree.flatten(dict.fromkeys(names, 0))[1],
        steps,
    )


def layout_of(params: Any, steps: tuple[Step, ...]) -> Layout:
    """The names, types and structure of parameters.

    Raises:
        RewriteError: a leaf is not a tensor, or a filter's pattern matches no name; names it.
    """
    leaves, spec = pytree.flatten(params)
    names = tuple(
        ".".join(map(str, path)) for path in optree.tree_paths(params, namespace=pytree.NAMESPACE)
    )
    types: list[TensorType] = []
    for name, leaf in zip(names, leaves, strict=True):
        type_ = type_of_value(leaf) if isinstance(leaf, torch.Tensor) else None
        if not isinstance(type_, TensorType):
            raise RewriteError(f"the parameter {name!r} is {kind_of(leaf)}, not a tensor")
        types.append(type_)
    for step in steps:
        chosen, stacked = getattr(step, "chosen", None), getattr(step, "stacked", None)
        if isinstance(chosen, Patterns):
            most = getattr(step, "most_dims", None)
            chosen.check(
                names, types, type(step).__name__.lower(), most and most + (stacked is not NOTHING)
            )
        if isinstance(stacked, Patterns):
            stacked.check(names, types, type(step).__name__.lower(), None, least_dims=3)
        if isinstance(step, TensorParallel):
            step.check_names(names)
    return Layout(names, tuple(types), spec, steps)
