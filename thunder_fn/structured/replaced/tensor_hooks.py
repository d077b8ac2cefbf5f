"""`Tensor.register_hook` inside a traced function, on a tensor whose gradient is computed after it.

The tensor becomes the result of an identity, whose backward calls the hook (`capture/hooked.py`).
A hook is Python code that may print, keep gradients, or decide by their values. So it is called
when the program runs, as by autograd, through an op with PyTorch's derivative. A hook that closes
over tensors of the traced function is traced instead.

The backward of a function of PyTorch's inside the traced function calls hooks itself.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import module_tracker

from thunder_fn import torch_internals as internals
from thunder_fn.callbacks import LIBRARY, function_of, number_of
from thunder_fn.capture.hooked import Hooked
from thunder_fn.capture.modules import holds_tracer
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.replaced.lookasides import divert, original_of
from thunder_fn.capture.scopes import INSTEAD, user_source
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.errors import MissingRule, UnsupportedCall, callable_name
from thunder_fn.structured.custom_vjp import custom_vjp

Tensor = torch.Tensor
Hook = Callable[[Tensor], Any]


def register_hook(x: Tensor, hook: Hook) -> Any:
    """Register for a backward inside the traced function, and for those of the program.

    Raises:
        UnsupportedCall: the tensor comes from outside. In eager mode the hook would stay there.
    """
    recorder = current()
    handle = Tensor.register_hook(x, hook)
    if recorder is None or is_wrapped(x):
        return handle
    if _is_differentiated_outside(recorder, x):
        _record(recorder, x, hook, handle)
    else:
        recorder.hooked_inside.append((x, handle, user_source()))
    return handle


def register_post_accumulate_grad_hook(x: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register for a backward inside the traced function.

    Raises:
        UnsupportedCall: the tensor comes from outside. In eager mode the hook would stay there.
    """
    recorder = current()
    handle = Tensor.register_post_accumulate_grad_hook(x, hook)
    if recorder is None or is_wrapped(x):
        return handle
    if _stays(recorder, x):
        raise _staying(
            recorder, "register_post_accumulate_grad_hook", handle, "Register it outside."
        )
    recorder.hooked_inside.append((x, handle, user_source()))
    return handle


def _register_with_node(backward_hooks: Any, hook: Hook) -> Any:
    """Register a hook of a `grad_fn`, for a backward inside the traced function.

    Raises:
        UnsupportedCall: something from outside requires grad. A later backward, by the trace's
            rules, would not run the hook.
    """
    recorder = current()
    if recorder is not None and any(tracer.requires_grad for tracer in recorder.given):
        raise UnsupportedCall(
            "a hook of a `grad_fn` was registered in a traced function that is differentiated; its"
            " backward would not run it",
            source=recorder.where(),
            fix="Call `register_hook` of the tensor, or write what it does with `custom_vjp`.",
        )
    return original_of(internals.higher_order_function("node hook"))(backward_hooks, hook)


def _stays(recorder: Recorder, x: Tensor) -> bool:
    is_given = recorder.history.is_given(x)
    return is_given and id(x) not in recorder.properties.differentiated


def _staying(recorder: Recorder, name: str, handle: Any, fix: str) -> UnsupportedCall:
    """The error for a hook of a tensor from outside, where it is removed."""
    handle.remove()
    return UnsupportedCall(
        f"`{name}` was called on a tensor from outside the traced function, where the hook would"
        " stay",
        source=recorder.source,
        fix=fix,
    )


def _record(recorder: Recorder, x: Tensor, hook: Hook, handle: Any) -> None:
    var = recorder.var_of(x)
    if var is None or _stays(recorder, x):
        fix = "Register it outside, or on a tensor that is computed inside (`x.view_as(x)`)."
        raise _staying(recorder, "register_hook", handle, fix)
    if (function := _of_a_graph(hook)) is not None:
        if function.__module__ == module_tracker.__name__:
            return  # a program's backward enters no modules that could be named
        handle.remove()
        raise UnsupportedCall(
            "`register_multi_grad_hook` was called in a traced function: its hook asks autograd"
            " which gradients it computes",
            source=recorder.source,
            fix="Call `register_hook` of each tensor.",
        )
    items, known = recorder.scope.items, handle.hooks_dict_ref()
    count = len(items)
    result = recorder.var_of(_identity(hook)(x))
    if result is not None and known is not None:
        added = tuple(items[count:])
        del items[count:]
        is_there = lambda: handle.id in known
        recorder.hooked.append(Hooked(var, added, result, is_there, user_source()))


def _of_a_graph(hook: Any) -> Any:
    """Return the function of a hook that `register_multi_grad_hook` made; None for other hooks."""
    code = getattr(hook, "__code__", None)
    if code is None or not code.co_qualname.startswith("register_multi_grad_hook."):
        return None
    return inspect.getclosurevars(hook).nonlocals.get("fn")


def _identity(hook: Hook) -> custom_vjp[[Tensor], Tensor]:
    """The identity, whose backward calls the hook."""
    is_traced = any(map(holds_tracer, _closure(hook)))

    def identity(x: Tensor) -> Tensor:
        return x.view_as(x)

    def backward(_: Any, gradient: Tensor) -> tuple[Tensor]:
        if not is_traced:
            number = number_of("register_hook", hook)
            return (_ops.tensor_hook(number, gradient, 0),)
        changed = hook(gradient)
        return (gradient if changed is None else changed,)

    identity.__name__ = f"hook_{getattr(hook, '__name__', type(hook).__name__)}"
    made = custom_vjp(identity)
    made.defvjp(lambda x: (identity(x), ()), backward)
    return made


