"""The API pages: every public name once, its docstring read by mkdocstrings.

`import thunder_fn as tfn` has the names of `GROUPS`; a name that is in none of them is an error.
What is imported from a module of its own has a page with that module's `__all__`.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

import thunder_fn

GROUPS: dict[str, tuple[str, str]] = {
    "Traces": (
        "Capture a function as a trace, evaluate the trace, and check it.",
        "trace eval_shape evaluate check simplify clear_caches composite pure_callback",
    ),
    "Derivatives": (
        "Transforms of functions, with the signatures of torch.func.",
        (
            "grad grad_and_value value_and_grad vjp jvp linearize jacrev jacfwd hessian"
            " stop_gradient saved_residuals custom_vjp custom_jvp"
        ),
    ),
    "Batches": (
        "Turn a function of one example into a function of a batch.",
        "vmap custom_vmap stack_module_state functional_call functionalize",
    ),
    "Control flow": (
        "Loops and choices that stay in the trace.",
        "cond switch scan while_loop fori_loop map associative_scan roll unroll",
    ),
    "Memory": (
        "Choose the residuals that a backward keeps.",
        "checkpoint checkpoint_name checkpoint_policies",
    ),
    "Programs": (
        "Make programs that run, and look at the traces that led to them.",
        (
            "jit compile constant Recipe Transform Lookaside functional_optimizer last_traces"
            " last_prologue_traces last_backward_traces cache_info explain_claims explain_misses"
            " check_errors"
        ),
    ),
    "Programs that leave the process": (
        "Write programs to files of data, or make them PyTorch's exported programs.",
        "save load export",
    ),
    "Numbers and parameters": (
        "Change the precision of a program, or the form in which parameters are stored.",
        "autocast autocast_policy quantize lora fsdp ddp tensor_parallel",
    ),
    "Many devices": (
        "Put stages, positions and experts on many ranks, and predict the cost of a step.",
        "pipeline context_parallel expert_parallel plan",
    ),
}
MODULES = {
    "thunder_fn.extend": "Executors and operators",
    "thunder_fn.inspect": "Looking at programs",
    "thunder_fn.recipes": "Recipes",
    "thunder_fn.debug": "Printing and checking in programs",
    "thunder_fn.random": "Random keys",
    "thunder_fn.parameters": "Parameters in another form",
    "thunder_fn.planning": "Planning for many devices",
    "thunder_fn.testing": "Laws for your transforms",
    "thunder_fn.ir": "Traces, and interpreters of your own",
}


def public_names() -> set[str]:
    """The names that `import thunder_fn as tfn` offers, modules aside."""
    names = thunder_fn.__all__
    return {name for name in names if not isinstance(getattr(thunder_fn, name), ModuleType)}


def pages() -> dict[str, str]:
    """The text of each page, by the page's file name.

    Raises:
        ValueError: a public name is in no group, or a group has a name that is not public.
    """
    grouped = {name for _, names in GROUPS.values() for name in names.split()}
    if grouped != public_names():
        raise ValueError(
            "docs/tools/api.py: these names are on no page, or are no names:"
            f" {grouped ^ public_names()}"
        )
    found, written = {}, list[object]()
    for title, (summary, names) in GROUPS.items():
        entries = [entry(f"tfn.{name}", getattr(thunder_fn, name)) for name in names.split()]
        found[f"{title.lower().replace(' ', '_')}.md"] = "\n".join(
            [f"# {title}", "", summary, "", *entries]
        )
        written += [getattr(thunder_fn, name) for name in names.split()]
    for name, title in MODULES.items():
        module = importlib.import_module(name)
        values = {public: getattr(module, public) for public in members(module)}
        is_known = {
            public: any(value is one for one in written) for public, value in values.items()
        }
        new = [
            entry(f"{name}.{public}", value)
            for public, value in values.items()
            if not is_known[public]
        ]
        known = [f"`{public}`" for public in values if is_known[public]]
        also = (
            [f"It also has {', '.join(known)}, which `import thunder_fn as tfn` offers too.", ""]
            if known
            else []
        )
        docstring = inspect.getdoc(module) or ""
        found[f"{name.rpartition('.')[2]}.md"] = "\n".join(
            [f"# {title}", "", f"`{name}`", "", docstring, "", *also, *new]
        )
    return found


def members(module: ModuleType) -> list[str]:
    """The public names of a module, its own modules aside: `__all__`, or what is defined in it."""
    own = (
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and callable(value)
    )
    names = getattr(module, "__all__", own)
    is_public = lambda name: name[0] != "_" and not isinstance(getattr(module, name), ModuleType)
    return list(filter(is_public, names))


def is_documented(value: object) -> bool:
    """Test for a function or a class, which has a docstring of its own. Data has one where it is
    assigned.
    """
    return isinstance(value, type) or inspect.isroutine(value)


def entry(shown: str, value: object) -> str:
    """Write the mkdocstrings entry of a function, a class or data where it is defined, under the
    name that users call.
    """
    path = f"{value.__module__}.{value.__qualname__}" if is_documented(value) else shown  # type: ignore[attr-defined]
    if not path.startswith("thunder_fn."):
        return (
            f"## {shown}\n\nPyTorch's own `{path}`, which works inside and outside of traced"
            " functions.\n"
        )
    return (
        f"::: {path}\n    options:\n      heading: {shown}\n      toc_label:"
        f" {shown.rpartition('.')[2]}\n"
    )
