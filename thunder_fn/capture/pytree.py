"""Pytrees: optree's, in a namespace of our own.

Dataclasses and the containers that PyTorch knows (Hugging Face outputs among them) are registered
when first seen.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import optree
import torch
from torch.utils import _pytree as torch_pytree

from thunder_fn.capture.objects import ABSENT, dict_of, own_of
from thunder_fn.errors import (
    ThunderError,
    UnsupportedInput,
    UnsupportedOutput,
    kind_of,
    with_article,
)
from thunder_fn.ir.trace import Literal, TensorType

NAMESPACE = "thunder_fn"
PyTreeSpec = optree.PyTreeSpec
T = TypeVar("T")
MAX_DEPTH = 150
"""So many containers may lie in one another: Python's parser takes 200 in an expression."""

_lock = threading.Lock()
_registered: set[type] = set()


def flatten(tree: Any) -> tuple[list[Any], PyTreeSpec]:
    """Leaves in order, and the structure. None is a node without leaves.

    Raises:
        UnsupportedInput: a container holds itself, or containers lie too deep in one another.
    """
    try:
        leaves, spec = _flattened(tree)
    except RecursionError:
        what = f"{with_article(type(tree).__name__)} of arguments, attributes or results has no end"
        raise UnsupportedInput(
            f"{what}: a list, tuple or dict in it holds itself, or a thousand lie in one another\n"
            "Break the circle, or hold them in one list."
        ) from None
    if spec.num_nodes - len(leaves) > MAX_DEPTH and _depth(spec) > MAX_DEPTH:
        raise _too_deep(spec)
    if has_dicts(spec):
        if _has_tensor_keys(spec):
            return flatten(_sortable(tree))
        if _has_ordered(spec) and any(map(_is_moved, nodes_in(tree))):
            return flatten(_in_order(tree))
    unknown = {type(leaf) for leaf in leaves if _is_container(leaf)}
    if not unknown:
        return leaves, spec
    for cls in unknown:
        _register(cls)
    return flatten(tree)


def _flattened(tree: Any) -> tuple[list[Any], PyTreeSpec]:
    try:
        return optree.tree_flatten(tree, namespace=NAMESPACE)
    except RecursionError:
        raise
    except Exception:  # noqa: BLE001 - of keys that are compared
        return optree.tree_flatten(_sortable(tree), namespace=NAMESPACE)


def flatten_but(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], PyTreeSpec]:
    """Leaves in order, some containers among them, and the structure above these."""
    flatten(tree)  # registers classes
    tree = _in_order(tree, is_leaf)
    if any(has_tensor_keys(one) and not is_leaf(one) for one in nodes_in(tree, is_leaf)):
        tree = _sortable(tree, is_leaf)
    return optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def flatten_up_to(spec: PyTreeSpec, tree: Any) -> list[Any]:
    """Return what a tree holds in the places of the leaves of a structure.

    Raises:
        ValueError: the tree has another structure.
    """
    return spec.flatten_up_to(_sortable(tree) if _is_unsorted(spec) else tree)


_MAX_ANSWERS = 1024
_PLAIN_KEYS = {str, int, float, bool, bytes, type(None)}
_DICTS = (dict, collections.defaultdict, collections.OrderedDict)

Repeated = tuple[tuple[int, int], ...]
"""Nodes of a tree that occur elsewhere in it, or in another tree: the number of each, and that of
the object. Numbers of nodes count nodes and leaves, parents first.
"""


def unflatten(
    spec: PyTreeSpec,
    leaves: Sequence[Any],
    repeated: Sequence[tuple[int, int]] = (),
    made: dict[int, Any] | None = None,
) -> Any:
    """The tree of this structure with these leaves. `repeated` nodes are built once. `made` has
    those of other trees, by the numbers of the objects, and gets those of this one.
    """
    return (
        _Builder(iter(leaves), repeated, {} if made is None else made).build(spec)
        if repeated or _looks_at_leaves(spec)
        else optree.tree_unflatten(spec, leaves)
    )


def no_leaf(value: Any) -> bool:
    """Take nothing for a leaf that is none."""
    return False


