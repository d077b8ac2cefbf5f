"""Refusals of torch functions while tracing: errors for values, shapes and memory that tracers
do not have.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.replaced.stand_ins import MAX_LISTED
from thunder_fn.errors import (
    CaptureError,
    DataDependentBranch,
    DataDependentShape,
    DataDependentValue,
    UnsupportedCall,
)
from thunder_fn.ir.symbols import Symbol, mentions, symbols_in, symbols_of
from thunder_fn.ir.trace import Expr, Source, Trace

Tensor = torch.Tensor

DATA_DEPENDENT = (
    internals.DATA_DEPENDENT_VALUE,
    internals.DATA_DEPENDENT_SHAPE,
    internals.NEEDS_A_NUMBER,
)
"""Exceptions of PyTorch for a question about the values in a tensor."""
PYTHON_NUMBERS = {
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__complex__",
    "is_nonzero",
    "__contains__",
}
"""Methods of tensors that give a number of Python's, which cannot be a symbol."""
BRANCHES = {"__bool__", "is_nonzero", "__contains__", "equal", "allclose"}

_OUTSIDE = "Do this outside the traced function."
_IN_TORCH = "Use the function of torch that does the same."
MEMORY: dict[Any, str] = {
    **dict.fromkeys((Tensor.numpy, Tensor.__array__, Tensor.__dlpack__), _IN_TORCH),
    **dict.fromkeys(
        (Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.share_memory_), _OUTSIDE
    ),
    **dict.fromkeys((Tensor.__reduce_ex__, Tensor.pin_memory, Tensor.to_mkldnn), _OUTSIDE),
    **dict.fromkeys((*internals.OF_IMPLEMENTATION, Tensor.is_set_to), _OUTSIDE),
    **dict.fromkeys(
        (Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_sparse_coo), "Keep it dense."
    ),
}
"""Functions that need a tensor's memory or another layout, and what to do instead."""


def needs_memory(func: Any) -> bool:
    """Test for a function of a tensor's memory; Dynamo asks for `_version` by an op of its own."""
    is_op = isinstance(func, internals.OpOverload)
    return func in MEMORY or (is_op and func.name() == "prims::_tensor_version")


def data_dependent_error(func: Any, error: Exception | None, source: Source | None) -> Exception:
    """The error for Python code that needs the values in a tensor."""
    name = getattr(func, "__name__", str(func))
    if isinstance(error, internals.NEEDS_A_NUMBER) and name not in PYTHON_NUMBERS:
        return decision_error(error, source)
    if isinstance(error, internals.DATA_DEPENDENT_SHAPE):
        text = (
            f"`{name}` has a result whose shape depends on the values in its input, which are not"
            " known while tracing"
        )
        fix = (
            "Use an op with a fixed shape, such as `torch.where(mask, x, 0)`, or do this step"
            " outside the traced function."
        )
        return DataDependentShape(text, source=source, fix=fix)
    if name in BRANCHES:
        text = (
            "Python asked whether a traced tensor is true (`if`, `while`, `and`, `bool`), "
            "but its values are not known while tracing (data-dependent control flow)"
        )
        fix = (
            "Use `torch.where(condition, a, b)` or `torch.cond`, or move the decision outside the"
            " traced function."
        )
        return DataDependentBranch(text, source=source, fix=fix)
    text = (
        f"`{name}` asked for the values in a traced tensor as Python numbers, but they are not"
        " known while tracing"
    )
    fix = "Keep it a tensor, or pass the number as an argument (see `static_argnames`)."
    if name in ("__int__", "__float__"):
        fix = (
            "Write `x.item()`, which is a number while tracing too, and `math.trunc(x.item())` for"
            " the int of a float."
        )
    return DataDependentValue(text, source=source, fix=fix)


def decision_error(error: Any, source: Source | None) -> DataDependentBranch:
    """The error for Python code that asks about an unbacked size or number."""
    asked = Expr(error.cond)
    what = f"whether {asked}" if asked.kind is bool else f"for the value of {asked}"
    fix = (
        "Write `torch.cond` or `torch.where` for a decision, and `fori_loop` or `while_loop` for a"
        " loop; or say what holds with `torch._check`."
    )
    if asked.kind is not bool:
        fix += (
            " An item is a number already: leave `int()` and `float()` out, and write `math.trunc`"
            " for the int of a float. To print it, write `tfn.debug.print`."
        )
    return DataDependentBranch(
        f"Python asked {what}, where {', '.join(sorted(map(str, error.cond.free_symbols)))} is"
        " found in a tensor's values, which are not known while tracing",
        source=source,
        fix=fix,
    )


def memory_error(func: Any, source: Source | None) -> UnsupportedCall:
    """The error for a function that looks at a tensor's memory."""
    name = "pickle" if func is Tensor.__reduce_ex__ else func.__name__
    name = func.__self__.__name__ if name == "__get__" else name
    text = f"`{name}` needs the memory of a tensor, but a traced tensor has a type and no memory"
    return UnsupportedCall(text, source=source, fix=MEMORY.get(func, _OUTSIDE))


def no_fake_error(op: internals.OpOverload, source: Source | None) -> CaptureError:
    """The error for a user's op of which nobody has said what its results look like."""
    name = internals.schema_of(op).name
    text = (
        f"the custom op `{name}` has no fake kernel, which says what its results look like without"
        " their values"
    )
    fix = f'Register one: `@torch.library.register_fake("{name}")`'
    if torch.Tag.dynamic_output_shape not in op.tags:
        return UnsupportedCall(text, source=source, fix=f"{fix}.")
    fix += "; in it `torch.library.get_ctx().new_dynamic_size()` is a size that depends on values."
    return DataDependentShape(text, source=source, fix=fix)


def check_found(trace: Trace, source: Source | None) -> None:
    """Refuse a number that was found in data and that no equation binds: it is in a stride only."""
    known = set(symbols_in(trace.inputs))
    unknown = {one for one in symbols_of(trace) - known if not isinstance(one, Symbol)}
    if not unknown:
        return
    using = (one.source for one in trace.equations if mentions(one, unknown))
    text = (
        f"{', '.join(sorted(map(str, unknown)))} depends on the values in a tensor and is only in a"
        " stride or storage offset, which the program does not read"
    )
    fix = "Let the op return it as a size or as a tensor of one number."
    raise DataDependentShape(text, source=next(using, source), fix=fix)


# ---- where the user is ----


def listing_error(source: Source | None, count: Any) -> DataDependentValue:
    """The error for `tolist` of more numbers than can be symbols."""
    text = (
        f"`tolist` asked for {count} numbers in a traced tensor, and at most {MAX_LISTED} ints and"
        " floats can be symbols"
    )
    fix = (
        "Keep it a tensor, take the few numbers that are needed before (`x[:3].tolist()`), or pass"
        " the list as an argument."
    )
    return DataDependentValue(text, source=source, fix=fix)


def script_error(what: str, source: Source | None) -> UnsupportedCall:
    """The error for TorchScript, whose code runs in C++."""
    fix = (
        "Call the Python function or module that it was made from, with `torch.where` or"
        " `torch.cond` for what it decides by values."
    )
    return UnsupportedCall(
        f"{what}; what TorchScript has compiled cannot be traced", source=source, fix=fix
    )
