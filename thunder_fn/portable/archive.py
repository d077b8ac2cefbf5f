"""The file: a zip archive of stored members, which names its format and the digest of each member.

    manifest.json            format, version, versions of the packages, digests
    program.json             the tables of `traces.py`
    constants.safetensors    tensors; missing if there are none

A tensor of a dtype that safetensors does not have is stored as floats or bytes beside its dtype.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from thunder_fn.errors import ThunderError
from thunder_fn.extras import extra
from thunder_fn.ir.trace import static_shape, type_of_value
from thunder_fn.portable.errors import refused, unreadable
from thunder_fn.portable.values import DTYPES, read_device
from thunder_fn.version import __version__

FORMAT = "thunder_fn program"
VERSION = 1
MANIFEST, PROGRAM, CONSTANTS = "manifest.json", "program.json", "constants.safetensors"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_file(path: str | os.PathLike[str], data: Any, tensors: list[torch.Tensor]) -> None:
    """Write a program. The file is there as a whole or not at all, and equal programs make equal
    files.
    """
    stored, described = _stored(tensors)
    members = {PROGRAM: _json({**data, "tensors": described})}
    if stored:
        members[CONSTANTS] = extra("safetensors.torch", "save: a program with constants").save(
            stored
        )
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "thunder_fn": __version__,
        "torch": str(torch.__version__),
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in members.items()},
    }
    target = Path(path)
    if not target.parent.is_dir():
        what = f"save: there is no folder {str(target.parent)!r} for {target.name!r}"
        raise FileNotFoundError(errno.ENOENT, what)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        try:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, content in {MANIFEST: _json(manifest), **members}.items():
                    archive.writestr(zipfile.ZipInfo(name, _EPOCH), content)
            file.flush()
            Path(file.name).chmod(0o666 & ~_umask())
            Path(file.name).replace(target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The tables of a file, and its tensors.

    Raises:
        PortableError: the file is cut or changed, of another version, or none of ours.
        FileNotFoundError: there is no such file.
    """
    content = Path(path).read_bytes()
    try:
        members = _members(content)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, RuntimeError) as error:
        if isinstance(error, ThunderError):
            raise
        raise unreadable(f"{os.fspath(path)} is cut or no program: {error}") from None
    data = json.loads(members[PROGRAM])
    given = members.get(CONSTANTS)
    return data, _read_tensors(data["tensors"], given)


def _members(content: bytes) -> dict[str, bytes]:
    """The members of an archive whose manifest fits them."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        names = sorted(entry.filename for entry in entries)
        whole = [[MANIFEST, PROGRAM], [CONSTANTS, MANIFEST, PROGRAM]]
        if names not in whole or any(entry.compress_type for entry in entries):
            raise unreadable(
                f"the archive has the members {', '.join(names)}, and is none of `tfn.save`'s"
            )
        members = {entry.filename: archive.read(entry) for entry in entries}
    manifest = json.loads(members.pop(MANIFEST))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise unreadable("the file is not a program of thunder_fn")
    if manifest.get("version") != VERSION:
        raise unreadable(
            f"the file has version {manifest.get('version')!r} of the format, and this thunder_fn"
            f" reads version {VERSION}",
            f"It was written by thunder_fn {manifest.get('thunder_fn')}: save it again with this"
            " one, or load it there.",
        )
    found = {name: hashlib.sha256(item).hexdigest() for name, item in members.items()}
    if manifest.get("sha256") != found:
        raise unreadable("the file is not as it was written: its digests differ")
    return members


# ---- tensors ----


def _stored(tensors: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The tensors as safetensors takes them, and what else is known of each."""
    stored: dict[str, torch.Tensor] = {}
    described: list[Any] = []
    for place, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or type(tensor) not in _CLASSES:
            raise refused(f"a constant is a {type(tensor).__name__} of layout {tensor.layout}")
        plain = tensor.detach().resolve_conj().resolve_neg().cpu()
        order = sorted(range(plain.dim()), key=lambda dim: -plain.stride(dim))
        stored[str(place)] = _bytes(plain.permute(order)).clone()
        described.append(
            {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "device": str(tensor.device),
                "order": order,
                "requires_grad": tensor.requires_grad,
                "parameter": isinstance(tensor, torch.nn.Parameter),
            }
        )
    return stored, described


_CLASSES = (torch.Tensor, torch.nn.Parameter)
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its bytes where not every safetensors has its dtype."""
    dense = tensor.contiguous()
    return dense if tensor.dtype in _PLAIN else dense.reshape(-1).view(torch.uint8)


def _read_tensors(described: Any, content: bytes | None) -> list[torch.Tensor]:
    if not described:
        return []
    if content is None:
        raise unreadable("the constants are missing")
    found = extra("safetensors.torch", "load: a program with constants").load(content)
    return [_tensor(found[str(place)], known) for place, known in enumerate(described)]


def _tensor(stored: torch.Tensor, known: dict[str, Any]) -> torch.Tensor:
    dtype, shape, order = DTYPES[known["dtype"]], known["shape"], known["order"]
    if sorted(order) != list(range(len(shape))):
        raise unreadable(f"{order} is no order of {len(shape)} dims")
    if dtype not in _PLAIN and stored.numel() != 0:
        stored = stored.view(dtype)
    sizes = [shape[dim] for dim in order]
    dense = stored.reshape(sizes) if stored.dtype == dtype else torch.empty(sizes, dtype=dtype)
    tensor = dense.permute([order.index(dim) for dim in range(len(shape))])
    if static_shape(type_of_value(tensor)) != tuple(shape):  # type: ignore[arg-type]
        raise unreadable("a constant has another shape than the file says")
    try:
        tensor = tensor.to(read_device(known["device"]))
    except (RuntimeError, AssertionError) as error:
        raise unreadable(
            f"a constant is on {known['device']}, which is not here: {error}"
        ) from None
    if known["parameter"]:
        return torch.nn.Parameter(tensor, requires_grad=known["requires_grad"])
    return tensor.requires_grad_(known["requires_grad"])
