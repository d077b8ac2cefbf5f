"""Compiled regions on disk, so that a second process starts without compiling, and without
importing Inductor.

    <folder>/<environment>/<region>.json           the text of a region and where its kernels are
    <folder>/<environment>/<module>-<digest>.so    kernels, of which each compilation has other bits

The folder is `$THUNDER_FN_CACHE_DIR`, or `~/.cache/thunder_fn`. A file there counts only if it is
whole and the user's own (`trusted.py`). A file that is cut short, or that somebody else may have
written, is ignored. So is one for another PyTorch, another processor or another version of this
package. Files are written beside their place and moved there, so nobody ever sees half of one. If
nothing can be written, regions are compiled again in the next process.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from thunder_fn.executors.torchinductor import trusted
from thunder_fn.executors.torchinductor.codegen import Code, Job, Kernel
from thunder_fn.executors.torchinductor.native import load, module_name
from thunder_fn.executors.torchinductor.trusted import Untrusted, make_folder, put
from thunder_fn.extend.regions import taken_from
from thunder_fn.ir.trace import Equation, Literal, Trace, Var
from thunder_fn.torch_internals import inductor as internals

Functions = dict[str, Callable[..., Any]]


@cache
def environment() -> str:
    """A name for everything besides the region that compiled code depends on."""
    facts = (
        _writers(),
        torch.__version__,
        torch.version.git_version,
        sys.version,
        sys.implementation.cache_tag,
    )
    machine = (platform.machine(), platform.system(), internals.cpu_capability(), _processor())
    return hashlib.sha256(repr((facts, machine)).encode()).hexdigest()[:20]


def _writers() -> str:
    """A digest of the files that write code: a region that another version of them compiled may
    be slower, or wrong.
    """
    files = (*sorted(Path(__file__).parent.glob("*.py")), Path(internals.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _processor() -> str:
    """The features of the processor: kernels are compiled for this very one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    )


def root() -> Path:
    """The folder of everything that is kept on disk."""
    given = os.environ.get("THUNDER_FN_CACHE_DIR")
    return Path(given) if given else Path.home() / ".cache" / "thunder_fn"


