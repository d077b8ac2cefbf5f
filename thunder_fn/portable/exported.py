"""`export`: a function as a `torch.export.ExportedProgram`, for AOTInductor, ONNX and other tools.

The function is traced and transformed here, and what became of it runs once under `torch.export`.
Sizes that are symbols in the trace are dynamic there. What the trace demands of them becomes ranges
and assertions of the exported program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch

from thunder_fn.api.calling import call_arguments
from thunder_fn.capture import TENSOR, pytree
from thunder_fn.capture.numbers.arguments import value_at
from thunder_fn.errors import ThunderError, spelled
from thunder_fn.ir.symbols import Symbol, compute
from thunder_fn.ir.trace import Expr, subtraces
from thunder_fn.jitted import Jitted, jit
from thunder_fn.portable.errors import PortableError
from thunder_fn.portable.functions import NumberLeaf, PortableFunction
from thunder_fn.portable.higher_order import Running, has_rules
from thunder_fn.torch_internals import demand


@spelled(
    dynamic_shapes="dynamic",
    strict="Leave it out: f is traced, and Dynamo does not read it.",
)
def export(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Any = None,
) -> torch.export.ExportedProgram:
    """Make an exported program of PyTorch's from a function.

    Law: ``export(f, args).module()(*args)`` is ``f(*args)``, and so for all sizes that `dynamic`
        names. Sizes for which f's program is not right are an error.

    The loops and choices of the program are PyTorch's `cond`, `while_loop` and `scan`. Checkpoints
    and jitted functions inside are what they compute. If f has rules of its own for derivatives,
    the results of the exported program have no gradient.

    Args:
        f: any PyTorch callable: a function, a transformed function, one that `load` has read.
        args, kwargs: arguments of a call.
        dynamic: the sizes that are dynamic, by argument, as `jit` takes them:
            `{"x": {0: (2, 512)}}`.

    Raises:
        PortableError: a part of the program has no counterpart in PyTorch, such as an op of
            thunder_fn's; names the equation and the user's line.
        CaptureError: f cannot be traced.
        TraceTypeError: the arguments are no tuple or list.

    Example:
        >>> from thunder_fn import grad
        >>> f = grad(lambda x: x.sin().sum())
        >>> program = export(f, (torch.zeros(3),), dynamic={"x": {0: (2, 8)}})
        >>> program.module()(torch.zeros(5))
        tensor([1., 1., 1., 1., 1.])

    Source: torch.export.export.
    """
    args, options = call_arguments("export", args), dict(kwargs or {})
    function = _function(f, args, options, dynamic)
    exported = Exported(function)
    try:
        return torch.export.export(
            exported,
            args,
            options,
            dynamic_shapes=_dynamic_shapes(function),
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    except ThunderError:
        raise
    except Exception as error:
        what = f"torch.export refuses {function.trace.name}: {str(error).strip()}"
        raise PortableError(f"export: {what}") from error


def _function(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: Any
) -> PortableFunction:
    if isinstance(f, PortableFunction):
        return f
    if isinstance(f, torch.nn.Module):
        jitted = jit(_called(f))
    else:
        jitted = f if isinstance(f, Jitted) else jit(f)
    if dynamic is not None:
        jitted = jit(jitted, dynamic=dynamic)
    return jitted.lower(*args, **kwargs).portable()


def _called(module: torch.nn.Module) -> Callable[..., Any]:
    """The call of a module, which closes over its tensors, with the argument names of `forward`."""

    @functools.wraps(module.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return call


class Exported(torch.nn.Module):
    """A function as a module, whose buffers and parameters are the tensors that it closes over."""

    def __init__(self, function: PortableFunction) -> None:
        super().__init__()
        self.function = function
        self.names: dict[int, str] = {}
        self.numbers: set[int] = set()
        """Tensors without dims, which are held with one: AOTInductor begins no loop with those."""
        self.is_detached = has_rules(function.trace)
        for inner in subtraces(function.trace):
            for constant in inner.constants:
                self._hold(constant.tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self.names:
            return
        name = self.names[id(tensor)] = f"constant_{len(self.names)}"
        if isinstance(tensor, torch.nn.Parameter):
            self.register_parameter(name, tensor)
        elif tensor.dim() == 0:
            self.numbers.add(id(tensor))
            self.register_buffer(name, tensor.detach().reshape(1))
        else:
            self.register_buffer(name, tensor.detach())

    def _held(self, key: int) -> torch.Tensor:
        held = getattr(self, self.names[key])
        return held.reshape(()) if key in self.numbers else held

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the trace on what `torch.export` passes."""
        function = self.function
        leaves = pytree.flatten((args, kwargs))[0]
        numbers = {
            symbol.value: value_at(leaves, place) for symbol, place in function.arguments.symbols
        }
        for relation in _demands(function):
            if _range(relation) is None:
                demand(compute(relation, numbers), f"the program is right where {relation}")
            _assert(relation, numbers)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        extra = [value_at(leaves, place) for place in function.arguments.extra]
        constants = {key: self._held(key) for key in self.names}
        outputs = Running(numbers, constants).run(function.trace, [*tensors, *extra])
        if self.is_detached:
            outputs = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in outputs)
        count = len(outputs) - len(function.writes)
        for place, value in zip(function.writes, outputs[count:], strict=True):
            tensors[place].copy_(value)
        filled = pytree.filled(function.result_leaves, outputs[:count])
        return pytree.unflatten(pytree.flatten(function.results)[1], filled)


