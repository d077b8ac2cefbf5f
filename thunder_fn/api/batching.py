"""vmap: a function of examples becomes a function of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal as Choice, ParamSpec, TypeVar, overload

import torch

from thunder_fn.api.calling import Transformed, transformed
from thunder_fn.api.captures import Plan, planned
from thunder_fn.capture import TENSOR, Alias, Captured, Shared, current, pytree
from thunder_fn.capture.apply import join, part, view_again, view_of_written, write
from thunder_fn.capture.failures import check_aliases
from thunder_fn.capture.scopes import user_source
from thunder_fn.capture.supported import check_supported
from thunder_fn.errors import VmapError, is_int, kind_of, spelled
from thunder_fn.interpreters.vmap import vmap as vmap_trace
from thunder_fn.ir.trace import Trace, as_dim, type_of_value
from thunder_fn.jitted import Jitted
from thunder_fn.structured.autograd_function import with_batch_dims
from thunder_fn.torch_internals import (
    become_results,
    is_functorch_wrapped,
    is_leaf,
    outside_inference_mode,
    outside_torch_func,
)

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

P = ParamSpec("P")
R = TypeVar("R")


Randomness = Choice["error", "different", "same"]
RANDOMNESS = ("error", "different", "same")


@dataclass(frozen=True)
class Vmap(Transformed):
    """A function on batches. See `vmap`."""

    fn: Callable[..., Any]
    in_dims: Any = 0
    out_dims: Any = 0
    randomness: Randomness = "error"
    chunk_size: int | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.chunk_size is None:
            make: Callable[..., Plan] = lambda capture: self._plan(capture, args, kwargs)
            return planned(self, args, kwargs, make, whole=self)
        dims = spread_in_dims(self.in_dims, args, self.__name__)
        size = batch_size(args, dims, self.__name__)
        whole = replace(self, chunk_size=None)
        if size <= self.chunk_size:
            return whole(*args, **kwargs)
        return self._in_chunks(whole, args, kwargs, dims, size, self.chunk_size)

    def by_torch(self) -> Callable[..., Any]:
        """The same function by torch.func."""
        in_dims = tuple(self.in_dims) if isinstance(self.in_dims, list) else self.in_dims
        options = (in_dims, self.out_dims, self.randomness)
        return torch.func.vmap(self.fn, *options, chunk_size=self.chunk_size)

    def _plan(
        self, capture: Callable[..., Captured], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan:
        dims = spread_in_dims(self.in_dims, args, self.__name__)
        size = batch_size(args, dims, self.__name__)
        leaves, spec = pytree.flatten(args)
        examples = [
            leaf if dim is None else example_of(leaf, dim)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        more = pytree.flatten(kwargs)[0]  # keyword arguments are no batches
        known = {i for i, dim in enumerate((*dims, *(None for _ in more))) if dim is None}
        captured = capture(
            self.fn, pytree.unflatten(spec, examples), kwargs, inside="vmap", known=known
        )
        if captured.writes and current() is not None:  # whose examples are not in the batch
            batches = [leaf for leaf in (*leaves, *more) if isinstance(leaf, torch.Tensor)]
            targets = captured.targets_among(len(batches))
            check_aliases(captured.trace, batches, targets, user_source(), self.__name__)
        kept = [
            dim for leaf, dim in zip(leaves, dims, strict=True) if isinstance(leaf, torch.Tensor)
        ]
        in_dims = (*kept, *(None for _ in range(len(captured.trace.inputs) - len(kept))))
        trace = with_batch_dims(captured.trace, in_dims)
        new, flags = vmap_trace(trace, in_dims, as_dim(size), self.randomness)
        batch = _Batch(self.__name__, captured, new, in_dims, flags, size, self.out_dims)
        return Plan(self.__name__, captured, new, batch.results)

    def _in_chunks(
        self, whole: Vmap, args: Any, kwargs: Any, dims: list[int | None], size: int, chunk: int
    ) -> Any:
        leaves, spec = pytree.flatten(args)
        parts: list[Any] = []
        state = torch.get_rng_state() if self.randomness == "same" else None
        for start in range(0, size, chunk):
            count = min(chunk, size - start)
            narrowed = [
                leaf if dim is None else leaf.narrow(dim, start, count)
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
            if state is not None:  # the examples of all chunks draw the same numbers
                torch.set_rng_state(state)
            parts.append(whole(*pytree.unflatten(spec, narrowed), **kwargs))
        return self._joined(parts)

    def _joined(self, parts: list[Any]) -> Any:
        columns = zip(*(pytree.flatten(part)[0] for part in parts), strict=True)
        spec = pytree.flatten(parts[0])[1]
        dims = spread_over_result(self.out_dims, spec)
        joined = [
            (
                column[0]
                if dim is None or not isinstance(column[0], torch.Tensor)
                else torch.cat(column, dim)
            )
            for column, dim in zip(columns, dims, strict=True)
        ]
        return pytree.unflatten(spec, joined)


@dataclass(frozen=True)
class _Batch:
    """A batched call: the function, its batched trace, and the dims of inputs and outputs.

    Args:
        in_dims: the batch dim of each input.
        flags: the batch dim of each output of the trace, in front; None for those that all examples
            share.
        size: the number of examples.
        out_dims: where the user wants the batch dims of the results.
    """

    name: str
    captured: Captured
    trace: Trace
    in_dims: Sequence[int | None]
    flags: Sequence[int | None]
    size: int
    out_dims: Any

    @cached_property
    def places(self) -> tuple[tuple[str, int | None], ...]:
        """The path of each tensor of the result, and where its batch dim goes."""
        dims = spread_out_dims(self.out_dims, self.captured, self.name)
        return tuple(zip(self.captured.paths(), dims, strict=True))

    def results(self, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Any:
        """Make the function's result, after its writes."""
        captured, count = self.captured, self.captured.num_results
        if captured.writes or captured.effects:
            self.write_back(inputs, outputs[count:], self.flags[count:])
        results, dims = list(outputs[:count]), list(self.flags[:count])
        if captured.writes or captured.aliases or captured.shared:
            self.written(inputs, results, dims)
        if captured.joints:
            self.join(inputs, results, dims, len(outputs))
        if (recorder := current()) is not None:
            self.view(recorder, inputs, results, dims)
        return self.arranged(results, dims)

    def written(self, inputs: Sequence[Any], results: list[Any], dims: list[Any]) -> None:
        """Take views of written arguments for the results that show them."""
        found = _written_results(self.captured, self.trace, inputs, self.in_dims, self.size)
        for place, alias in found:
            results[place], dims[place] = alias, 0

    def join(
        self, inputs: Sequence[Any], results: list[Any], dims: Sequence[Any], count: int
    ) -> None:
        """Lay results that share memory in eager mode into one."""
        laid = [None if dim is None else one for one, dim in zip(results, dims, strict=True)]
        laid += [None] * (count - len(laid))  # what is stored outside
        join(self.captured, self.trace, inputs, laid, self.size)
        pairs = zip(results, laid, strict=False)
        results[:] = [one if batched is None else batched for one, batched in pairs]

    def view(
        self, recorder: Recorder, inputs: Sequence[Any], results: list[Any], dims: Sequence[Any]
    ) -> None:
        """Make views of the results that are views of inputs, in a capture around this call."""
        captured, in_dims = self.captured, self.in_dims
        for shared in (one for one in captured.shared if one.result < captured.num_results):
            source = inputs[shared.source] if isinstance(shared.source, int) else shared.source
            dim = in_dims[shared.source] if isinstance(shared.source, int) else None
            batched = source if dim is None else source.movedim(dim, 0)
            result = results[shared.result]
            if dim is not None and dims[shared.result] is None:  # what is written is no batch
                part(recorder, source, result, self.name)
                continue
            results[shared.result] = view_again(
                recorder, captured, self.trace, shared, (source, batched), result
            )

    def write_back(self, inputs: Sequence[Any], values: Any, flags: Any) -> None:
        """Give mutated tensors their new values; a batched value does not fit into an unbatched
        tensor.
        """
        captured, in_dims = self.captured, self.in_dims
        for one, value, flag in zip(captured.writes, values, flags, strict=False):
            dim = in_dims[one.target] if isinstance(one.target, int) else None
            target = inputs[one.target] if isinstance(one.target, int) else one.target
            if flag is not None and dim is None:
                raise VmapError(
                    f"{self.name}: the function writes a value that differs between examples"
                    " into a tensor that is not batched: different inplace randomness on an"
                    " unbatched tensor, or an inplace op for which there exists a Tensor `other` in"
                    " extra_args that has more elements than `self`",
                    fix="Return the value instead, or pass the tensor with a batch dim.",
                )
            placed = (
                value
                if dim is None
                else value.movedim(0, dim)
                if flag is not None
                else value.unsqueeze(dim)
            )
            write(target, placed)
        first = len(captured.writes)
        for effect in captured.effects:  # what is a batch means nothing outside
            last = first + effect.count
            is_one = all(flag is None for flag in flags[first:last])
            effect.apply(values[first:last] if is_one else effect.traced)
            first = last

    def arranged(self, outputs: Sequence[Any], flags: Sequence[Any]) -> Any:
        """Move the batch dims to where the user wants them."""
        placed: list[Any] = []
        for (path, dim), value, flag in zip(self.places, outputs, flags, strict=True):
            if dim is None and flag is not None:
                raise VmapError(
                    f"{self.name}: out_dims is None for {path}, but {path} differs between"
                    " examples: can not return a BatchedTensor when out_dim is None. Its entry must"
                    " be an int or a python collection of ints"
                )
            if dim is not None and (type(dim) is not int or dim or flag is None):
                value = place(value, flag is not None, dim, self.size, f"{self.name}: {path}")
            placed.append(value)
        return self.captured.result(tuple(placed))