def job_key(job: Job) -> str:
    """A name for a job that is the same in every process."""
    bounds = sorted((str(symbol), str(symbol.bounds)) for symbol in job.symbols)
    facts = (
        fingerprint(job.region),
        job.strides,
        job.threads,
        job.donated,
        *([bounds] if bounds else []),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def fingerprint(trace: Trace) -> tuple[Any, ...]:
    """Describe the computation of a trace as nested tuples of strings: equal for equal traces
    without constants, in any process.
    """
    types = tuple(str(var.type) for var in trace.inputs)
    return types, tuple(map(_equation, trace.equations)), tuple(map(_argument, trace.outputs))


def _equation(equation: Equation) -> tuple[Any, ...]:
    arguments = (
        _argument(equation.args),
        tuple((key, _argument(value)) for key, value in equation.kwargs),
    )
    types = tuple(str(var.type) for var in equation.outputs)
    return str(equation.op), arguments, types, tuple(map(fingerprint, equation.bodies))


def _argument(argument: Any) -> Any:
    match argument:
        case Var():
            return f"v{argument.index}"
        case Literal(value=float() as value):
            return f"float {value.hex()}"
        case Literal(value=complex() as value):
            return f"complex {value.real.hex()} {value.imag.hex()}"
        case Literal(value=value):
            return f"{type(value).__name__} {value!r}"
        case _:
            return tuple(map(_argument, argument))


@dataclass(frozen=True, slots=True)
class Entry:
    """A region as it is kept: its text, its kernels with the modules that have them, and its
    tensors.
    """

    text: str
    kernels: tuple[tuple[str, str, str], ...]
    """(name in the text, key, name of the module's file)"""
    digests: tuple[tuple[str, str], ...]
    """(name of a module's file, digest of its content)"""
    constants: str

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the text names."""
        return torch.load(io.BytesIO(base64.b64decode(self.constants)), weights_only=True)


def read(job: Job, loaded: Functions) -> Callable[..., Any] | None:
    """The region's function, if it is on disk and whole. Kernels that are in `loaded` are taken
    from there.
    """
    folder = root() / environment()
    try:
        entry = _entry(job)
        for name, known in entry.digests:
            needed = [key for _, key, where in entry.kernels if where == name and key not in loaded]
            if needed:
                found = _load_whole(folder / name, known)
                loaded.update({key: found[key] for key in needed})
        kernels = {name: loaded[key] for name, key, _ in entry.kernels}
        return function_of(entry.text, kernels, entry.tensors())
    except _NOT_WHOLE:
        return None


def code_of(job: Job) -> Code | None:
    """The region's code, if it is on disk and whole; kernels without their sources."""
    try:
        entry = _entry(job)
        return Code(
            entry.text,
            tuple((name, Kernel((), "")) for name, *_ in entry.kernels),
            tuple(entry.tensors().items()),
        )
    except _NOT_WHOLE:
        return None


_NOT_WHOLE = (
    Untrusted,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    ImportError,
    SyntaxError,
    EOFError,
    RuntimeError,
)


def _entry(job: Job) -> Entry:
    """The entry of a region on disk.

    Raises:
        OSError, ValueError, TypeError, Untrusted: nothing is, or it is not whole.
    """
    return Entry(**json.loads(_signed_text(f"{job_key(job)}.json")))


def _signed_text(name: str) -> str:
    whole = trusted.read(root() / environment() / name).decode()
    return trusted.opened(f"{environment()}/{name}", whole)


def _put_signed(name: str, text: str) -> None:
    whole = trusted.signed(f"{environment()}/{name}", text)
    put(root() / environment() / name, lambda target: Path(target).write_text(whole))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _load_whole(path: Path, digest: str) -> Any:
    code = trusted.read(path)
    if hashlib.sha256(code).hexdigest() != digest:
        raise ImportError(f"{path} is not what was written")
    return load(code, path.stem)


def function_of(
    text: str, kernels: Functions, constants: dict[str, torch.Tensor]
) -> Callable[..., Any]:
    """The function `region` of a module's text."""
    context: dict[str, Any] = {**kernels, **constants}
    exec(compile(text, "<thunder_fn inductor region>", "exec"), context)
    region = context.pop("region")
    # not one that is checked first
    return taken_from(region, text) if region.__name__ == "region" else region


def write(job: Job, code: Code, places: dict[str, Path]) -> None:
    """Keep a region. `places` says in which file each kernel is. If the disk does not take it,
    nothing is kept.
    """
    folder = root() / environment()
    try:
        make_folder(root())
        make_folder(folder)
        digests = {places[kernel.key]: _digest(places[kernel.key]) for _, kernel in code.kernels}
        names = {
            path: f"{path.stem}-{digest[:16]}{path.suffix}" for path, digest in digests.items()
        }
        for path, name in names.items():
            if not (folder / name).exists() or _digest(folder / name) != digests[path]:
                put(folder / name, lambda target, path=path: shutil.copyfile(path, target))
        constants = io.BytesIO()
        torch.save(dict(code.constants), constants)
        kernels = tuple(
            (name, kernel.key, names[places[kernel.key]]) for name, kernel in code.kernels
        )
        entry = {
            "text": code.text,
            "kernels": kernels,
            "digests": tuple((names[path], digest) for path, digest in sorted(digests.items())),
            "constants": base64.b64encode(constants.getvalue()).decode(),
        }
        _put_signed(f"{job_key(job)}.json", json.dumps(entry))
    except OSError:
        return


def read_kernels(kernels: tuple[Kernel, ...]) -> Mapping[str, Callable[..., Any]] | None:
    """A module of these kernels, if it is on disk and whole."""
    path = root() / environment() / f"{module_name(kernels)}.so"
    try:
        return _load_whole(path, _signed_text(path.with_suffix(".digest").name))
    except _NOT_WHOLE:
        return None


def write_kernels(kernels: tuple[Kernel, ...], compiled: Path) -> None:
    """Keep a module of these kernels. If the disk does not take it, nothing is kept."""
    path = root() / environment() / compiled.name
    digest = hashlib.sha256(compiled.read_bytes()).hexdigest()
    try:
        make_folder(root())
        make_folder(path.parent)
        put(path, lambda target: shutil.copyfile(compiled, target))
        _put_signed(path.with_suffix(".digest").name, digest)
    except OSError:
        return


def kept(kernels: tuple[Kernel, ...]) -> Path | None:
    """The path of a module of these kernels on disk, if it is whole."""
    path = root() / environment() / f"{module_name(kernels)}.so"
    return path if read_kernels(kernels) is not None else None
