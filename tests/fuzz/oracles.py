"""Two meanings of `T` in a program that do not know thunder_fn: torch.func's, and autograd's with plain Python loops."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

# ---- control flow, in Python ----


def _fresh(tree: Any) -> Any:
    """Copy the results of structured ops, which share no memory with their operands and are contiguous (CHANGELOG)."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.clone(memory_format=torch.contiguous_format), tree)


def _cond(pred: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Any = ()) -> Any:
    return _fresh(yes(*operands) if bool(pred) else no(*operands))


def _switch(index: Any, branches: Any, operands: Any = ()) -> Any:
    return _fresh(branches[min(max(int(index), 0), len(branches) - 1)](*operands))


def _slices(xs: Any, dim: int = 0) -> list[Any]:
    leaves, spec = pytree.tree_flatten(xs)
    parts = [leaf.unbind(dim) for leaf in leaves]
    return [pytree.tree_unflatten(list(row), spec) for row in zip(*parts, strict=True)]


def _stacked(rows: list[Any], dim: int = 0) -> Any:
    return pytree.tree_map(lambda *parts: torch.stack(parts, dim), *rows)


def _scan(step: Callable[..., Any], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    rows: list[Any] = []
    slices = _slices(xs, dim)
    for row in reversed(slices) if reverse else slices:
        init, y = step(init, row)
        rows.append(y)
    return _fresh(init), _stacked(rows[::-1] if reverse else rows, dim)


def _while_loop(goes_on: Callable[..., Any], body: Callable[..., Any], carry: Any, *, max_steps: int = 1000) -> Any:
    for _ in range(max_steps):
        if not bool(goes_on(*carry)):
            break
        carry = tuple(body(*carry))
    return _fresh(carry)


def _fori_loop(lo: int, hi: int, body: Callable[..., Any], init: Any) -> Any:
    for i in range(lo, hi):
        init = body(torch.tensor(i), init)
    return _fresh(init)


def _map(f: Callable[..., Any], xs: Any, *args: Any, dim: int = 0) -> Any:
    return _stacked([f(row, *args) for row in _slices(xs, dim)], dim)


def _associative_scan(combine: Callable[..., Any], xs: Any, dim: int = 0, reverse: bool = False) -> Any:
    slices = _slices(xs, dim)
    if not slices:
        return _fresh(xs)
    slices = slices[::-1] if reverse else slices
    rows = slices[:1]
    for row in slices[1:]:
        rows.append(combine(rows[-1], row))
    return _stacked(rows[::-1] if reverse else rows, dim)


def _same(f: Any, **_: Any) -> Any:
    return f


# ---- derivatives by autograd's graph, batches by a loop ----


def _linked(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """Copies to differentiate by, whose history goes on to the originals; and what the function is given of them."""
    leaves, spec = pytree.tree_flatten(tree)
    roots: list[Any] = []
    for leaf in leaves:
        root = leaf.clone()
        roots.append(root if root.requires_grad else root.requires_grad_())
    return pytree.tree_unflatten([root.clone() for root in roots], spec), roots


def _write_back(primals: Any, given: Any) -> None:
    """The caller sees what the function wrote to its arguments."""
    for primal, one in zip(pytree.tree_leaves(primals), pytree.tree_leaves(given), strict=True):
        if not one.is_inference() and one._version:
            with torch.set_grad_enabled(primal.requires_grad):
                primal.copy_(one)


def _vjp(f: Callable[..., Any], *primals: Any) -> Any:
    with torch.enable_grad():
        given, roots = _linked(primals)
        out = f(*given)
        _write_back(primals, given)

    def pull(cotangents: Any) -> Any:
        follows = torch.is_grad_enabled()
        with torch.enable_grad():
            pairs = [
                (one, ct)
                for one, ct in zip(pytree.tree_leaves(out), pytree.tree_leaves(cotangents), strict=True)
                if one.requires_grad
            ]
            if not pairs:
                found = [None] * len(roots)
            else:
                ends, seeds = zip(*pairs, strict=True)
                found = torch.autograd.grad(ends, roots, seeds, create_graph=True, allow_unused=True)
        filled = [torch.zeros_like(r) if g is None else g for r, g in zip(roots, found, strict=True)]
        filled = filled if follows else [g.detach() for g in filled]
        return tuple(pytree.tree_unflatten(filled, pytree.tree_flatten(primals)[1]))

    return out, pull


def _value_and_grad(f: Callable[..., Any], argnums: Any = 0) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        which = (argnums,) if isinstance(argnums, int) else argnums

        def of(*chosen: Any) -> Any:
            whole = list(args)
            for i, value in zip(which, chosen, strict=True):
                whole[i] = value
            return f(*whole)

        out, pull = _vjp(of, *(args[i] for i in which))
        if out.dim() or not out.is_floating_point():
            raise RuntimeError("the loss is no scalar")
        found = pull(torch.ones_like(out))
        return out, found[0] if isinstance(argnums, int) else found

    return run


def _grad(f: Callable[..., Any], argnums: Any = 0) -> Callable[..., Any]:
    return lambda *args: _value_and_grad(f, argnums)(*args)[1]


def _jvp(f: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """By the vjp of the vjp, which is linear in the cotangents."""
    out, pull = _vjp(f, *primals)
    leaves, spec = pytree.tree_flatten(out)
    back = lambda *cotangents: pull(pytree.tree_unflatten(list(cotangents), spec))
    _, push = _vjp(back, *map(torch.zeros_like, leaves))
    return out, pytree.tree_unflatten(list(push(tuple(tangents))), spec)


def _jacobian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        of = lambda x: f(*args[:argnums], x, *args[argnums + 1 :])
        out, pull = _vjp(of, args[argnums])
        leaves, spec = pytree.tree_flatten(out)
        found: list[torch.Tensor] = []
        for at, leaf in enumerate(leaves):
            rows = list[torch.Tensor]()
            for i in range(leaf.numel()):
                seeds = [torch.zeros_like(other).contiguous() for other in leaves]
                seeds[at].view(-1)[i] = 1
                rows.append(pull(pytree.tree_unflatten(seeds, spec))[0])
            shape = (*leaf.shape, *args[argnums].shape)
            found.append(torch.stack(rows).reshape(shape) if rows else leaf.new_zeros(shape))
        return pytree.tree_unflatten(found, spec)

    return run


def _hessian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    return _jacobian(_jacobian(f, argnums), argnums)


def _vmap(f: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error") -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(args)
        dims = _dims(in_dims, args)
        sizes = {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
        if len(sizes) != 1 or randomness == "same":
            raise RuntimeError("no batch size, or numbers that examples share")
        rows: list[Any] = []
        for i in range(sizes.pop()):
            row = [leaf if dim is None else leaf.select(dim, i) for leaf, dim in zip(leaves, dims, strict=True)]
            rows.append(f(*pytree.tree_unflatten(row, spec)))
        parts = zip(*map(pytree.tree_leaves, rows), strict=True)
        found = [torch.stack(one, dim) for one, dim in zip(parts, _dims(out_dims, rows[0]), strict=True)]
        return pytree.tree_unflatten(found, pytree.tree_flatten(rows[0])[1])

    return run


def _dims(dims: Any, tree: Any) -> list[Any]:
    """The dim of each leaf of a tree: one for all of a part, or a tree of its own."""
    if dims is None or isinstance(dims, int):
        return [dims] * len(pytree.tree_leaves(tree))
    pairs = [(dims[key], tree[key]) for key in tree] if isinstance(tree, dict) else zip(dims, tree, strict=True)
    return [dim for pair in pairs for dim in _dims(*pair)]


def _linearized(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """By forward mode, which runs the function once: the value is not given. torch.func.linearize crashes now and then."""
    return lambda f, *primals: (None, lambda *tangents: _fresh(jvp(f, primals, tangents)[1]))


_flow = {
    "cond": _cond,
    "switch": _switch,
    "scan": _scan,
    "while_loop": _while_loop,
    "fori_loop": _fori_loop,
    "map": _map,
    "associative_scan": _associative_scan,
    "checkpoint": _same,
    "jit": _same,
}


def _func_value_and_grad(f: Callable[..., Any], argnums: Any = 0) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        found, value = torch.func.grad_and_value(f, argnums)(*args)
        return value, found

    return run


FUNC = SimpleNamespace(
    grad=torch.func.grad,
    value_and_grad=_func_value_and_grad,
    vjp=torch.func.vjp,
    jvp=torch.func.jvp,
    linearize=_linearized(torch.func.jvp),
    vmap=torch.func.vmap,
    jacrev=torch.func.jacrev,
    jacfwd=torch.func.jacfwd,
    hessian=torch.func.hessian,
    **_flow,
)
GRAPH = SimpleNamespace(
    grad=_grad,
    value_and_grad=_value_and_grad,
    vjp=_vjp,
    jvp=_jvp,
    linearize=_linearized(_jvp),
    vmap=_vmap,
    jacrev=_jacobian,
    jacfwd=_jacobian,
    hessian=_hessian,
    **_flow,
)