# ---- sizes ----


def _ranges(function: PortableFunction) -> dict[Any, tuple[int, int | None]]:
    """The least and the greatest value of each symbol, which its bounds and relations give."""
    found: dict[Any, tuple[int, int | None]] = {}
    for symbol, _ in function.arguments.symbols:
        if not symbol.value.is_integer:
            continue
        low, high = getattr(symbol.value, "bounds", (None, None))
        least = 2 if symbol.value.is_positive else _LEAST
        found[symbol.value] = (least if low is None else max(least, int(low))), high
    for relation in function.relations:
        if (known := _range(relation)) is not None and known[0] in found:
            symbol, low, high = known
            least, most = found[symbol]
            tops = [top for top in (most, high) if top is not None]
            found[symbol] = max(least, low), min(tops) if tops else None
    return found


def _range(relation: Expr) -> tuple[Any, int, int | None] | None:
    """The range of the only symbol of a relation with a number; None for other relations."""
    value: Any = relation.value
    if not isinstance(value, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)):
        return None
    sides: tuple[Any, Any] = value.gts, value.lts
    great, small = sides
    strict = isinstance(value, (sympy.Gt, sympy.Lt))
    if isinstance(great, Symbol) and great.is_integer and small.is_Integer:
        return great, int(small) + strict, None
    if isinstance(small, Symbol) and small.is_integer and great.is_Integer:
        return small, _LEAST, int(great) - strict
    return None


_LEAST = -(2**62)
"""The least of the ints that a symbol can stand for."""


def _demands(function: PortableFunction) -> Iterator[Expr]:
    """The relations that have to hold in each call."""
    for symbol, (low, high) in _ranges(function).items():
        if low > _LEAST:
            yield Expr(sympy.Ge(symbol, low, evaluate=False))
        if high is not None:
            yield Expr(sympy.Le(symbol, high, evaluate=False))
    yield from (relation for relation in function.relations if _range(relation) is None)
    yield from _sizes_that_follow(function)


def _sizes_that_follow(function: PortableFunction) -> Iterator[Expr]:
    """The equations that types state of sizes which have symbols of their own."""
    symbols = {place: symbol.value for symbol, place in function.arguments.symbols}
    tensors = [i for i, leaf in enumerate(function.arguments.leaves) if leaf is TENSOR]
    for position, var in zip(tensors, function.trace.inputs, strict=False):
        for dim, size in enumerate(getattr(var.type, "shape", ())):
            own = symbols.get((position, dim))
            if own is not None and isinstance(size, Expr) and size.value != own:
                yield Expr(sympy.Eq(own, size.value, evaluate=False))


def _assert(relation: Expr, numbers: Mapping[Any, Any]) -> None:
    """Put an assertion into the program, of tensors: PyTorch takes the range of a size for granted
    where it compiles, and drops what follows from that.
    """
    holds = _truth(relation.value, numbers)
    if holds is not None:
        torch.ops.aten._assert_async.msg(holds, f"the program is right where {relation}")


def _truth(value: Any, numbers: Mapping[Any, Any]) -> Any:
    """A relation as a tensor of one bool; None for one that tensors cannot compute."""
    compare = _COMPARE.get(type(value))
    if compare is not None:
        left, right = (torch.full((), compute(Expr(side), numbers)) for side in value.args)
        return compare(left, right)
    if isinstance(value, sympy.Not):
        inner = _truth(value.args[0], numbers)
        return None if inner is None else ~inner
    return None


_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    sympy.Eq: torch.eq,
    sympy.Ne: torch.ne,
    sympy.Ge: torch.ge,
    sympy.Gt: torch.gt,
    sympy.Le: torch.le,
    sympy.Lt: torch.lt,
}


def _dynamic_shapes(function: PortableFunction) -> Any:
    """The sizes that are dynamic, in the form of `torch.export`."""
    ranges = _ranges(function)
    dims: dict[tuple[int, int | None], Any] = {
        place: torch.export.Dim.DYNAMIC(min=ranges[symbol.value][0], max=ranges[symbol.value][1])
        for symbol, place in function.arguments.symbols
        if symbol.value in ranges
    }
    shapes: list[Any] = []
    for position, leaf in enumerate(function.arguments.leaves):
        if leaf is TENSOR:
            own = {
                dim: one for (at, dim), one in dims.items() if at == position and dim is not None
            }
            shapes.append({dim: one for dim, one in own.items() if dim >= 0} or None)
        elif isinstance(leaf, NumberLeaf):
            shapes.append(torch.export.Dim.DYNAMIC)
        else:
            shapes.append(None)
    spec = pytree.flatten(function.arguments.tree)[1]
    args, kwargs = pytree.unflatten(spec, shapes)
    return {"args": tuple(args), "kwargs": dict(kwargs)} if kwargs else {"args": tuple(args)}


__all__ = ["Exported", "export"]
