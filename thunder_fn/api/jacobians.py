"""Jacobians and Hessians: vmap of vjp and jvp over a basis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, ParamSpec, overload

import torch

from thunder_fn.api.batching import Randomness, vmap, wrong_chunk_size
from thunder_fn.api.calling import Transformed, described, transformed
from thunder_fn.api.captures import Plan, plan_of, planned, twin_of
from thunder_fn.api.gradients import Argnums, check_argnums, differentiated_leaves, frozen_argnums
from thunder_fn.api.pullbacks import vjp
from thunder_fn.api.tangents import jvp
from thunder_fn.capture import Captured, current, pytree
from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import NotDifferentiable, VmapError, callable_name, spelled
from thunder_fn.ir.trace import type_of_value
from thunder_fn.jitted import Jitted

P = ParamSpec("P")


class Jacobian(Transformed):
    """The common part of both modes: eager calls take the whole computation as one plan."""

    argnums: Argnums

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if (twin := twin_of(self, args, kwargs)) is not None:
            return twin(*args, **kwargs)
        if current() is not None or not self.is_one_plan:
            self.check(args)
            return self.compute(*args, **kwargs)
        return planned(self, args, kwargs, partial(self._plan, args, kwargs))

    def _plan(self, args: tuple[Any, ...], kwargs: Any, capture: Callable[..., Captured]) -> Plan:
        self.check(args)
        return plan_of(self.compute, args, kwargs, capture)

    def check(self, args: tuple[Any, ...]) -> None:
        """Check the arguments to differentiate by."""
        positions = check_argnums(self.argnums, args, self.__name__)
        differentiated_leaves(args, positions, self.__name__)
        for position in positions:
            check_real(args[position], f"args[{position}]", self.__name__)

    @property
    def is_one_plan(self) -> bool:
        """Test for a computation that is to run at once."""
        return True

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The Jacobian, by transforms."""
        raise NotImplementedError

    def apart(self, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        """The function of the arguments that it is differentiated by, and these."""
        positions = check_argnums(self.argnums, args, self.__name__)
        chosen = tuple(args[position] for position in positions)
        return at_positions(self.fn, args, kwargs, positions), chosen


@dataclass(frozen=True)
class Jacrev(Jacobian):
    """A Jacobian, row by row. See `jacrev`."""

    fn: Callable[..., Any]
    argnums: Argnums = 0
    has_aux: bool = False
    chunk_size: int | None = None

    def by_torch(self) -> Callable[..., Any]:
        """The same function by torch.func."""
        chunk_size = self.chunk_size
        return torch.func.jacrev(self.fn, self.argnums, has_aux=self.has_aux, chunk_size=chunk_size)

    @property
    def is_one_plan(self) -> bool:
        """Test for rows that are computed at once: chunks bound the memory of each."""
        return self.chunk_size is None

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The Jacobian: a pullback, batched over the elements of the output."""
        f, chosen = self.apart(args, kwargs)
        result: Any = vjp(f, *chosen, has_aux=self.has_aux)
        output, pullback = result[0], result[1]
        leaves, spec = pytree.flatten(output)
        check_tensors(output, self.__name__)
        cotangents = basis(leaves)
        if self.chunk_size == 1 and len(cotangents[0]):  # a row at a time has no need of batching
            ones = zip(*cotangents, strict=True)
            pulled = [pullback(pytree.unflatten(spec, one)) for one in ones]
            rows = pytree.tree_map(lambda *row: torch.stack(row), *pulled)
        else:
            rows = vmap(pullback, chunk_size=self.chunk_size)(pytree.unflatten(spec, cotangents))
        jacobian = by_output(rows, leaves, spec, isinstance(self.argnums, int))
        return (jacobian, result[2]) if self.has_aux else jacobian


@dataclass(frozen=True)
class Jacfwd(Jacobian):
    """A Jacobian, column by column. See `jacfwd`."""

    fn: Callable[..., Any]
    argnums: Argnums = 0
    has_aux: bool = False
    randomness: Randomness = "error"
    is_forward: ClassVar[bool] = True

    def by_torch(self) -> Callable[..., Any]:
        """The same function by torch.func."""
        return torch.func.jacfwd(self.fn, self.argnums, self.has_aux, randomness=self.randomness)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The Jacobian: tangents, batched over the elements of the arguments."""
        f, chosen = self.apart(args, kwargs)
        leaves, spec = pytree.flatten(chosen)

        def push(*tangents: Any) -> Any:
            tangents = pytree.unflatten(spec, tangents)
            result: Any = jvp(f, chosen, tangents, has_aux=self.has_aux)
            check_tensors(result[0], self.__name__)
            return result[1:] if self.has_aux else (result[1], ())

        columns, aux = vmap(push, out_dims=(0, None), randomness=self.randomness)(*basis(leaves))
        sizes = [leaf.numel() for leaf in leaves]
        jacobian = pytree.tree_map(
            lambda column: by_input(column, leaves, sizes, spec, self.argnums), columns
        )
        return (jacobian, aux) if self.has_aux else jacobian


_SPELLED = spelled(
    vectorize="Rows are batched; `chunk_size` of `jacrev` bounds how many at a time.",
    strategy="Write `jacfwd` for forward mode, and `jacrev` for reverse mode.",
    holomorphic="Take the derivative of real numbers, by `torch.view_as_real`.",
    allow_int="Leave integer arguments out of `argnums`.",
    argnum="argnums",
    wrt="argnums",
    create_graph="Leave it out: a Jacobian is a function like any other.",
    aux="has_aux",
)
_COLUMNS = spelled(
    **_SPELLED.elsewhere,
    chunk_size="All columns are computed at once: `chunk_size` is an option of `jacrev`.",
)
_ROWS = spelled(
    **_SPELLED.elsewhere,
    randomness="Rows share the forward, which draws once: `randomness` is an option of `jacfwd`.",
)
_SECOND = spelled(
    **_COLUMNS.elsewhere,
    has_aux="Write `jacfwd(jacrev(f, has_aux=True), has_aux=True)`.",
    randomness="Write `jacfwd(jacrev(f), randomness=...)`.",
)


@overload
def jacrev(
    f: Jitted[P, Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Jitted[P, Any]: ...
@overload
def jacrev(
    f: Callable[P, Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable[P, Any]: ...
@_ROWS
def jacrev(
    f: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Any:
    """The Jacobian by reverse mode: one backward for each element of the output, batched.

    Law: ``jacrev(f)(x) == jacfwd(f)(x)``.

    Args:
        f: a function from pytrees of real tensors to a pytree of real tensors.
        argnums: as in `grad`.
        chunk_size: the most rows to compute at a time. One row is computed without `vmap`, so its
            rule may use sizes that depend on data.
        _preallocate_and_copy: accepted as in torch.func, and ignored: the executor decides how rows
            are put together.

    Returns:
        A function that returns, in the structure of the output and inside it that of the argument,
            tensors of shape output shape + input shape.

    Raises:
        ArgnumError: there is no such argument.
        NotDifferentiable: an argument or a result is not real and floating.
        VmapError: chunk_size is no positive int.

    Example:
        >>> jacrev(lambda x: x ** 2)(torch.tensor([1.0, 2.0]))
        tensor([[2., 0.],
                [0., 4.]])

    Source: torch.func.jacrev for the signature.
    """
    if wrong := wrong_chunk_size(chunk_size):
        raise VmapError(f"jacrev: {wrong}")
    return transformed(f, lambda fn: Jacrev(fn, frozen_argnums(argnums), has_aux, chunk_size))


@overload
def jacfwd(
    f: Jitted[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    randomness: Randomness = "error",
) -> Jitted[P, Any]: ...
@overload
def jacfwd(
    f: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    randomness: Randomness = "error",
) -> Callable[P, Any]: ...
@_COLUMNS
def jacfwd(
    f: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    randomness: Randomness = "error",
) -> Any:
    """The Jacobian by forward mode: one tangent for each element of the input, batched.

    Law: ``jacfwd(f)(x) == jacrev(f)(x)``. Arguments and result as in `jacrev`.

    Raises:
        ArgnumError: there is no such argument.
        NotDifferentiable: an argument or a result is not real and floating.

    Example:
        >>> jacfwd(lambda x: x.cumsum(0))(torch.tensor([1.0, 2.0]))
        tensor([[1., 0.],
                [1., 1.]])

    Source: torch.func.jacfwd for the signature.
    """
    return transformed(f, lambda fn: Jacfwd(fn, frozen_argnums(argnums), has_aux, randomness))


@overload
def hessian(f: Jitted[P, Any], argnums: Argnums = 0) -> Jitted[P, Any]: ...
@overload
def hessian(f: Callable[P, Any], argnums: Argnums = 0) -> Callable[P, Any]: ...
@_SECOND
def hessian(f: Callable[..., Any], argnums: Argnums = 0) -> Any:
    """The Hessian of a scalar function, forward over reverse.

    Law: it is symmetric, and ``hessian(f)(x) @ v`` is the derivative of ``grad(f)`` along v.

    Raises:
        ArgnumError: there is no such argument.
        NotDifferentiable: an argument or a result is not real and floating.

    Example:
        >>> hessian(lambda x: x[0] ** 2 * x[1])(torch.tensor([1.0, 2.0]))
        tensor([[4., 2.],
                [2., 0.]])

    Source: torch.func.hessian for the signature.
    """
    return jacfwd(jacrev(f, argnums), argnums)


def check_real(tree: Any, where: str, name: str) -> None:
    """Check for real numbers: of complex ones half the derivative would be lost, another half in
    either mode.
    """
    for path, leaf in zip(pytree.paths(tree, where), pytree.flatten(tree)[0], strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.is_complex():
            values = "outputs" if where == "out" else "inputs"
            what = (
                f"{name.partition('_')[0]}: Expected all {values} to be real, but {path} is"
                f" {type_of_value(leaf)}"
            )
            fix = (
                "Take it of real numbers, with `torch.view_as_real` and `torch.view_as_complex`; or"
                " use `vjp` or `jvp`."
            )
            raise NotDifferentiable(what, source=user_source(), fix=fix)


def check_tensors(output: Any, name: str) -> None:
    """Check for real tensors."""
    for path, leaf in zip(pytree.paths(output, "out"), pytree.flatten(output)[0], strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise NotDifferentiable(
                f"{name}: the function must return tensors, but {path} is {described(leaf)}\n"
                "Return other values as aux, with has_aux=True."
            )
    check_real(output, "out", name)


def at_positions(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, positions: tuple[int, ...]
) -> Callable[..., Any]:
    """The function of the arguments at the positions, the others fixed. These are tensors of the
    transform's level, as under torch.func.
    """

    def of_chosen(*chosen: Any) -> Any:
        full = list(pytree.tree_map(_at_level, args))
        for position, value in zip(positions, chosen, strict=True):
            full[position] = value
        return f(*full, **kwargs)

    of_chosen.__name__ = callable_name(f)
    return of_chosen


def _at_level(leaf: Any) -> Any:
    """A leaf of an argument that stays fixed, as the transform's function knows it."""
    recorder = current()
    if recorder is None or not isinstance(leaf, torch.Tensor):
        return leaf
    return recorder.lift(leaf)


def basis(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The standard basis of the space of these tensors: each has a leading dim over all elements
    of all of them.
    """
    total = sum(leaf.numel() for leaf in leaves)
    chunks: list[torch.Tensor] = []
    start = 0
    for leaf in leaves:
        own = torch.arange(start, start + leaf.numel(), device=leaf.device)
        ones = torch.arange(total, device=leaf.device)[:, None] == own
        chunks.append(ones.to(leaf.dtype).reshape((total, *leaf.shape)))
        start += leaf.numel()
    return chunks


def by_output(rows: Any, leaves: list[torch.Tensor], spec: pytree.PyTreeSpec, single: bool) -> Any:
    """Rows, over all elements of all outputs, as a tree over the outputs of trees over the
    arguments.
    """
    sizes = [leaf.numel() for leaf in leaves]
    parts: list[Any] = []
    start = 0
    for leaf, size in zip(leaves, sizes, strict=True):
        begin = start

        def cut(
            row: torch.Tensor, leaf: torch.Tensor = leaf, begin: int = begin, size: int = size
        ) -> torch.Tensor:
            return row.narrow(0, begin, size).reshape((*leaf.shape, *row.shape[1:]))

        tree = pytree.tree_map(cut, rows)
        parts.append(tree[0] if single else tree)
        start += size
    return pytree.unflatten(spec, parts)


def by_input(
    column: torch.Tensor,
    leaves: list[torch.Tensor],
    sizes: list[int],
    spec: pytree.PyTreeSpec,
    argnums: Argnums,
) -> Any:
    """Columns of one output, over all elements of all inputs, as a tree over the arguments."""
    cuts = column.split(sizes, 0)
    parts = [
        cut.movedim(0, -1).reshape((*column.shape[1:], *leaf.shape))
        for cut, leaf in zip(cuts, leaves, strict=True)
    ]
    tree = pytree.unflatten(spec, parts)
    return tree[0] if isinstance(argnums, int) else tree