def repeated_in(tree: Any, spec: PyTreeSpec, is_leaf: Callable[[Any], bool] = no_leaf) -> Repeated:
    """The nodes of a tree of this structure that occur more than once and may be changed."""
    return repeated_among([changeable(tree, spec, is_leaf)])[0]


def repeated_among(trees: Sequence[Sequence[tuple[int, Any]]]) -> list[Repeated]:
    """The nodes that occur more than once in some trees, for each tree, of their `changeable` ones.
    Objects have the same numbers in all.
    """
    found = [node for nodes in trees for _, node in nodes]
    counts, first = collections.Counter(map(id, found)), dict[int, int]()
    for node in found:
        first.setdefault(id(node), len(first))
    return [
        tuple((number, first[id(node)]) for number, node in nodes if counts[id(node)] > 1)
        for nodes in trees
    ]


def changeable(
    tree: Any, spec: PyTreeSpec, is_leaf: Callable[[Any], bool] = no_leaf
) -> list[tuple[int, Any]]:
    """The nodes of a tree of this structure that may be changed, by their numbers."""
    nodes = nodes_in(_in_order(tree, is_leaf), is_leaf)
    if len(nodes) != spec.num_nodes:  # with keys or objects that are taken apart otherwise
        return []
    is_fixed = lambda node: node is None or isinstance(node, tuple) or is_leaf(node)
    return [
        (number, node.origin if type(node) is Object else node)
        for number, node in enumerate(nodes)
        if not is_fixed(node) and is_node(node)
    ]


class _TensorLeaf:
    """Stand-in for a tensor, or a number that is a symbol, among the leaves of a pytree whose
    others are static values.
    """

    def __repr__(self) -> str:
        return "TENSOR"

    def __reduce__(self) -> str:
        return "TENSOR"


TENSOR = _TensorLeaf()


