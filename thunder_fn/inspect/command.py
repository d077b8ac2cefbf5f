"""`python -m thunder_fn inspect FILE:FUNCTION`: the inspector's page of a function, or a report in
the terminal.

FUNCTION takes no argument and returns what to look at: `(f, args)`, `(f, args, kwargs)`, or a
callable that needs none. FILE is a Python file or the name of a module.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import webbrowser
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from thunder_fn.commands import UserError, failed, users_code
from thunder_fn.errors import InspectError, ThunderError, kind_of
from thunder_fn.inspect.chains import Chain, chain
from thunder_fn.inspect.chrome import chrome_trace
from thunder_fn.inspect.costs import cost
from thunder_fn.inspect.measured import Measured, measure
from thunder_fn.inspect.memory_use import memory
from thunder_fn.inspect.page import page_of_runs
from thunder_fn.inspect.residual_tables import residuals
from thunder_fn.inspect.tables import seconds_text

REPORTS: dict[str, Callable[..., Any]] = {
    "chain": chain,
    "memory": memory,
    "residuals": residuals,
    "cost": cost,
}


def main(argv: Sequence[str]) -> int:
    """Parse the command line and write the report. The exit code."""
    parser = argparse.ArgumentParser(prog="python -m thunder_fn inspect", description=__doc__)
    parser.add_argument(
        "function", metavar="FILE:FUNCTION", help="returns (f, args) or (f, args, kwargs)"
    )
    parser.add_argument(
        "--beside",
        metavar="FILE:FUNCTION",
        help="another run, which the page compares with the first: its differences and its costs",
    )
    parser.add_argument(
        "--out", type=Path, metavar="PAGE", help="where the page goes; NAME.html if left out"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument(
        "--report", choices=sorted(REPORTS), help="print a report and write no page"
    )
    parser.add_argument(
        "--chrome-trace", type=Path, metavar="JSON", help="run it, and write a trace for Perfetto"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run it: the page says what a call takes and opens PyTorch's profile of one in"
        " Perfetto; the profile is also written beside it, as PAGE.trace.json",
    )
    options = parser.parse_args(argv)
    try:
        places = [name for name in (options.function, options.beside) if name is not None]
        calls = [load(place) for place in places]
    except UserError as error:
        return failed("inspect", error)
    except (ThunderError, OSError) as error:
        return failed("inspect", error, 2)
    f, args, kwargs = calls[0]
    try:
        if options.report is not None:
            return _print(REPORTS[options.report](f, *args, **kwargs))
        if options.chrome_trace is not None:
            print(chrome_trace(options.chrome_trace, f, *args, **kwargs))
            return 0
        look = measure if options.measure else chain
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of its own starts
        runs = [look(f, *args, **kwargs) for f, args, kwargs in calls]
        page = page_of_runs(*runs, names=_told_apart(places) if options.beside else ())
        path = page.save(options.out or Path(f"{_file_name(page.name)}.html"))
        _save_profiles(runs, path)
    except OSError as error:
        print(
            f"thunder_fn inspect: {error.filename} cannot be written: {error.strerror}",
            file=sys.stderr,
        )
        return 1
    except ThunderError as error:
        return failed("inspect", error)
    print(f"{path} ({len(page.html) / 1024:.0f} KiB)")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _save_profiles(runs: Sequence[Chain | Measured], page: Path) -> None:
    """Write the profiles of what was measured beside the page, and print what a call took."""
    measured = [run for run in runs if isinstance(run, Measured)]
    for number, run in enumerate(measured):
        turn = f".{number + 1}" if len(measured) > 1 else ""
        path = run.save(page.with_name(f"{page.stem}{turn}.trace.json"))
        print(f"{path} (a call of {run.chain.name} takes {seconds_text(run.seconds)})")


def _told_apart(places: Sequence[str]) -> list[str]:
    """The names of functions, with their files if the names are equal."""
    names = [place.rpartition(":")[2] for place in places]
    return names if len(set(names)) == len(names) else list(places)


def _print(report: Any) -> int:
    """Print with colours in a terminal that has `rich`, as plain text otherwise."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        Console().print(report)
    else:
        print(report)
    return 0


def _file_name(name: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in name).strip("_") or "page"


def load(where: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and arguments that FILE:FUNCTION names.

    Raises:
        InspectError: there is no such file, module or function, or it returns something else; says
            which.
        UserError: the user's code raises.
    """
    return _call(where, function_at(where))


def function_at(where: str) -> Callable[..., Any]:
    """The function that FILE:FUNCTION names.

    Raises:
        InspectError: there is no such file, module or function.
        UserError: the user's code raises.
    """
    place, colon, name = where.rpartition(":")
    if not colon or not place:
        raise InspectError(
            f"{where!r} names no function", fix="Write FILE:FUNCTION, such as `model.py:example`."
        )
    module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [
            key
            for key, value in vars(module).items()
            if callable(value)
            and not key.startswith("_")
            and getattr(value, "__module__", "") == module.__name__
        ]
        raise InspectError(
            f"{place} has no function {name!r}", fix=f"It has {', '.join(known) or 'none'}."
        )
    return function


def _module(place: str) -> Any:
    path = Path(place)
    if path.suffix == ".py":
        if not path.is_file():
            raise InspectError(f"there is no file {place}", fix="Give the path of a Python file.")
        sys.path.insert(0, str(path.parent.resolve()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None, "a Python file has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        with users_code():
            spec.loader.exec_module(module)
        return module
    sys.path.insert(0, "")
    if importlib.util.find_spec(place.partition(".")[0]) is None:
        raise InspectError(f"there is no module {place}", fix="Or give a path that ends in .py.")
    with users_code():
        return importlib.import_module(place)


def _call(
    where: str, function: Callable[..., Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    try:
        signature(function).bind()
    except TypeError as error:
        fix = "It takes no argument and returns (f, args), the function and what it is called with."
        raise InspectError(
            f"{where} cannot be called without arguments: {error}", fix=fix
        ) from None
    with users_code():
        found: Any = function()
    match found:
        case (f, tuple() | list() as args) if callable(f):
            return f, tuple(args), {}
        case (f, tuple() | list() as args, dict() as kwargs) if callable(f):
            return f, tuple(args), kwargs
        case f if callable(f):
            return f, (), {}
        case _:
            fix = "Return (f, args) or (f, args, kwargs), where args is a tuple: `return f, (x,)`."
            raise InspectError(f"{where} returned {_kinds(found)}", fix=fix)


def _kinds(found: Any) -> str:
    if not isinstance(found, tuple):
        return kind_of(found)
    return f"({', '.join('a function' if callable(part) else kind_of(part) for part in found)})"
