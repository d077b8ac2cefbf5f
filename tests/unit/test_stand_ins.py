"""A stand-in takes what its original takes: by position, and by PyTorch's own names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

import thunder_fn as tfn
from thunder_fn import torch_internals as internals
from thunder_fn.capture.numbers.scalars import FORMULAS, WITHOUT_VALUES
from thunder_fn.capture.replaced import lookasides
from thunder_fn.capture.scopes import INSTEAD, METADATA, READ

X = torch.arange(1.0, 13.0).reshape(3, 4)
V = torch.tensor([0.5, 1.5, 2.5])
LABELS = torch.tensor([0, 2, 1])
SAME = {"self": X, "tensor1": X + 1, "tensor2": X + 2}
RNN = {
    "input": X.reshape(3, 1, 4),
    "hx": torch.ones(1, 1, 2),
    "params": [torch.ones(2, 4) / 9, torch.ones(2, 2) / 9],
    "has_biases": False,
    "num_layers": 1,
    "dropout": 0.0,
    "train": False,
    "bidirectional": False,
    "batch_first": False,
}
LSTM = {**RNN, "hx": [torch.ones(1, 1, 2)] * 2, "params": [torch.ones(8, 4) / 9, torch.ones(8, 2) / 9]}
GRU = {**RNN, "params": [torch.ones(6, 4) / 9, torch.ones(6, 2) / 9]}
FUSED = {"self": [X], "grads": [X + 1]}
SAMPLES: dict[str, dict[str, Any]] = {
    "dropout": {"input": X, "p": 0.0, "train": True},
    "batch_norm": {
        "input": X.T,
        "weight": V,
        "bias": V,
        "running_mean": V,
        "running_var": V,
        "training": False,
        "momentum": 0.1,
        "eps": 1e-5,
        "cudnn_enabled": True,
    },
    "one_hot": {"self": LABELS, "num_classes": 5},
    "t_": {"self": X},
    "transpose_": {"self": X, "dim0": 0, "dim1": -1},
    "swapaxes_": {"self": X, "axis0": 0, "axis1": -1},
    "swapdims_": {"self": X, "dim0": 0, "dim1": -1},
    "squeeze_": {"self": X[:1], "dim": 0},
    "squeeze": {"self": X[:1], "dim": 0},
    "unbind": {"self": X, "dim": 1},
    "unsqueeze_": {"self": X, "dim": 1},
    "as_strided_": {"self": X, "size": (2, 2), "stride": (3, 1), "storage_offset": 1},
    "resize_": {"self": X, "size": (2, 3)},
    "resize_as_": {"self": X, "the_template": X[:2]},
    "unsafe_chunk": {"self": X, "chunks": 2, "dim": 1},
    "unsafe_split": {"self": X, "split_size": 3, "dim": 1},
    "unsafe_split_with_sizes": {"self": X, "split_sizes": (3, 1), "dim": 1},
    "as_strided": {"self": X, "size": (2, 2), "stride": (3, 1), "storage_offset": 1},
    "as_strided_copy": {"self": X, "size": (2, 2), "stride": (3, 1), "storage_offset": 1},
    "as_strided_scatter": {"self": X, "src": X[:2, :2], "size": (2, 2), "stride": (3, 1), "storage_offset": 1},
    "ctc_loss": {
        "log_probs": X.reshape(3, 1, 4).log_softmax(-1),
        "targets": torch.tensor([[1, 2]]),
        "input_lengths": (3,),
        "target_lengths": (2,),
        "blank": 0,
        "reduction": 2,
        "zero_infinity": True,
    },
    "_pack_padded_sequence": {"input": X.reshape(3, 1, 4), "lengths": torch.tensor([3]), "batch_first": False},
    "_pad_packed_sequence": {
        "data": X,
        "batch_sizes": torch.tensor([2, 1]),
        "batch_first": True,
        "padding_value": 0.0,
        "total_length": 2,
    },
    "lstm": LSTM,
    "gru": GRU,
    "rnn_tanh": RNN,
    "rnn_relu": RNN,
    "linalg_pinv": {"self": X, "rcond": 1e-3, "hermitian": False},
    "affine_grid_generator": {"theta": X[:2, :3].reshape(1, 2, 3), "size": (1, 1, 2, 2), "align_corners": False},
    "bilinear": {"input1": X, "input2": X, "weight": torch.ones(2, 4, 4), "bias": torch.ones(2)},
    "detach_": {"self": X},
    "tensor": {"data": [1.0, 2.0]},
    "as_tensor": {"data": [1.0, 2.0]},
    "narrow": {"self": X, "dim": 1, "start": 1, "length": 2},
    "combinations": {"self": V, "r": 2, "with_replacement": True},
    "cov": {"self": X},
    "corrcoef": {"self": X},
    "addcdiv": SAME,
    "addcmul": SAME,
    "add": {"self": X, "other": X},
    "sub": {"self": X, "other": X},
    "is_inference": {"self": X},
    "is_floating_point": {"self": X},
    "is_complex": {"self": X},
    "is_conj": {"self": X},
    "numel": {"self": X},
}
"""Arguments by the names of the schema."""
NOT_CALLED = {"requires_grad_", "_is_all_true", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
"""Functions whose stand-ins hand on what they are given, or that only PyTorch itself calls."""


def functions() -> Iterator[tuple[str, Any, str]]:
    """The functions with a stand-in that have a schema: a title, the function and its name in ATen."""
    named = [getattr(torch, name) for name in (*WITHOUT_VALUES, *FORMULAS)]
    for function in dict.fromkeys((*INSTEAD, *named, *METADATA, *READ)):
        is_op = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        name = function._schema.name.split("::")[1] if hasattr(function, "_schema") else function.__name__
        name = name.split("::")[-1]
        if hasattr(torch.ops.aten, name) and (is_op or any(function is one for _, one in internals.c_functions(name))):
            is_method = inspect.ismethoddescriptor(function)
            if name not in NOT_CALLED and not (is_method and function in METADATA | READ.keys()):
                yield resolve_name(function) or name, function, name


CASES = sorted(functions(), key=lambda case: case[0])


def arguments(function: Any, name: str) -> tuple[list[str], list[Any]]:
    """The names and values of the arguments that a function takes by position."""
    names = list(SAMPLES[name])
    if isinstance(function, torch._ops.OpOverload):
        known = [one.name for one in function._schema.arguments if not one.kwarg_only]
        names = [one for one in names if one in known]
    values = [SAMPLES[name][one] for one in names]
    if function is torch.ops.aten.squeeze_.dims:
        values = [X[:1], (0,)]
    is_op = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    return ["input" if one == "self" and not is_op else one for one in names], values


@pytest.mark.parametrize(("function", "name"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_arguments_are_taken_by_position_and_by_pytorchs_names(function: Any, name: str) -> None:
    names, values = arguments(function, name)
    leaves, spec = pytree.tree_flatten(values)
    for count in range(int(inspect.ismethoddescriptor(function)), len(names) + 1):

        def f(tensors: list[Tensor], count: int = count) -> Any:
            given = iter(tensors)
            filled = [next(given).clone() if isinstance(one, Tensor) else one for one in leaves]
            used = pytree.tree_unflatten(filled, spec)
            return function(*used[:count], **dict(zip(names[count:], used[count:], strict=True)))

        tensors = [one for one in leaves if isinstance(one, Tensor)]
        torch.testing.assert_close(tfn.jit(f)(tensors), f(tensors))


@pytest.mark.parametrize("name", sorted(lookasides._always))
def test_higher_order_functions_take_pytorchs_names(name: str) -> None:
    importlib.import_module(internals.HIGHER_ORDER[name][0])
    original, replacement = internals.higher_order_function(name), lookasides._always[name]
    parameters = inspect.signature(original).parameters.values()
    kinds = [one.kind for one in parameters]
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    by_name = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    is_method = names[:1] in (["self"], ["cls"])
    least = max(is_method, kinds.count(inspect.Parameter.POSITIONAL_ONLY))
    bind = inspect.signature(replacement).bind
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # others follow
        least, bind = len(names), inspect.signature(replacement).bind_partial
    for count in range(least, len(names) + 1):
        bind(*names[:count], **dict.fromkeys((*names[count:], *by_name)))


@pytest.mark.parametrize("name", FORMULAS)
def test_a_tensor_for_a_number_is_given_by_name(name: str) -> None:
    number = "alpha" if name in ("add", "sub") else "value"
    tensors = [one for key, one in SAMPLES[name].items() if key != "self"]
    for function in (getattr(torch, name), getattr(Tensor, f"{name}_")):
        f = lambda x, t: function(x.clone(), *tensors, **{number: t.item()})
        traced = tfn.jit(lambda x, t: function(x.clone(), *tensors, **{number: t}))
        torch.testing.assert_close(traced(X, torch.tensor(2.0)), f(X, torch.tensor(2.0)))