def _written_results(
    captured: Captured, new: Trace, inputs: Sequence[Any], in_dims: Sequence[int | None], size: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Results, by position, that show memory of arguments which the function writes to, as views
    of these, batched in front.
    """
    count = captured.num_results
    pairs = zip(captured.trace.outputs[count:], captured.writes, strict=False)
    targets = {atom: write.target for atom, write in pairs}
    same = [
        Alias(i, targets[atom], (), (), 0, torch.float32)
        for i, atom in enumerate(captured.trace.outputs[:count])
        if atom in targets
    ]
    seen = [one for one in (*captured.aliases, *captured.shared) if one.result < count]
    placed = [*(one for one in seen if isinstance(one, Alias) and one.is_written), *same]
    others = [
        one for one in seen if isinstance(one, Shared) and captured.writes and not one.is_same
    ]
    known = {one.result for one in placed}
    for alias in (*placed, *(one for one in others if one.result not in known)):
        target = alias.source
        tensor = inputs[target] if isinstance(target, int) else target
        dim = in_dims[target] if isinstance(target, int) else None
        if dim is None or is_tracer(tensor) or is_functorch_wrapped(tensor):
            continue
        if isinstance(alias, Shared):
            view = view_of_written(captured, new, alias, tensor.movedim(dim, 0))
            if view is not None:
                yield alias.result, view
        elif alias in same:
            yield alias.result, tensor.movedim(dim, 0)
        else:
            whole = replace(
                alias, size=(size, *alias.size), stride=(tensor.stride(dim), *alias.stride)
            )
            yield alias.result, whole.of(tensor)


@overload
def vmap(
    f: Jitted[P, R],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: Randomness = "error",
    *,
    chunk_size: int | None = None,
) -> Jitted[P, R]: ...
@overload
def vmap(
    f: Callable[P, R],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: Randomness = "error",
    *,
    chunk_size: int | None = None,
) -> Callable[P, R]: ...
@spelled(
    in_axes="in_dims",
    out_axes="out_dims",
    axis_size=(
        "The size is that of the batched arguments: pass `torch.arange(n)`, or a tensor, as one of"
        " them."
    ),
    axis_name="Batch dims have no names: reduce over the dim of the result, outside of the vmap.",
    spmd_axis_name="Batch dims have no names.",
    sum_match="Leave it out: batch dims have no names.",
)
def vmap(
    f: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: Randomness = "error",
    *,
    chunk_size: int | None = None,
) -> Any:
    """Batch a function: a function of examples becomes a function of batches.

    Law: ``vmap(f)(xs)[i] == f(xs[i])`` for every i.

    Args:
        f: any PyTorch callable on one example.
        in_dims: the batch dim of each positional argument. An int, or None for an argument that all
            examples share. A tuple has one entry for each argument, each a pytree prefix of its
            argument. Negative dims count from the end. Keyword arguments are shared.
        out_dims: where to put the batch dim of the outputs, likewise; None only for outputs that
            all examples share.
        randomness: what random ops do: "error", "different" for each example, or the "same".
        chunk_size: the most examples to compute at a time.

    Raises:
        VmapError: dims that do not fit, sizes that differ, nothing to batch over, or random ops
            under "error".

    Example:
        >>> vmap(torch.dot)(torch.ones(2, 3), torch.ones(2, 3))
        tensor([3., 3.])

    Source: torch.func.vmap for the signature; functorch's batching rules by `leaf_vmap`.
    """
    if randomness not in RANDOMNESS:
        raise VmapError(
            f"vmap: randomness is one of {', '.join(map(repr, RANDOMNESS))}, given {randomness!r}"
        )
    if wrong_chunk_size(chunk_size):
        raise VmapError(f"vmap: chunk_size should be None or greater than 0. Given {chunk_size!r}")
    return transformed(
        f, lambda fn: Vmap(fn, frozen(in_dims), frozen(out_dims), randomness, chunk_size)
    )


def frozen(dims: Any) -> Any:
    """Dims as the user gave them: lists stay lists, as torch.func wants them for lists."""
    if isinstance(dims, dict):
        return {key: frozen(item) for key, item in dims.items()}
    if isinstance(dims, list):
        return [frozen(item) for item in dims]
    return tuple(map(frozen, dims)) if isinstance(dims, tuple) else dims


def wrong_chunk_size(chunk_size: Any) -> str:
    """The reason why there are no such chunks; empty if there are."""
    is_int = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    if chunk_size is None or (is_int and chunk_size > 0):
        return ""
    return f"`chunk_size` should be greater than 0, an int or None, given {chunk_size!r}"


def example_of(leaf: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor with the type of one example, in the memory of the batch: a function that writes to
    it may read that by another name.
    """
    shape = [size for index, size in enumerate(leaf.shape) if index != dim]
    if is_functorch_wrapped(
        leaf
    ):  # the levels of torch.func are around the capture of the function
        with outside_torch_func():
            return torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
    stride = [step for index, step in enumerate(leaf.stride()) if index != dim]
    is_shown = current() is None and leaf.shape[dim]
    is_tracked = leaf.requires_grad or type(leaf.shape[dim]) is not int
    is_view = is_shown or (not is_tracked and leaf.shape[dim])
    with (
        outside_inference_mode(),
        torch.set_grad_enabled(bool(is_view)),
    ):  # a view taken without gradients cannot be changed
        if is_shown:
            example = leaf.data.as_strided(shape, stride)
        elif is_view:
            example = leaf.data.select(dim, 0)
        else:
            example = leaf.new_empty(shape)
    if leaf.requires_grad:
        with outside_torch_func():
            if is_leaf(leaf):
                return example.requires_grad_()
            become_results((example,))
    return example


def is_tracer(leaf: torch.Tensor) -> bool:
    """Test for a tensor of a capture, which has no memory of its own to look at."""
    return type(leaf) is not torch.Tensor and not isinstance(leaf, torch.nn.Parameter)


def spread_in_dims(in_dims: Any, args: tuple[Any, ...], name: str) -> list[int | None]:
    """One non-negative dim or None for each leaf of the arguments."""
    if isinstance(in_dims, bool) or not isinstance(in_dims, (int, tuple, list)):
        raise VmapError(
            f"{name}: expected `in_dims` to be int or a (potentially nested) tuple with one entry"
            f" for each argument, given {in_dims!r}"
        )
    if not args:
        raise VmapError(
            f"{name}: got no inputs: called without positional arguments, there is nothing to batch"
            " over"
        )
    given = (in_dims,) * len(args) if isinstance(in_dims, int) else in_dims
    if len(given) != len(args):
        raise VmapError(
            f"{name}: in_dims is not compatible with the structure of `inputs`: it has"
            f" {_counted(len(given), 'entry', 'entries')}, but the call has"
            f" {_counted(len(args), 'positional argument', 'positional arguments')}",
            fix="Give one for each argument, such as `in_dims=(0, None)`.",
        )
    dims: list[int | None] = []
    for index, (arg, entry) in enumerate(zip(args, given, strict=True)):
        leaves, spec = pytree.flatten(arg)
        try:
            spread = spread_prefix(
                entry,
                spec,
                "in_dims" if given is not in_dims else f"in_dims[{index}]",
                f"args[{index}]",
            )
        except ValueError as error:
            raise VmapError(
                f"{name}: in_dims is not compatible with the structure of `inputs`, of which it"
                f" must be a prefix: {error}"
            ) from None
        for path, leaf, dim in zip(
            pytree.paths(arg, f"args[{index}]"), leaves, spread, strict=True
        ):
            dims.append(check_dim(leaf, dim, path, name))
    return dims


def spread_prefix(prefix: Any, spec: pytree.PyTreeSpec, path: str, of: str) -> list[Any]:
    """One entry of the prefix for each leaf of the structure. `path` and `of` are how one writes
    the two.

    Raises:
        ValueError: they do not fit; names the first place.
    """
    if prefix is None or isinstance(prefix, int):
        return [prefix] * spec.num_leaves
    children, entries = spec.children(), None
    if isinstance(prefix, dict) and set(prefix) == set(spec.entries()):
        entries = [(prefix[key], f"{path}[{key!r}]") for key in spec.entries()]
    elif isinstance(prefix, (tuple, list)) and not spec.is_leaf():
        entries = [(entry, f"{path}[{index}]") for index, entry in enumerate(prefix)]
    elif type(prefix) is spec.type and (parts := pytree.parts_of(prefix)).keys() == set(
        spec.entries()
    ):
        entries = [(parts[key], f"{path}.{key}") for key in spec.entries()]
    if entries is None or len(entries) != len(children):
        raise ValueError(f"{path} is {prefix!r}, and {of} is {pytree.describe(spec)}")
    names = pytree.entries(spec, of)
    return [
        item
        for (entry, mine), child, its in zip(entries, children, names, strict=True)
        for item in spread_prefix(entry, child, mine, its)
    ]


def check_dim(leaf: Any, dim: Any, path: str, name: str) -> int | None:
    """The dim counted from the front."""
    if dim is None:
        return None
    if not is_int(dim):
        raise VmapError(f"{name}: the batch dim of {path} is an int or None, given {dim!r}")
    if not isinstance(leaf, torch.Tensor):
        raise VmapError(
            f"{name}: Got in_dim={dim} for an input but the input is of type {type(leaf)}: {path}"
            f" is {kind_of(leaf)}",
            fix="Use None in in_dims for it.",
        )
    if leaf.is_nested and leaf.layout is torch.strided:  # it has no sizes
        check_supported(leaf, lambda: path)
    if not -leaf.dim() <= dim < leaf.dim():
        raise VmapError(
            f"{name}: Got in_dim={dim} for some input, but that input is a Tensor of dimensionality"
            f" {leaf.dim()}: {path} is {type_of_value(leaf)}",
            fix="Use None in in_dims for what all examples share, or give it a batch dim.",
        )
    return dim % leaf.dim()


def batch_size(args: tuple[Any, ...], dims: list[int | None], name: str) -> int:
    """The size that all batched leaves share."""
    leaves, _ = pytree.flatten(args)
    paths = pytree.paths(args, "args")
    sizes = [
        (path, dim, leaf.shape[dim])
        for path, leaf, dim in zip(paths, leaves, dims, strict=True)
        if dim is not None
    ]
    if not sizes:
        raise VmapError(
            f"{name}: at least one Tensor has to be batched, but in_dims is None for every"
            " argument",
            source=user_source(),
        )
    if any(size != sizes[0][2] for _, _, size in sizes):
        listed = "\n".join(f"  {path} has size {size} in dim {dim}" for path, dim, size in sizes)
        raise VmapError(
            f"{name}: Expected all tensors to have the same size in the mapped dimension,"
            f" but\n{listed}",
            source=user_source(),
            fix="Use None in in_dims for arguments that all examples share.",
        )
    return sizes[0][2]


def spread_over_result(out_dims: Any, spec: pytree.PyTreeSpec) -> list[Any]:
    """One entry of out_dims for each leaf of the result; `(1,)` is 1 where the result is one
    tensor, as in torch.func.

    Raises:
        ValueError: they do not fit; names the first place.
    """
    is_single = spec.is_leaf() and isinstance(out_dims, (tuple, list)) and len(out_dims) == 1
    return spread_prefix(out_dims[0] if is_single else out_dims, spec, "out_dims", "out")


def spread_out_dims(out_dims: Any, captured: Captured, name: str) -> list[int | None]:
    """One dim or None for each tensor of the result."""
    try:
        spread = spread_over_result(out_dims, captured.out_spec)
    except ValueError as error:
        raise VmapError(
            f"{name}: out_dims is not compatible with the structure of `outputs`, of which it must"
            f" be a prefix: {error}",
            fix="It must be an int, None or a python collection of ints.",
        ) from None
    for path, dim, leaf in zip(
        pytree.paths_of(captured.out_spec, "out"), spread, captured.out_leaves, strict=True
    ):
        if leaf is not TENSOR and dim is not None:
            what = (
                f"{name}: the function must only return Tensors, got type {type(leaf)} as a return:"
                f" {path} has no batch dim"
            )
            fix = (
                "Return a tensor (`torch.tensor(1.0)`), or say None for it in out_dims: then it is"
                " given back as it is."
            )
            raise VmapError(what, source=user_source(), fix=fix)
    return [dim for dim, leaf in zip(spread, captured.out_leaves, strict=True) if leaf is TENSOR]


class NoSuchDim(VmapError, IndexError):
    """A result has no place for its batch dim where out_dims wants it."""


def place(value: Any, is_batched: bool, dim: int, size: int, where: str) -> Any:
    """The value with its batch dim at `dim`; a value that all examples share is repeated."""
    rank = value.dim() + (not is_batched)
    if isinstance(dim, bool) or not -rank <= dim < rank:
        raise NoSuchDim(
            f"{where}: Dimension out of range: it has {rank} dims with the batch dim, so out_dims"
            f" cannot be {dim!r}"
        )
    if not is_batched:
        value = value.unsqueeze(0).expand(size, *value.shape)
    return value if dim == 0 else value.movedim(0, dim)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
