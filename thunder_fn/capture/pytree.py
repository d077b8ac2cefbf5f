"""Pytrees: optree's, in a namespace of our own.

Dataclasses and the containers that PyTorch knows (Hugging Face outputs among them) are registered when first seen.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch
from torch.utils import _pytree as torch_pytree

NAMESPACE = "thunder_fn"
PyTreeSpec = optree.PyTreeSpec

_lock = threading.Lock()
_registered: set[type] = set()


def flatten(tree: Any) -> tuple[list[Any], PyTreeSpec]:
    """Leaves in order, and the structure. None is a node without leaves."""
    leaves, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    unknown = {type(leaf) for leaf in leaves if _is_container(leaf)}
    if not unknown:
        return leaves, spec
    for cls in unknown:
        _register(cls)
    return flatten(tree)


def unflatten(spec: PyTreeSpec, leaves: Sequence[Any]) -> Any:
    """The tree of this structure with these leaves."""
    return optree.tree_unflatten(spec, leaves)


def paths(tree: Any, root: str = "") -> list[str]:
    """How one writes each leaf, such as `args[0]['w']`."""
    flatten(tree)
    accessors = optree.tree_accessors(tree, namespace=NAMESPACE)
    return [accessor.codify(root) for accessor in accessors]


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply f to the leaves of trees that have the structure of the first."""
    leaves, spec = flatten(tree)
    return unflatten(spec, [f(*xs) for xs in zip(leaves, *(spec.flatten_up_to(other) for other in rest), strict=True)])


optree.register_pytree_node(
    torch.Size, lambda size: (tuple(size), None), lambda _, sizes: _size(sizes), namespace=NAMESPACE
)
_registered.add(torch.Size)


def _size(children: Iterable[Any]) -> tuple[Any, ...]:
    sizes = tuple(children)
    return torch.Size(sizes) if all(isinstance(size, int) for size in sizes) else sizes


def _is_container(leaf: Any) -> bool:
    cls = type(leaf)
    if isinstance(leaf, (torch.Tensor, str, int, float)) or cls in _registered:
        return False
    return dataclasses.is_dataclass(leaf) or cls in torch_pytree.SUPPORTED_NODES


def _register(cls: type) -> None:
    with _lock:
        if cls in _registered:
            return
        if cls in torch_pytree.SUPPORTED_NODES:
            node = torch_pytree.SUPPORTED_NODES[cls]
            optree.register_pytree_node(
                cls,
                lambda tree: _from_torch(node.flatten_fn(tree)),
                lambda context, children: node.unflatten_fn(list(children), context),
                namespace=NAMESPACE,
            )
        else:
            names = tuple(entry.name for entry in dataclasses.fields(cls))
            optree.register_pytree_node(
                cls,
                lambda tree: (tuple(getattr(tree, name) for name in names), None, names),
                lambda _, children: _rebuild(cls, names, children),
                namespace=NAMESPACE,
            )
        _registered.add(cls)


def _from_torch(flat: tuple[Any, Any]) -> tuple[tuple[Any, ...], Any]:
    children, context = flat
    return tuple(children), context


def _rebuild(cls: type, names: tuple[str, ...], children: Iterable[Any]) -> Any:
    """A dataclass with these fields, its `__init__` not run: what it holds may be tracers."""
    value = object.__new__(cls)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(value, name, child)
    return value
