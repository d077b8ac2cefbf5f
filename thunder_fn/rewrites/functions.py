"""Rewrites of functions of `(params, *inputs)`: what users call.

q = quantize(f, "int8")
new = q.prepare(params)      # codes and scales, by name
q(new, x)                    # f on what the codes stand for
new.restore()                # parameters again, under their own names
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import optree
import torch

from thunder_fn.api.calling import Transformed, apply
from thunder_fn.capture import Captured, capture, pytree
from thunder_fn.errors import RewriteError, located
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.rewrite import Rewrite, Step, identity
from thunder_fn.jit import Jitted, Options
from thunder_fn.rewrites.distributed import Ddp, Fsdp, group_of
from thunder_fn.rewrites.schemes import Scheme, scheme_named
from thunder_fn.rewrites.steps import Lora, Quantize, example, read_filter
from thunder_fn.trace import TensorType, Trace, TraceBuilder, type_of_value

ORDER: tuple[type, ...] = (Lora, Quantize, Fsdp, Ddp)
"""Which steps come first, in whatever order they were asked for: an adapter is added to a matrix, not to its codes, and a
whole weight is quantised, not a rank's rows of it."""


@dataclass(frozen=True)
class Layout:
    """How parameters were prepared: theirs names, types and structure, and the steps."""

    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    spec: pytree.PyTreeSpec
    steps: tuple[Step, ...]

    @cached_property
    def rewrite(self) -> Rewrite:
        """The steps on the parameters alone, for what they make of them and back."""
        builder = TraceBuilder("nothing")
        for type in self.types:
            builder.input(type)
        return self.rewritten(builder.build(()))

    def rewritten(self, trace: Trace) -> Rewrite:
        """The steps on a trace whose first inputs are the parameters."""
        done = identity(trace, self.names)
        for step in self.steps:
            done = done.then(step)
        return done


