"""The state of an optimizer for parameters that ranks have shares of, as DTensors: saved and loaded
beside the parameters.

The form is PyTorch's (`torch.distributed.checkpoint.state_dict`): for each parameter by name what
the optimizer keeps, and the options of each group. State in the shape of a parameter is cut like
the parameter; numbers, such as the count of steps, are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thunder_fn.distributed.state import sharded_state, split_of, whole_tensor
from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.rewriting.prepared import Prepared
from thunder_fn.ir.trace import static_shape


def sharded_optimizer_state(parts: Prepared, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer of the parts, DTensors in its memory. An optimizer that has made no
    step begins.

    Raises:
        RewriteError: the parts are not sharded; the optimizer has other parameters, or keeps what
            is no share of anything.
    """
    names = _names_of(parts, optimizer)
    _begin(optimizer)
    state = {names[id(param)]: dict(values) for param, values in optimizer.state.items()}
    for key in sorted({key for values in state.values() for key in values}):
        kept = {
            name: values[key]
            for name, values in state.items()
            if isinstance(values.get(key), torch.Tensor)
        }
        alike = {name: value for name, value in kept.items() if value.shape == parts[name].shape}
        other = next(
            (name for name, value in kept.items() if name not in alike and value.dim()), None
        )
        if other is not None:
            raise _refused(
                f"the {key!r} that {type(optimizer).__name__} keeps of {other!r} is no share of"
                " anything",
                "Use an optimizer that keeps tensors of the shapes of its parameters, such as"
                " AdamW.",
            )
        lying = sharded_state(parts.layout, {**parts, **alike})
        for name in alike:
            state[name][key] = lying[name]
    groups = [
        {**group, "params": [names[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    parts: Prepared, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]
) -> None:
    """Take over a state that `sharded_optimizer_state` gave, of this number of ranks or another.
    All ranks call it.

    Raises:
        RewriteError: it is of other parameters or of another optimizer.
    """
    own, split = sharded_optimizer_state(parts, optimizer), split_of(parts.layout)
    mine, theirs = own["state"], given["state"]
    if _keys(mine) != _keys(theirs) or len(own["param_groups"]) != len(given["param_groups"]):
        odd = (
            ", ".join(sorted(".".join(key) for key in _keys(mine) ^ _keys(theirs))[:3])
            or "the groups"
        )
        raise _refused(
            f"the state is of another optimizer or other parameters: {odd}",
            "Make the optimizer as it was.",
        )
    params = {name: param for name, param in parts.items() if param in optimizer.state}
    types = dict(zip(split.names, split.types, strict=True))
    with torch.no_grad():
        for name, key in sorted(_keys(mine)):
            value, held = theirs[name][key], optimizer.state[params[name]]
            if not hasattr(mine[name][key], "to_local"):
                held[key] = value.clone() if isinstance(value, torch.Tensor) else value
            elif value.to_local().data_ptr() != held[key].data_ptr():  # `dcp.load` has read into it
                whole = whole_tensor(value).reshape(static_shape(types[name])).to(types[name].dtype)
                held[key].copy_(split.only((name,)).prepare({name: whole})[name])
    for group, options in zip(optimizer.param_groups, given["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})


def _names_of(parts: Prepared, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    names = {id(part): name for name, part in parts.items()}
    if any(id(param) not in names for group in optimizer.param_groups for param in group["params"]):
        raise _refused(
            "the optimizer has parameters that are not the module's",
            "Make it of `module.parameters()`.",
        )
    return names


def _keys(state: Mapping[str, Mapping[str, Any]]) -> set[tuple[str, str]]:
    return {(name, key) for name, values in state.items() for key in values}


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that an optimizer has before its first step, by a step in which nothing
    moves.
    """
    if optimizer.state:
        return
    params = [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    ]
    gradients = [param.grad for param in params]
    rates = [group["lr"] for group in optimizer.param_groups]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0 * group["lr"]
    optimizer.step()
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for values in optimizer.state.values():
        if "step" in values:
            values["step"] = 0 * values["step"]


def _refused(what: str, fix: str) -> RewriteError:
    return RewriteError(f"optimizer state: {what}", fix=fix)