def statics(leaves: Iterable[Any]) -> tuple[Any, ...]:
    """The leaves with a mark in the place of each tensor."""
    return tuple([TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a pytree, which are the inputs of a trace captured on it."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def with_own_parts(before: Any, after: Any) -> Any:
    """Return a tree with the containers of an equal one that hold no tensors: they are the very
    objects, which a function may change.
    """
    flatten(before)  # registers classes
    if has_tensor_keys(before):
        return after
    before = _in_order(before, _is_own)
    parts, spec = optree.tree_flatten(before, is_leaf=_is_own, namespace=NAMESPACE)
    now = spec.flatten_up_to(after)
    return unflatten(
        spec,
        [
            part if is_node(part) and _is_same(part, other) else other
            for part, other in zip(parts, now, strict=True)
        ],
    )


def _is_own(value: Any) -> bool:
    leaves = flatten(value)[0]
    return not any(leaf is TENSOR or isinstance(leaf, torch.Tensor) for leaf in leaves)


def _is_same(one: Any, other: Any) -> bool:
    return all(map(operator.is_, flatten(one)[0], flatten(other)[0]))


class Contents:
    """The present content of nodes of a tree, by identity: children, keys, attributes."""

    def __init__(self, nodes: Iterable[Any]) -> None:
        self.nodes = [node for node in nodes if is_node(node)]
        self.items = [*map(_items_of, self.nodes)]

    @property
    def changed(self) -> Any:
        """A node that holds something else; None if there is none."""
        for node, before in zip(self.nodes, self.items, strict=True):
            now = _items_of(node)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return node
        return None


def _items_of(node: Any) -> list[Any]:
    """The content of a node, without the values of cached properties."""
    kept = [
        value
        for name, value in (dict_of(node) or {}).items()
        if not isinstance(getattr(type(node), name, None), functools.cached_property)
    ]
    if isinstance(node, dict):
        return [*children_of(node), *node, *kept]
    fields = fields_of_dataclass(node) if dataclasses.is_dataclass(type(node)) else {}
    return [*(fields.values() if fields else children_of(node)), *kept]


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A tuple, or the one of a single value: of a function's results, or of an index."""
    return value if isinstance(value, tuple) else (value,)


def filled(leaves: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The leaves with a value in the place of each mark, in order."""
    supply = iter(values)
    return [next(supply) if leaf is TENSOR else leaf for leaf in leaves]


def _by_structure(ask: Callable[[PyTreeSpec], T]) -> Callable[[PyTreeSpec], T]:
    """Keep answers by structure, but for structures with keys that are objects, such as those of
    an optimizer's state: nothing here keeps these alive.
    """
    known = dict[PyTreeSpec, T]()

    def answer(spec: PyTreeSpec) -> T:
        if (found := known.get(spec)) is None:
            found = ask(spec)
            if len(known) >= _MAX_ANSWERS:
                known.clear()
            if not _has_objects(spec):
                known[spec] = found
        return found

    return answer


def _anywhere(test: Callable[[PyTreeSpec], bool]) -> Callable[[PyTreeSpec], bool]:
    """Test a structure and all structures in it."""
    found = _by_structure(lambda spec: test(spec) or any(map(found, spec.children())))
    return found


@_by_structure
def _depth(spec: PyTreeSpec) -> int:
    return sum(1 for _ in _levels(spec)) - 1


def _too_deep(spec: PyTreeSpec) -> UnsupportedInput:
    what = f"arguments, attributes or results are nested {_depth(spec)} containers deep"
    what, fix = f"{what}, and at most {MAX_DEPTH} are supported", "Hold them in one list."
    return UnsupportedInput(what, fix=fix)


def _levels(spec: PyTreeSpec) -> Iterator[list[PyTreeSpec]]:
    """The structures in a structure, level by level."""
    row = [spec]
    while row:
        yield row
        row = [part for one in row for part in one.children()]


def _has_objects(spec: PyTreeSpec) -> bool:
    """Test for keys of dicts, or nodes' own data, that are no plain data."""
    return any(
        one.type in (_Unsorted, Object) or _has_keys(one) for row in _levels(spec) for one in row
    )


def _has_keys(spec: PyTreeSpec) -> bool:
    return spec.type in _DICTS and not {*map(type, spec.entries())} <= _PLAIN_KEYS


@_anywhere
def _looks_at_leaves(spec: PyTreeSpec) -> bool:
    """Test for a named tuple whose `__new__` is its user's, such as PackedSequence: leaves may
    be of any type here.
    """
    return _has_own_new(spec.type)


def _has_own_new(cls: Any) -> bool:
    if not (isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return False
    below = itertools.takewhile(lambda base: "_fields" not in vars(base), cls.__mro__)
    return any("__new__" in vars(base) for base in below)


class _Builder:
    """Builds a tree from its leaves, node by node."""

    def __init__(
        self, leaves: Iterator[Any], repeated: Sequence[tuple[int, int]], made: dict[int, Any]
    ) -> None:
        self.leaves = leaves
        self.repeated = dict(repeated)
        self.made = made
        self.number = 0

    def build(self, spec: PyTreeSpec) -> Any:
        """Build the next part, which has this structure."""
        number, self.number = self.number, self.number + 1
        if (of := self.repeated.get(number)) in self.made:
            self.number = number + spec.num_nodes
            collections.deque(itertools.islice(self.leaves, spec.num_leaves), 0)
            return self.made[of]
        level = spec.one_level()
        if level is None:
            return next(self.leaves)
        children = [self.build(child) for child in spec.children()]
        cls: Any = spec.type
        value = (
            tuple.__new__(cls, children)
            if _has_own_new(cls)
            else optree.tree_unflatten(level, children)
        )
        if of is not None:
            self.made[of] = value
        return value


def paths(tree: Any, root: str = "") -> list[str]:
    """The path of each leaf, such as `args[0]['w']`."""
    return paths_of(flatten(tree)[1], root)


def paths_of(spec: PyTreeSpec, root: str) -> list[str]:
    """The path of each leaf of a tree of this structure."""
    return [accessor.codify(root) for accessor in spec.accessors()]


def difference(mine: PyTreeSpec, its: PyTreeSpec, path: str, other: str) -> str | None:
    """The first difference of two structures, such as `x['w'] is a tuple of 2, and y['w'] is a
    leaf`; None if there is none.

    `path` and `other` are how one writes the roots of the two.
    """
    if mine == its:
        return None
    a, b, names = mine.children(), its.children(), entries(mine, path)
    if mine.type is its.type and len(a) == len(b) and entries(its, path) == names:
        for one, two, name, theirs in zip(a, b, names, entries(its, other), strict=True):
            found = difference(one, two, name, theirs)
            if found is not None:
                return found
    return f"{path} is {describe(mine)}, and {other} is {describe(its)}"


def entries(spec: PyTreeSpec, root: str) -> list[str]:
    """The path entries of the children of a structure's root."""
    level = spec.one_level()
    return [] if level is None else [accessor.codify(root) for accessor in level.accessors()]


def describe(spec: PyTreeSpec) -> str:
    """The root of a structure, in a few words."""
    if spec.is_leaf():
        return "a leaf"
    if spec.type is type(None):
        return "None"
    if spec.type is _Unsorted:
        return f"a dict with {spec.num_children} tensors for keys"
    if spec.type is Object:
        return "an object"
    name = getattr(spec.type, "__name__", str(spec.type))
    kind = with_article(name)
    if isinstance(spec.type, type) and issubclass(spec.type, dict):
        return (
            f"{kind} with the keys {', '.join(map(repr, spec.entries()))}"
            if spec.entries()
            else f"an empty {name}"
        )
    return f"{kind} of {len(spec.children())}" if spec.type in (tuple, list) else kind


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply f to the leaves of trees that have the structure of the first."""
    leaves, spec = flatten(tree)
    return unflatten(
        spec,
        [
            f(*xs)
            for xs in zip(leaves, *(flatten_up_to(spec, other) for other in rest), strict=True)
        ],
    )


optree.register_pytree_node(
    torch.Size, lambda size: (tuple(size), None), lambda _, sizes: _size(sizes), namespace=NAMESPACE
)
_registered.add(torch.Size)


def like(before: Any, after: Any) -> Any:
    """Return a tree with the lists and tuples of another one of its structure; what else differs
    stays.
    """
    match before, after:
        case (list() | tuple(), list() | tuple()) if (
            type(before) in _LISTS and type(after) in _LISTS
        ):
            if len(before) == len(after):
                return type(before)(map(like, before, after))
        case (dict(), dict()) if (
            type(before) is dict and type(after) is dict and before.keys() == after.keys()
        ):
            return {key: like(before[key], value) for key, value in after.items()}
        case _:
            pass
    return after


_LISTS = (list, tuple)


class Sizes(tuple[Any, ...]):
    """A torch.Size with something else than numbers in it."""


def _size(children: Iterable[Any]) -> tuple[Any, ...]:
    sizes = tuple(children)
    return (
        torch.Size(sizes)
        if all(isinstance(size, (int, torch.SymInt)) for size in sizes)
        else Sizes(sizes)
    )


def _is_container(leaf: Any) -> bool:
    cls = type(leaf)
    if isinstance(leaf, (torch.Tensor, TensorType, str, int, float)) or cls in _registered:
        return False
    return (
        isinstance(leaf, _objects)
        or dataclasses.is_dataclass(cls)
        or cls in torch_pytree.SUPPORTED_NODES
    )


def _register(cls: type) -> None:
    with _lock:
        if cls in _registered:
            return
        if issubclass(cls, _objects):
            optree.register_pytree_node(cls, attributes_of, _put_together, namespace=NAMESPACE)
        elif cls in torch_pytree.SUPPORTED_NODES:
            node = torch_pytree.SUPPORTED_NODES[cls]
            optree.register_pytree_node(
                cls,
                lambda tree: _from_torch(cls, node.flatten_fn(tree)),
                functools.partial(_to_torch, cls, node.unflatten_fn),
                namespace=NAMESPACE,
            )
        else:
            optree.register_pytree_node(
                cls,
                parts_of_dataclass,
                lambda context, children: rebuild(cls, context, children),
                namespace=NAMESPACE,
            )
        _registered.add(cls)


# ---- dicts with tensors for keys, which have no order ----


class _Unsorted(list[Any]):
    """The items of a dict with tensors for keys, in an order that depends on the keys alone."""

    def __init__(self, held: dict[Any, Any], is_leaf: Callable[[Any], bool]) -> None:
        by_key = sorted(map(Key, held), key=Key.place)
        super().__init__(_sortable(held[key.value], is_leaf) for key in by_key)
        self.keys = _Keys(
            tuple(by_key), tuple(held), type(held), getattr(held, "default_factory", None)
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Key:
    """A key of a dict: tensors by identity."""

    value: Any

    def place(self) -> tuple[bool, int]:
        """Return the place among other keys, whatever their order in the dict."""
        is_tensor = isinstance(self.value, torch.Tensor)
        return is_tensor, id(self.value) if is_tensor else hash(self.value)

    def __repr__(self) -> str:
        is_tensor = isinstance(self.value, torch.Tensor)
        return f"a tensor of shape {(*self.value.shape,)}" if is_tensor else repr(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key):
            return False
        is_tensor = isinstance(self.value, torch.Tensor) or isinstance(other.value, torch.Tensor)
        same = self.value is other.value
        return same or (not is_tensor and Literal(self.value) == Literal(other.value))

    def __hash__(self) -> int:
        return hash(self.value)


@dataclasses.dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of a dict, of which the order says nothing about its structure."""

    by_place: tuple[Key, ...]
    in_order: tuple[Any, ...] = dataclasses.field(compare=False)
    kind: type
    default: Any
    """The function that makes values of absent keys."""


def has_tensor_keys(value: Any) -> bool:
    """Test for a dict with tensors for keys."""
    return type(value) in _SORTED and any(isinstance(key, torch.Tensor) for key in value)


_SORTED = (dict, collections.defaultdict)


def _sortable(tree: Any, is_leaf: Callable[[Any], bool] = no_leaf) -> Any:
    """The tree, with nodes of their own for dicts with tensors for keys, but for leaves."""
    is_unsorted = lambda value: has_tensor_keys(value) and not is_leaf(value)
    return optree.tree_map(
        lambda value: _Unsorted(value, is_leaf) if is_unsorted(value) else value,
        tree,
        is_leaf=lambda value: has_tensor_keys(value) or is_leaf(value),
        namespace=NAMESPACE,
    )


@_anywhere
def _has_tensor_keys(spec: PyTreeSpec) -> bool:
    return spec.type in _SORTED and any(isinstance(key, torch.Tensor) for key in spec.entries())


@_anywhere
def _is_unsorted(spec: PyTreeSpec) -> bool:
    return spec.type is _Unsorted


def _sorted_again(keys: Any, children: Iterable[Any]) -> Any:
    held = dict(zip((key.value for key in keys.by_place), children, strict=True))
    items = ((key, held[key]) for key in keys.in_order)
    return dict(items) if keys.kind is dict else collections.defaultdict(keys.default, items)


def _taken_apart(held: Any) -> tuple[list[Any], _Keys]:
    return list(held), held.keys


optree.register_pytree_node(_Unsorted, _taken_apart, _sorted_again, namespace=NAMESPACE)
_registered.add(_Unsorted)


# ---- ordered dicts whose keys were moved, of which optree sees the order before ----


def _is_moved(value: Any) -> bool:
    """Test for an ordered dict with another order than that of the dict in it."""
    return type(value) is collections.OrderedDict and not all(
        map(operator.is_, value, dict.keys(value))
    )


def _in_order(tree: Any, is_leaf: Callable[[Any], bool] = no_leaf) -> Any:
    """The tree, with new ordered dicts for those whose keys were moved, but for leaves."""
    is_moved = lambda value: _is_moved(value) and not is_leaf(value)
    if not any(map(is_moved, nodes_in(tree, is_leaf))):
        return tree

    def renew(value: Any) -> Any:
        if not is_moved(value):
            return value
        items = ((key, _in_order(item, is_leaf)) for key, item in value.items())
        return collections.OrderedDict(items)

    stops = lambda value: is_moved(value) or is_leaf(value)
    return optree.tree_map(renew, tree, is_leaf=stops, namespace=NAMESPACE)


@_anywhere
def _has_ordered(spec: PyTreeSpec) -> bool:
    return spec.type is collections.OrderedDict


# ---- objects that hold tensors ----

_objects: tuple[type, ...] = ()


def register_object(*classes: type) -> None:
    """Take objects of these classes, and of classes derived from them, apart by their attributes.

    A jitted module that is called with one, such as a cache of keys and values, assigns the
    module's changes to it.
    """
    global _objects
    with _lock:
        _objects = (*_objects, *(cls for cls in classes if cls not in _objects))


def objects_in(tree: Any) -> list[Any]:
    """The outermost registered objects of a tree, in order."""
    if not _objects:
        return []
    return [node for node in nodes_in(tree) if isinstance(node, _objects)]


def nodes_in(tree: Any, is_leaf: Callable[[Any], bool] = no_leaf) -> list[Any]:
    """The nodes of a tree, parents first. Registered objects count as leaves."""
    found = list[Any]()

    def note(value: Any) -> bool:
        found.append(value)
        if is_leaf(value):
            return True
        if has_tensor_keys(value):
            found.extend(node for item in value.values() for node in nodes_in(item, is_leaf))
            return True
        return isinstance(value, _objects)

    optree.tree_leaves(tree, is_leaf=note, namespace=NAMESPACE)
    return found


def is_object(value: Any) -> bool:
    """Test for a registered object."""
    return isinstance(value, _objects)


def is_node(value: Any) -> bool:
    """Test whether the value is no leaf."""
    return not optree.all_leaves([value], namespace=NAMESPACE)


def children_of(node: Any) -> list[Any]:
    """The children of a node."""
    if has_tensor_keys(node):
        return list(node.values())
    return list(optree.tree_flatten_one_level(node, namespace=NAMESPACE)[0])


def parts_of(node: Any) -> dict[Any, Any]:
    """The children of a node, by key, index or name."""
    children, _, entries, _ = optree.tree_flatten_one_level(node, namespace=NAMESPACE)
    return dict(zip(entries, children, strict=True))


@_anywhere
def has_dicts(spec: PyTreeSpec) -> bool:
    """Test whether a structure has dicts with keys, and so orders."""
    is_dict = isinstance(spec.type, type) and issubclass(spec.type, (dict, _Unsorted))
    return is_dict and spec.num_children > 0


def orders_of(tree: Any) -> tuple[Any, ...]:
    """The keys of all dicts in a tree, in their order and with their types, of which structures say
    nothing.

    To a structure `{1: x}` and `{True: x}` are one, and so are `{"a": x, "b": y}` and `{"b": y,
    "a": x}`.
    """
    found = list[tuple[Any, ...]]()

    def note(value: Any) -> bool:
        if isinstance(value, dict):
            found.append((*map(type, value), *map(Key, value)))
        if not has_tensor_keys(value):
            return False
        found.extend(order for item in value.values() for order in orders_of(item))
        return True

    optree.tree_leaves(tree, is_leaf=note, namespace=NAMESPACE)
    return tuple(found)


def attributes_of(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """The attributes of an object that may have tensors in them or count something, and a
    function that rebuilds it.
    """
    attributes = dict_of(value)
    held, layout = _apart(attributes, [name for name in attributes if _may_hold(attributes[name])])
    return held, (type(value), layout)


_Layout = tuple["str | tuple[str, _Fixed]", ...]
"""Attributes in their order: the name of each that is a child, and the others with their values."""


def _apart(attributes: dict[str, Any], held: Iterable[str]) -> tuple[list[Any], _Layout]:
    children = {name: attributes[name] for name in held}
    layout = (
        name if name in children else (name, _Fixed(item)) for name, item in attributes.items()
    )
    return [*children.values()], tuple(layout)


def _together(layout: _Layout, children: Iterable[Any]) -> dict[str, Any]:
    fresh = iter(children)
    return {
        name: next(fresh) if fixed is None else fixed.value
        for name, fixed in ((one, None) if isinstance(one, str) else one for one in layout)
    }


def assign(value: Any, state: tuple[list[Any], tuple[Any, ...]]) -> None:
    """Give an object the attributes that another one held."""
    items, (_, layout) = state
    attributes = _together(layout, items)
    own = dict_of(value)
    for name in own.keys() - attributes.keys():
        del own[name]
    own.update(attributes)


def _may_hold(value: Any) -> bool:
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, list, tuple, dict, Object, *_objects)
    return type(value) is int or isinstance(value, kinds)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Fixed:
    """An attribute without tensors: flags and the like by value, anything else by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Fixed) or type(other.value) is not type(self.value):
            return False
        return self.value is other.value or (
            isinstance(self.value, _BY_VALUE) and self.value == other.value
        )

    def __hash__(self) -> int:
        return hash(self.value) if isinstance(self.value, _BY_VALUE) else id(self.value)


_BY_VALUE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Object:
    """An object of a plain class as a node: its class and its attributes, those of `held` as
    children.
    """

    cls: type
    attributes: dict[str, Any]
    held: tuple[str, ...]
    origin: Any = None


def with_objects(
    tree: Any, fields_of: Callable[[Any], dict[str, Any] | None], is_leaf: Callable[[Any], bool]
) -> Any:
    """Return a tree with nodes in the place of the objects that `unflatten` shall make anew:
    leaves of which a function gives the attributes.

    Raises:
        UnsupportedOutput: an object leads to itself.
    """
    above, renewed = set[int](), dict[int, Object]()

    def renew(leaf: Any) -> Any:
        if id(leaf) in renewed:
            return renewed[id(leaf)]
        if (fields := fields_of(leaf)) is None:
            return leaf
        if id(leaf) in above:
            what = f"{kind_of(leaf)} that holds traced tensors leads to itself"
            raise UnsupportedOutput(what, fix="Return or store its tensors.")
        above.add(id(leaf))
        parts = {name: walk(item) for name, item in fields.items()}
        above.remove(id(leaf))
        held = tuple(name for name, part in parts.items() if _may_hold(part))
        either = {name: parts[name] if name in held else item for name, item in fields.items()}
        renewed[id(leaf)] = Object(type(leaf), either, held, leaf)
        return renewed[id(leaf)]

    def walk(part: Any) -> Any:
        leaves, spec = flatten(part)
        if is_leaf(part) or not any(fields_of(leaf) is not None for leaf in leaves):
            return part
        if _is_unsorted(spec):
            return part  # `unflatten` of such nodes gives dicts again
        return optree.tree_map(
            renew, _in_order(part, is_leaf), is_leaf=is_leaf, namespace=NAMESPACE
        )

    return walk(tree)


# ---- attributes of nodes that are no part of their structure ----


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Adorned:
    """A node with attributes that its class does not make from its children."""

    level: PyTreeSpec
    parts: list[Any]
    names: tuple[str, ...]


def adorned(tree: Any, is_leaf: Callable[[Any], bool] = no_leaf) -> Any:
    """Return a tree with nodes in the place of those with further attributes, such as
    `output.loss` of a model's output: `unflatten` of its structure sets these, too.
    """
    known = dict[int, tuple[Any, _Adorned]]()

    def find(node: Any) -> dict[str, Any]:
        is_other = is_leaf(node) or isinstance(node, (_Adorned, torch.Tensor, *_objects))
        return {} if is_other or not dict_of(node) else _further(node)

    def renew(node: Any) -> Any:
        if is_leaf(node) or not (further := find(node)):
            return node
        if id(node) not in known:
            bare = collections.OrderedDict(node.items()) if _is_moved(node) else node
            parts = [*children_of(bare), *further.values()]
            known[id(node)] = node, _Adorned(_level_of(bare), [*map(walk, parts)], tuple(further))
        return known[id(node)][1]

    def walk(part: Any) -> Any:
        stops = lambda node: is_leaf(node) or bool(find(node))
        if not any(map(find, nodes_in(part, is_leaf))):
            return part
        return optree.tree_map(renew, _in_order(part, stops), is_leaf=stops, namespace=NAMESPACE)

    flatten_but(tree, is_leaf)  # registers classes
    return walk(tree)


def _further(node: Any) -> dict[str, Any]:
    """The attributes of a node that its class does not make from its children."""
    cls = type(node)
    is_whole = dataclasses.is_dataclass(cls) and cls not in torch_pytree.SUPPORTED_NODES
    if is_whole or not is_node(node):
        return {}
    try:
        own = dict_of(optree.tree_unflatten(_level_of(node), children_of(node)))
    except Exception:  # noqa: BLE001 - of the user's class
        return {}
    return {name: item for name, item in dict_of(node).items() if name not in own}


def _level_of(node: Any) -> PyTreeSpec:
    """The structure of a node above its children."""
    return optree.tree_structure(node, lambda one: one is not node, namespace=NAMESPACE)


def _adorned_apart(node: Any) -> tuple[list[Any], tuple[PyTreeSpec, tuple[str, ...]]]:
    return node.parts, (node.level, node.names)


def _adorned_again(of: Any, parts: Iterable[Any]) -> Any:
    level, names = of
    parts = [*parts]
    node = optree.tree_unflatten(level, parts[: level.num_leaves])
    for name, item in zip(names, parts[level.num_leaves :], strict=True):
        object.__setattr__(node, name, item)
    return node


_ADORNED: Any = _Adorned
optree.register_pytree_node(_ADORNED, _adorned_apart, _adorned_again, namespace=NAMESPACE)
_registered.add(_Adorned)


def _object_apart(node: Any) -> tuple[list[Any], tuple[Any, ...], tuple[str, ...]]:
    children, layout = _apart(node.attributes, node.held)
    return children, (node.cls, layout), node.held


def _object_again(of: Any, children: Iterable[Any]) -> Any:
    return rebuild(of[0], of[1], children)


_OBJECT: Any = Object
optree.register_pytree_node(_OBJECT, _object_apart, _object_again, namespace=NAMESPACE)
_registered.add(Object)


def _put_together(context: Any, items: Iterable[Any]) -> Any:
    value = object.__new__(context[0])
    assign(value, (list(items), context))
    return value


def _from_torch(cls: type, flat: tuple[Any, Any]) -> tuple[tuple[Any, ...], Any]:
    """The children and the context that PyTorch's flattening of a class gives.

    Raises:
        UnsupportedInput: a tensor is in the context, which is a constant of the structure: its
            values would be compared at each call, and a tracer would stay in the result.
    """
    children, context = flat
    if any(isinstance(leaf, torch.Tensor) for leaf in flatten(context)[0]):
        name = with_article(cls.__name__)
        raise UnsupportedInput(
            f"{name} holds tensors where its pytree has constants: it was registered with PyTorch"
            " with these tensors in the context",
            fix="Pass them beside it, or hold them in one of its children; in a tensorclass write"
            " `TensorDict(tensors)` in the place of a dict.",
        )
    return tuple(children), context


def _to_torch(cls: type, unflatten: Callable[..., Any], context: Any, children: Any) -> Any:
    """Put a node together by the function that is registered with PyTorch.

    Raises:
        UnsupportedOutput: the function raised.
    """
    try:
        return unflatten(list(children), context)
    except ThunderError:
        raise
    except Exception as error:
        what = (
            f"{cls.__name__} cannot be put together again from its parts, of which some are marks"
            f" for tensors: its `unflatten` raised {type(error).__name__}: {error}"
        )
        fix = "Let it take parts of any type, as many as `flatten` gives; or return the tensors."
        raise UnsupportedOutput(what, fix=fix) from error


def fields_of_dataclass(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, but for those that nobody has set."""
    fields = ((one.name, own_of(value, one.name)) for one in dataclasses.fields(type(value)))
    return {name: it for name, it in fields if it is not ABSENT}


def parts_of_dataclass(value: Any) -> tuple[list[Any], _Layout, tuple[str, ...]]:
    """The fields of a dataclass, and the attributes beside them that may have tensors in them; the
    layout of all; and their names. `__post_init__` makes such attributes, and cached properties do.
    """
    fields = fields_of_dataclass(value)
    attributes = {**(dict_of(value) or {}), **fields}
    held = tuple(name for name, item in attributes.items() if name in fields or _may_hold(item))
    return *_apart(attributes, held), held


def rebuild(cls: type, layout: Any, children: Iterable[Any]) -> Any:
    """An object with these parts, its `__init__` not run: what it holds may be tracers."""
    kind = types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object
    value = kind.__new__(cls)
    for name, part in _together(layout, children).items():
        object.__setattr__(value, name, part)
    return value