def _closure(hook: Any) -> list[Any]:
    """The values that a hook holds in cells, defaults and arguments."""
    if isinstance(hook, types.MethodType):
        return [*vars(hook.__self__).values()] if hasattr(hook.__self__, "__dict__") else []
    own = [*getattr(hook, "args", ()), *getattr(hook, "keywords", {}).values()]
    function = getattr(hook, "func", hook)
    cells = getattr(function, "__closure__", None) or ()
    return [*own, *(getattr(function, "__defaults__", None) or ()), *map(_content, cells)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _given(recorder: Recorder) -> set[int]:
    """The variables of what the traced function got from outside."""
    constants = {constant.var.index for constant in recorder.constants}
    return {var.index for var in recorder.inputs} | constants


def _is_differentiated_outside(recorder: Recorder, x: Tensor) -> bool:
    """Test whether autograd goes from the tensor on to one that the traced function got from
    outside.
    """
    given, root = _given(recorder), internals.node_of(x)
    nodes = internals.nodes_behind([root]) | {root}
    leaves = [x if root is None else None, *map(internals.leaf_of, nodes)]
    known = [leaf for leaf in leaves if leaf is not None]
    return (
        any(map(internals.is_result_from_outside, nodes))
        or any(map(recorder.history.is_given, known))  # also after a write
        or any((var := recorder.var_of(leaf)) and var.index in given for leaf in known)
    )


# ---- the op that calls a hook ----

LIBRARY.define("tensor_hook(int function, Tensor gradient, int levels) -> Tensor")
LIBRARY.define("tensor_hook_vjp(int function, Tensor x, Tensor cotangent, int levels) -> Tensor")
LIBRARY.define("tensor_hook_jvp(int function, Tensor x, Tensor tangent, int levels) -> Tensor")
_ops = torch.ops.thunder_fn


def _called(function: int, levels: int) -> Callable[[Tensor], Tensor]:
    """The hook as a function of gradients with this many batch dims, mapped as torch.func does."""
    hook: Hook = function_of(function)

    def call(gradient: Tensor) -> Tensor:
        changed: Any = hook(gradient)
        if changed is None:
            return gradient.clone()
        if not isinstance(changed, Tensor) or changed.shape != gradient.shape:
            name = callable_name(hook)
            raise RuntimeError(f"hook {name!r} has changed the size of value")
        return changed.clone()

    for _ in range(levels):
        call = torch.vmap(call, randomness="different")
    return call


def _run(function: int, gradient: Tensor, levels: int) -> Tensor:
    with internals.autograd_as_usual(), torch.no_grad():
        return _called(function, levels)(gradient.detach())


def _vjp(function: int, x: Tensor, cotangent: Tensor, levels: int) -> Tensor:
    with internals.autograd_as_usual(), torch.enable_grad():
        given = x.detach().requires_grad_()
        found = _called(function, levels)(given)
        (result,) = torch.autograd.grad(found, given, cotangent, materialize_grads=True)
        return result


def _jvp(function: int, x: Tensor, tangent: Tensor, levels: int) -> Tensor:
    with internals.autograd_as_usual():
        return torch.func.jvp(_called(function, levels), (x.detach(),), (tangent.detach(),))[1]


def _batched(op: Any) -> Any:
    def rule(info: Any, in_dims: Any, function: int, *given: Any) -> tuple[Tensor, int]:
        *tensors, levels = given
        moved = [
            one.expand(info.batch_size, *one.shape).contiguous()
            if dim is None
            else one.movedim(dim, 0)
            for one, dim in zip(tensors, in_dims[1:], strict=False)
        ]
        return op(function, *moved, levels + 1), 0

    return rule


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.function, x, *_, ctx.levels = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return None, _ops.tensor_hook_vjp(ctx.function, x, cotangent, ctx.levels), None


def _linear_backward(ctx: Any, tangent: Tensor) -> tuple[Any, ...]:
    if ctx.needs_input_grad[1]:
        what = "the second derivative of a hook of `register_hook` was asked for"
        raise MissingRule(what, fix="Write what it does to the gradient with `custom_vjp`.")
    (x,) = ctx.saved_tensors
    return None, None, _ops.tensor_hook_jvp(ctx.function, x, tangent, ctx.levels), None


for _name, _kernel in (("", _run), ("_vjp", _vjp), ("_jvp", _jvp)):
    _op = getattr(_ops, f"tensor_hook{_name}")
    LIBRARY.impl(f"tensor_hook{_name}", _kernel, "CompositeExplicitAutograd")
    _full_name = f"thunder_fn::tensor_hook{_name}"
    torch.library.register_fake(
        _full_name, lambda function, x, *_: x.new_empty(x.shape), lib=LIBRARY
    )
    torch.library.register_vmap(_full_name, _batched(_op), lib=LIBRARY)
torch.library.register_autograd(
    "thunder_fn::tensor_hook", _backward, setup_context=_keep, lib=LIBRARY
)
torch.library.register_autograd(
    "thunder_fn::tensor_hook_vjp", _linear_backward, setup_context=_keep, lib=LIBRARY
)
INSTEAD[Tensor.register_hook] = register_hook
INSTEAD[Tensor.register_post_accumulate_grad_hook] = register_post_accumulate_grad_hook
divert("node hook", _register_with_node)
