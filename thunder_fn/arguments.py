"""The argument of a failed call that is not of its annotated type.

Functions check what they must, and leave the rest to PyTorch and Python, whose errors name neither
the function nor the argument. So after such an error, and never before, annotations are compared
with what was given.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

import torch

_NAMESPACES = ("thunder_fn.random", "thunder_fn.debug", "thunder_fn.inspect")
_NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real, complex: numbers.Number}
_WORDS = {int: "an int", float: "a number", Callable: "a function", type(None): "None"}


def misfit(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[str, str] | None:
    """Describe the first argument of a call that is not of its annotated type, and the fix. None
    where all are, where the call does not fit the signature, or where Dynamo reads this code.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    hints = hints_of(function)
    for name, value in given.items():
        if name in hints and not fits(value, hints[name]):
            return _text(function, name, given, hints), _fix(signature, function.__name__)
    return None


def _text(
    function: Callable[..., Any], name: str, given: Mapping[str, Any], hints: Mapping[str, Any]
) -> str:
    """Name the function, the argument, and the argument that it is mistaken for."""
    value, own = given[name], function.__qualname__
    room = next((room for room in _NAMESPACES if function.__module__.startswith(room)), None)
    own = own if room is None else f"{room.rpartition('.')[2]}.{own}"
    kind = "None" if value is None else f"{_article(type(value).__name__)}"
    text = f"{own}: {name} must be {words(hints[name])}, given {kind}"
    for other, its in given.items():
        is_other = hints.get(other, Any) is not Any and fits(value, hints[other])
        if is_other and not fits(its, hints[other]) and fits(its, hints[name]):
            return f"{text}. {name} and {other} are in each other's place"
    return text


def _fix(signature: inspect.Signature, name: str) -> str:
    empty = inspect.Parameter.empty
    shown = [one.replace(annotation=empty) for one in signature.parameters.values()]
    bare = signature.replace(parameters=shown, return_annotation=inspect.Signature.empty)
    return f"Write `{name}{bare}`."


@functools.lru_cache(256)
def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters; those that name what is not there at run time are left
    out.
    """
    found, scope = dict[str, Any](), inspect.unwrap(function).__globals__
    for name in inspect.signature(function).parameters:
        own = types.SimpleNamespace(__annotations__=function.__annotations__)
        own.__annotations__ = {name: own.__annotations__.get(name, Any)}
        try:
            found |= typing.get_type_hints(own, scope)
        except (NameError, TypeError):
            continue
    variadic = inspect.signature(function).parameters.values()
    return {
        one.name: found[one.name]
        for one in variadic
        if one.name in found and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }


def fits(value: Any, hint: Any) -> bool:
    """Test a value against an annotation. What the annotation says of elements of mappings and
    iterators, and of arguments of functions, is not looked at.
    """
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is collections.abc.Callable:
        return callable(value)
    if not isinstance(origin, type):
        return True
    if (
        isinstance(value, str)
        and origin is not str
        and issubclass(origin, collections.abc.Sequence)
    ):
        return False
    if origin in _NUMBERS:
        return isinstance(value, (_NUMBERS[origin], torch.SymInt, torch.SymFloat))
    if getattr(origin, "_is_protocol", False) and not hasattr(origin, "_is_runtime_protocol"):
        return True
    return _is_instance(value, origin) and _elements_fit(value, origin, parts)


def _is_instance(value: Any, origin: type) -> bool:
    try:
        return isinstance(value, origin)
    except TypeError:  # a protocol that is not for run time
        return True


def _elements_fit(value: Any, origin: type, parts: Sequence[Any]) -> bool:
    if not issubclass(origin, collections.abc.Sequence) or not isinstance(value, (list, tuple)):
        return True
    is_one_kind = len(parts) == 1 or (len(parts) == 2 and parts[1] is Ellipsis)
    return not is_one_kind or all(fits(one, parts[0]) for one in value)


def words(hint: Any) -> str:
    """Say an annotation: "an int or a Tensor"."""
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(words, parts)))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is collections.abc.Callable:
        return "a function"
    if origin is bool:
        return "True or False"
    return _WORDS.get(origin) or _article(getattr(origin, "__name__", str(origin)))


def _article(noun: str) -> str:
    return f"an {noun}" if noun[:1] in "aeioAEIO" else f"a {noun}"