class Prepared(Mapping[str, torch.Tensor]):
    """Parameters as a rewrite stores them, by name. A pytree, so gradients, optimizers and jit take it as it is."""

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
        texts = (type_of_value(value) if isinstance(value, torch.Tensor) else value for value in self.values())
        return f"Prepared({', '.join(f'{name}: {text}' for name, text in zip(self, texts, strict=True))})"

    def restore(self) -> Any:
        """The parameters in their own structure, dtypes and shapes: decoded, adapters merged.

        Law: preparing and restoring changes a parameter by no more than its scheme's bound.
        """
        return pytree.unflatten(self.layout.spec, evaluate(self.layout.rewrite.restore, list(self.values())))

    def partition(self, chosen: Callable[[str], bool]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The parts whose names are chosen, and the others: those to train, say, and those that stay."""
        first = {name: value for name, value in self.items() if chosen(name)}
        return first, {name: value for name, value in self.items() if name not in first}

    def replaced(self, *parts: Mapping[str, torch.Tensor]) -> Prepared:
        """The same with other values for some parts.

        Raises:
            RewriteError: there is no part of a name.
        """
        values = dict(self._values)
        for given in parts:
            for name, value in given.items():
                if name not in values:
                    raise RewriteError(f"there is no part {name!r}; the parts are {', '.join(values)}")
                values[name] = value
        return Prepared(self.layout, list(values.values()))


def _flatten(prepared: Any) -> tuple[tuple[Any, ...], Layout, tuple[str, ...]]:
    return tuple(prepared.values()), prepared.layout, tuple(prepared)


def _unflatten(layout: Any, values: Iterable[Any]) -> Prepared:
    return Prepared(layout, tuple(values))


optree.register_pytree_node(Prepared, _flatten, _unflatten, namespace=pytree.NAMESPACE)


@dataclass(frozen=True, eq=False)
class Rewritten(Transformed):
    """A function of `(params, *inputs)` on parameters that are stored in another way. Made by `quantize` and its kin."""

    fn: Callable[..., Any]
    steps: tuple[Step, ...]
    options: Options | None = None

    def prepare(self, params: Any) -> Prepared:
        """The parameters as this function takes them.

        Args:
            params: a pytree of tensors, as the original function takes them first.
        """
        layout = layout_of(params, self.steps)
        leaves = pytree.flatten(params)[0]
        with torch.no_grad():
            return Prepared(layout, evaluate(layout.rewrite.prepare, [leaf.detach() for leaf in leaves]))

    def __call__(self, params: Any, *inputs: Any, **kwargs: Any) -> Any:
        self._check(params)
        if self.jitted is not None:
            return self.jitted(params, *inputs, **kwargs)
        return self._run(params, *inputs, **kwargs)

    @cached_property
    def jitted(self) -> Jitted | None:
        """The call as a jitted function, where a jitted function was rewritten."""
        return None if self.options is None else Jitted(self._run, self.options)

    def with_step(self, step: Step) -> Rewritten:
        """This function with one more step."""
        return replace(self, steps=in_order((*self.steps, step)))

    def rewrite(self, params: Any, *inputs: Any, **kwargs: Any) -> Rewrite:
        """The three traces, for parameters in their original form or prepared, and example inputs."""
        layout = params.layout if isinstance(params, Prepared) else layout_of(params, self.steps)
        return layout.rewritten(self._captured(layout, inputs, kwargs).trace)

    def _run(self, params: Prepared, *inputs: Any, **kwargs: Any) -> Any:
        captured = self._captured(params.layout, inputs, kwargs)
        count = len(params.layout.names)
        self._check_writes(captured, params.layout)
        tensors = [leaf for leaf in pytree.flatten((inputs, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        compute = params.layout.rewritten(captured.trace).compute
        written = {write.target - count for write in captured.writes if isinstance(write.target, int)}
        # autograd may save a tensor that is written to below, such as the running mean of a batch norm
        given = [tensor.clone() if i in written else tensor for i, tensor in enumerate(tensors)]
        outputs = apply(self.__name__, compute, [*params.values(), *given])
        with torch.no_grad():
            for write, value in zip(captured.writes, outputs[captured.num_results :], strict=True):
                target = tensors[write.target - count] if isinstance(write.target, int) else write.target
                target.copy_(value)
        return captured.result(outputs)

    def _captured(self, layout: Layout, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """The original function, captured on parameters of the original types."""
        params = pytree.unflatten(layout.spec, list(map(example, layout.types)))
        return capture(self.fn, (params, *inputs), kwargs)

    def _check(self, params: Any) -> None:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        if not isinstance(params, Prepared):
            raise RewriteError(
                located(
                    f"{name} was rewritten and takes prepared parameters, given a {type(params).__name__}",
                    fix="Prepare them once: `new = q.prepare(params)`, then call `q(new, ...)`.",
                )
            )
        if params.layout.steps != self.steps:
            raise RewriteError(
                located(
                    f"{name} was given parameters that another transform prepared\n"
                    f"  prepared by: {_steps_text(params.layout.steps)}\n  taken:       {_steps_text(self.steps)}",
                    fix="Use the `prepare` of the function that you call.",
                )
            )

    def _check_writes(self, captured: Captured, layout: Layout) -> None:
        for write in captured.writes:
            if isinstance(write.target, int) and write.target < len(layout.names):
                name = layout.names[write.target]
                raise RewriteError(
                    located(
                        f"the function changes its parameter {name!r} in place, which has no place once it is rewritten",
                        fix="Return the new parameters, and prepare those.",
                    )
                )

    @property
    def __name__(self) -> str:
        words = "_".join(type(step).__name__.lower() for step in reversed(self.steps))
        return f"{words}_{getattr(self.fn, '__name__', type(self.fn).__name__)}"


def _steps_text(steps: Sequence[Step]) -> str:
    return ", then ".join(map(str, steps)) or "nothing"


def layout_of(params: Any, steps: tuple[Step, ...]) -> Layout:
    """The names, types and structure of parameters.

    Raises:
        RewriteError: a leaf is not a tensor; names it.
    """
    leaves, spec = pytree.flatten(params)
    names = tuple(".".join(map(str, path)) for path in optree.tree_paths(params, namespace=pytree.NAMESPACE))
    types: list[TensorType] = []
    for name, leaf in zip(names, leaves, strict=True):
        type_ = type_of_value(leaf) if isinstance(leaf, torch.Tensor) else None
        if not isinstance(type_, TensorType):
            raise RewriteError(f"the parameter {name!r} is a {type(leaf).__name__}, not a tensor")
        types.append(type_)
    return Layout(names, tuple(types), spec, steps)


def rewritten(f: Any, step: Step) -> Any:
    """f with one more step: a function, a jitted or rewritten function, or a `Rewrite`."""
    if isinstance(f, Rewrite):
        return f.then(step)
    if isinstance(f, Rewritten):
        return f.with_step(step)
    if isinstance(f, Jitted):
        return Rewritten(f.fn, (step,), f.options)
    if isinstance(f, torch.nn.Module):
        from thunder_fn.rewrites.modules import rewritten_module

        return rewritten_module(f, step)
    if not callable(f):
        raise RewriteError(
            f"expected a function of (params, *inputs) or a module, given a {type(f).__name__}: {f!r:.60}"
        )
    return Rewritten(f, (step,))


def in_order(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps in the order in which they work on each other's results. A stable sort: others keep their places."""
    return tuple(sorted(steps, key=lambda step: ORDER.index(type(step)) if type(step) in ORDER else len(ORDER)))


def quantize(f: Any, scheme: str | Scheme = "int8", *, filter: Any = None, training: bool = False) -> Any:
    """Store weights as numbers of few bits.

    Law: ``q(q.prepare(params), *xs)`` is ``f(q.prepare(params).restore(), *xs)`` up to rounding, and `restore` gives each
    parameter back within the scheme's bound. Schemes that round activations too (`int8_dynamic`) state theirs.

    Args:
        f: a function of `(params, *inputs)`, jitted or not, already rewritten or not; a module; or a `Rewrite`.
        scheme: `"int8"` (one scale a row), `"int8_dynamic"` (activations too), `"int4"` (groups of 64), `"nf4"` (blocks
            of 64, scales quantised again), `"fp8"` (one scale a row), `"fp8_tensor"`; or a `Scheme`.
        filter: which weights: patterns on names such as `"layers.*.weight"`, or a predicate on (name, shape). Left out,
            all floating parameters of two or more dims.
        training: keep the weights and let computations see them rounded (quantisation-aware training).

    Returns:
        What was given, on other parameters: a `Rewritten` function with `prepare`, a `RewrittenModule`, or a `Rewrite`.

    Raises:
        RewriteError: there is no such scheme, or f is none of these.

    Example:
        >>> import torch
        >>> q = quantize(lambda params, x: torch.nn.functional.linear(x, params["w"]), "int8")
        >>> q.prepare({"w": torch.ones(2, 3)})
        Prepared(w.values: i8[2, 3], w.scales: f32[2])

    Source: the papers that `thunder_fn.rewrites.schemes` names.
    """
    return rewritten(f, Quantize(scheme_named(scheme), read_filter(filter, "quantize"), training))


def lora(f: Any, rank: int = 8, *, alpha: float | None = None, filter: Any = None) -> Any:
    """Put a trainable low-rank adapter beside each matrix: ``w + alpha / rank * lora_b @ lora_a``.

    Law: before training, ``q(q.prepare(params), *xs)`` is ``f(params, *xs)``; `restore` merges the adapters.

    Composes with `quantize` in either order (QLoRA): the matrices are stored as codes, the adapters are not.

    Args:
        f: as for `quantize`.
        rank: of the adapters.
        alpha: scales them; left out, it equals rank.
        filter: which matrices; left out, all floating parameters of two dims.

    Raises:
        RewriteError: rank is not positive, or f is none of these.

    Source: LoRA (arXiv:2106.09685), QLoRA (arXiv:2305.14314).
    """
    if rank < 1:
        raise RewriteError(f"lora: the rank is at least 1, given {rank}")
    return rewritten(f, Lora(rank, float(rank if alpha is None else alpha), read_filter(filter, "lora")))


def fsdp(f: Any, mesh: Any, *, zero: int = 3, bucket: str = "block", reduction: str = "mean") -> Any:
    """Shard parameters over the ranks of a mesh, by rows; gather them where they are used.

    Law: on N ranks with a batch each, loss and gradients are those of one rank that sees all batches: the mean over ranks.
    Composes with `quantize` and `lora` in either order.

    Args:
        f: as for `quantize`. Every rank calls it, on its own batch.
        mesh: a DeviceMesh of one dim.
        zero: 3 gathers parameters again for the backward; 2 keeps them from the forward.
        bucket: "block" gathers the parameters of a module in a list of modules (`layers.3`) in one collective, and the
            others where a torch function uses them; "each" gathers for each use.
        reduction: "mean" or "sum" of the ranks' gradients.

    Returns:
        What was given, on shards: `prepare` takes whole parameters and keeps this rank's rows; `restore` and `state_dict`
        gather, so all ranks call them.

    Raises:
        RewriteError: mesh is no mesh of one dim, or an option is none of the choices.

    Source: ZeRO (arXiv:1910.02054), PyTorch FSDP (arXiv:2304.11277).
    """
    _check_choice("fsdp", "zero", zero, (2, 3))
    _check_choice("fsdp", "bucket", bucket, ("block", "each"))
    _check_choice("fsdp", "reduction", reduction, ("mean", "sum"))
    return rewritten(f, Fsdp(group_of(mesh), zero, bucket, reduction))


def ddp(f: Any, mesh: Any, *, bucket: str = "block", reduction: str = "mean") -> Any:
    """Keep all parameters on every rank, and reduce their gradients.

    Law: as for `fsdp`.

    Args:
        f, mesh, reduction: as for `fsdp`.
        bucket: "block" reduces the gradients of a block in one collective, "each" those of each use.

    Raises:
        RewriteError: as for `fsdp`.
    """
    _check_choice("ddp", "bucket", bucket, ("block", "each"))
    _check_choice("ddp", "reduction", reduction, ("mean", "sum"))
    return rewritten(f, Ddp(group_of(mesh), bucket, reduction))


def _check_choice(name: str, option: str, given: Any, choices: tuple[Any, ...]) -> None:
    if given not in choices:
        raise RewriteError(f"{name}: {option} is {' or '.join(map(repr, choices))}, given {given!r}")
