"""The inspector: one HTML page with everything in it, no server and no network.

The page's code and style are built from `inspector/` and lie in `assets/`; the data is deflated
JSON beside them.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from thunder_fn.errors import InspectError, kind_of, spelled
from thunder_fn.inspect.chains import Chain, chain
from thunder_fn.inspect.costs import device_of, machine_of
from thunder_fn.inspect.encode import Run, encode
from thunder_fn.inspect.machines import Machine, checked_machine, this_processor
from thunder_fn.inspect.measured import Measured, measure
from thunder_fn.inspect.memory_use import memories_of
from thunder_fn.ir.text import escaped

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:;"
    " form-action 'none'; base-uri 'none'"
)
"""The page runs what it brings, and may ask no network for anything."""
HEIGHT = 720
"""Pixels of the frame in a notebook."""


@dataclass(frozen=True, slots=True)
class Page:
    """The inspector's page of one function. Notebooks show it; `save` writes it.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> page = tfn.inspect.show(torch.sin, torch.ones(2))
        >>> page.name
        'sin'
    """

    name: str
    html: str

    def save(self, path: str | Path) -> Path:
        """Write the page to a file, which any browser opens."""
        Path(path).write_text(self.html, encoding="utf-8")
        return Path(path)

    def __repr__(self) -> str:
        return (
            f"<inspector page of {self.name}, {len(self.html) / 1024:.0f} KiB; `.save(path)`"
            " writes it>"
        )

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that neither it nor the notebook changes the other."""
        text = html.escape(self.html, quote=True)
        return (
            f'<iframe srcdoc="{text}" style="width:100%;height:{HEIGHT}px;border:1px solid'
            ' #8884;border-radius:6px"></iframe>'
        )


@spelled()
def show(
    f: Callable[..., Any],
    /,
    *args: Any,
    machine: Machine | None = None,
    measured: bool = False,
    **kwargs: Any,
) -> Page:
    """The inspector's page of `jit(f)(*args, **kwargs)`. Nothing is run unless it is `measured`.

    Law: its steps are those of `chain`.

    Args:
        f: any PyTorch callable: a function, a module, a jitted or transformed function. `jit`'s
            options are its own.
        machine: whose peaks draw the roofline. Left out, the device's where they are known; those
            of a CPU are measured once in a process.
        measured: run it, as `measure` does; the page says what a call takes, and opens the profile
            of one in Perfetto.

    Returns:
        A page: `.save("page.html")` writes it, notebooks show it.

    Errors as in `chain`.

    Example:
        >>> import torch
        >>> page = show(torch.sin, torch.ones(2))
        >>> page.html.startswith("<!doctype html>")
        True
    """
    return page_of_runs((measure if measured else chain)(f, *args, **kwargs), machine=machine)


def compare(
    first: Chain | Measured,
    second: Chain | Measured,
    names: Sequence[str] = (),
    machine: Machine | None = None,
) -> Page:
    """One page of two runs: before and after a change, two executors, two devices.

    Each step of the second run is compared with the step of the first that has the same part in it.
    Their costs, memory and times stand beside each other.

    Law: a run beside itself shows no change.

    Args:
        first, second: what `chain` gives, or `measure` if their times are of interest.
        names: what the page calls the two; the names of the functions if left out.
        machine: as for `show`.

    Raises:
        InspectError: one of the two is neither a chain nor a measurement.

    Example:
        >>> import torch
        >>> compare(chain(torch.sin, torch.ones(2)), chain(torch.cos, torch.ones(2))).name
        'sin beside cos'
    """
    for run in (first, second):
        if not isinstance(run, (Chain, Measured)):
            raise InspectError(
                f"compare: expected a chain or a measurement, given {kind_of(run)}",
                fix="Pass `chain(f, *args)` or `measure(f, *args)`; `diff` compares two traces.",
            )
    return page_of_runs(first, second, names=names, machine=machine)


def page_of_runs(
    *runs: Chain | Measured,
    names: Sequence[str] = (),
    machine: Machine | None = None,
    report: str = "",
) -> Page:
    """The page of one run or of two, below a report if there is one."""
    names = names or [_chain_of(run).name for run in runs]
    machine = checked_machine("show", machine)
    shown = [_run(name, run, machine) for name, run in zip(names, runs, strict=True)]
    name = " beside ".join(dict.fromkeys(names))
    return Page(name, page_of(name, encode(shown), report))


def _chain_of(run: Chain | Measured) -> Chain:
    return run.chain if isinstance(run, Measured) else run


def _run(name: str, run: Chain | Measured, machine: Machine | None) -> Run:
    found = _chain_of(run)
    measured = run if isinstance(run, Measured) else None
    peaks = machine or machine_of(found) or _processor(found)
    return Run(name, found, memories_of(found), peaks, measured)


def _processor(found: Chain) -> Machine | None:
    """The processor at hand, if the run is on it."""
    return this_processor() if device_of(found).type == "cpu" else None


def page_of(name: str, data: dict[str, Any], report: str = "") -> str:
    """The page around some data."""
    packed = base64.b64encode(
        zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)
    ).decode()
    style, code = asset("inspector.css"), asset("inspector.js")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta'
        f' http-equiv="Content-Security-Policy" content="{POLICY}">\n<meta name="viewport"'
        f' content="width=device-width,initial-scale=1">\n<title>{html.escape(escaped(name))} ·'
        f" inspector</title>\n<style>{style}</style>\n</head>\n<body>\n{_report(report)}<div"
        ' id="app"><noscript>This'
        " page needs JavaScript, which it brings itself.</noscript></div>\n<script"
        ' type="application/octet-stream"'
        f' id="data">{packed}</script>\n<script>{code}</script>\n</body>\n</html>\n'
    )


REPORT = (
    "body{display:flex;flex-direction:column}#app{flex:1;min-height:0}#report{padding:8px 16px;"
    "max-height:50vh;overflow:auto;background:var(--panel);border-bottom:1px solid var(--line)}"
    "#report pre:first-of-type{white-space:pre-wrap}#report pre+pre{overflow-x:auto;margin-top:1em}"
)
"""The style of a report, which can be folded, above the page."""


def _report(text: str) -> str:
    """A report under its first line, or nothing. Lines of its first paragraph break where there is
    no room; its tables are a box of their own.
    """
    if not text:
        return ""
    first, _, rest = html.escape(text).partition("\n")
    head, _, tables = rest.partition("\n\n")
    return (
        f'<style>{REPORT}</style>\n<details id="report" open><summary>{first}</summary>'
        f'<pre>{head}</pre><pre tabindex="0" role="region" aria-label="tables">{tables}</pre>'
        "</details>\n"
    )


def asset(name: str) -> str:
    """A file of the bundle."""
    return (
        resources.files("thunder_fn.inspect").joinpath("assets", name).read_text(encoding="utf-8")
    )
