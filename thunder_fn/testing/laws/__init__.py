"""Laws of every trace, and of every interpreter on every trace.

Each law is a function of a trace and values for its inputs. It raises `LawBroken`, an
AssertionError, with the trace printed. `INTERPRETERS` lists the functions from trace to trace. A
new one is a line there, and all laws that hold for every interpreter hold for it.

Comparisons are bitwise where the law says so (NaN equal to NaN). Others compare with PyTorch's own
differentiation, to a tolerance of the least precise dtype. They say nothing where PyTorch's result
is not finite or very large.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from thunder_fn.errors import UnknownOption
from thunder_fn.ir.trace import Trace
from thunder_fn.testing.laws.comparing import Inputs, Law, LawBroken
from thunder_fn.testing.laws.data import (
    law_check_holds,
    law_evaluate_is_pure,
    law_executor_is_evaluate,
    law_fx_keeps,
    law_pickle_keeps,
    law_python_captures,
    law_save_keeps,
    law_text_runs,
)
from thunder_fn.testing.laws.forward import (
    law_checkpoint_keeps_few_bytes,
    law_checkpoint_keeps_gradients_bitwise,
    law_jvp_is_linear,
    law_jvp_is_pytorchs,
    law_vmap_asks_about_randomness,
    law_vmap_is_a_loop,
)
from thunder_fn.testing.laws.interpreters import (
    INTERPRETERS,
    UNFOLDING,
    Interpreter,
    law_work_grows_with_distinct_code,
    laws_of,
)
from thunder_fn.testing.laws.reverse import (
    law_fused_split_keeps_gradients,
    law_second_order_is_symmetric,
    law_split_is_vjp,
    law_stop_gradient_stops,
    law_unused_inputs_get_zeros,
    law_vjp_is_adjoint_of_jvp,
    law_vjp_is_autograd,
)
from thunder_fn.testing.laws.simplify import (
    law_check_errors_finds_nan,
    law_cse_leaves_no_twins,
    law_dce_drops_the_dead,
    law_inline_leaves_no_composites,
)

__all__ = [
    "GROUPS",
    "INTERPRETERS",
    "LAWS",
    "UNFOLDING",
    "Inputs",
    "Interpreter",
    "Law",
    "LawBroken",
    "check_laws",
    "law_work_grows_with_distinct_code",
    "laws_of",
]

GROUPS: dict[str, dict[str, Law]] = {
    "data": {
        "check holds": law_check_holds,
        "evaluate is pure": law_evaluate_is_pure,
        "text runs": law_text_runs,
        "pickle keeps": law_pickle_keeps,
        "save keeps": law_save_keeps,
        "fx keeps": law_fx_keeps,
        "python captures": law_python_captures,
        "executor is evaluate": law_executor_is_evaluate,
    },
    "cleaning": {
        "dce drops the dead": law_dce_drops_the_dead,
        "cse leaves no twins": law_cse_leaves_no_twins,
        "inline leaves no composites": law_inline_leaves_no_composites,
    },
    "reverse": {
        "vjp is autograd": law_vjp_is_autograd,
        "vjp is adjoint of jvp": law_vjp_is_adjoint_of_jvp,
        "split is vjp": law_split_is_vjp,
        "fused split keeps gradients": law_fused_split_keeps_gradients,
        "unused inputs get zeros": law_unused_inputs_get_zeros,
        "stop_gradient stops": law_stop_gradient_stops,
    },
    "forward": {"jvp is PyTorch's": law_jvp_is_pytorchs, "jvp is linear": law_jvp_is_linear},
    "batching": {
        "vmap is a loop": law_vmap_is_a_loop,
        "vmap asks about randomness": law_vmap_asks_about_randomness,
    },
    "rematerialisation": {
        "checkpoint keeps gradients bitwise": law_checkpoint_keeps_gradients_bitwise,
        "checkpoint keeps few bytes": law_checkpoint_keeps_few_bytes,
    },
    "errors": {"check_errors finds NaN": law_check_errors_finds_nan},
    "second order": {"second order is symmetric": law_second_order_is_symmetric},
    **{name: laws_of(interpreter, name) for name, interpreter in INTERPRETERS.items()},
}
"""Every law of a single trace, by its subject."""

LAWS: dict[str, Law] = {name: law for group in GROUPS.values() for name, law in group.items()}
"""Every law of a single trace, by name."""


def check_laws(names: Iterable[str], trace: Trace, inputs: Inputs) -> None:
    """Check some laws on one trace; the exception names the law.

    Law: it raises exactly if one of the laws does.

    Raises:
        UnknownOption: there is no law of one of the names.
        LawBroken: a law does not hold; other exceptions are what the interpreters raise.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.testing import check_laws
        >>> x = torch.ones(2)
        >>> check_laws(["vmap is a loop"], tfn.trace(torch.sin, x), (x,))
    """
    for name in names:
        if name not in LAWS:
            near = difflib.get_close_matches(name, LAWS, n=1, cutoff=0.0)[0]
            raise UnknownOption(f"check_laws: there is no law {name!r}; did you mean {near!r}?")
        try:
            LAWS[name](trace, inputs)
        except Exception as error:
            error.add_note(f"this breaks the law: {name}")
            raise
