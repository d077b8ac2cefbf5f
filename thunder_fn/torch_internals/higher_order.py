"""PyTorch's own higher-order functions, modules and autograd functions."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch.nn.utils import parametrize

IS_ALL_TRUE = torch._is_all_true
"""The op by which `torch.distributions` validates its arguments."""

PACK_PADDED_SEQUENCE = torch._pack_padded_sequence
PAD_PACKED_SEQUENCE = torch._pad_packed_sequence
"""The op that `torch.nn.utils.rnn` calls."""


def demand(holds: Any, text: str) -> None:
    """Say what must hold of a size or number; the program checks what is found in data.

    Raises:
        RuntimeError: it is known not to hold.
    """
    torch._check(holds, lambda: text)


HIGHER_ORDER = {
    "cond": ("torch._higher_order_ops.cond", "cond"),
    "while_loop": ("torch._higher_order_ops.while_loop", "while_loop"),
    "scan": ("torch._higher_order_ops.scan", "scan"),
    "associative_scan": ("torch._higher_order_ops.associative_scan", "associative_scan"),
    "map": ("torch._higher_order_ops.map", "map"),
    "cond operator": ("torch._higher_order_ops.cond", "CondOp.__call__"),
    "while_loop operator": ("torch._higher_order_ops.while_loop", "WhileLoopOp.__call__"),
    "scan operator": ("torch._higher_order_ops.scan", "ScanOp.__call__"),
    "map operator": ("torch._higher_order_ops.map", "MapImpl.__call__"),
    "strict_mode operator": ("torch._higher_order_ops.strict_mode", "StrictMode.__call__"),
    "checkpoint": ("torch.utils.checkpoint", "checkpoint"),
    **{
        f"random {name}": ("torch.random", name)
        for name in ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed")
    },
    "autograd function": ("torch.autograd.function", "Function.apply.__func__"),
    "autograd function operator": (
        "torch._functorch.autograd_function",
        "AutogradFunctionApply.__call__",
    ),
    "scaler step": ("torch.amp.grad_scaler", "GradScaler._maybe_opt_step"),
    "averaged model": ("torch.optim.swa_utils", "AveragedModel.update_parameters"),
    "zero_grad": ("torch.optim.optimizer", "Optimizer.zero_grad"),
    "adafactor": ("torch.optim._adafactor", "_single_tensor_adafactor"),
    "adafactor foreach": ("torch.optim._adafactor", "_multi_tensor_adafactor"),
    "optimizer scalar dtype": ("torch.optim.optimizer", "_get_scalar_dtype"),
    "backward engine": ("torch.autograd.graph", "_engine_run_backward"),
    "rows of a backward": ("torch._vmap_internals", "_vmap"),
    "columns of forward mode": ("torch.autograd.functional", "_jacfwd"),
    "saved tensors hooks": ("torch.autograd.graph", "saved_tensors_hooks.__enter__"),
    "node hook": ("torch.autograd.function", "_HookMixin._register_hook"),
    "linearize": ("torch._functorch.eager_transforms", "linearize"),
    "autocast enter": ("torch.amp.autocast_mode", "autocast.__enter__"),
    "autocast exit": ("torch.amp.autocast_mode", "autocast.__exit__"),
    "flex_attention device": ("torch.nn.attention.flex_attention", "_validate_device"),
    "flex_attention warning": ("torch.nn.attention.flex_attention", "_warn_once"),
    "flex_attention index": (
        "torch._dynamo._trace_wrapped_higher_order_op",
        "ModIndex.apply.__func__",
    ),
    "batch norm": ("torch.nn.modules.batchnorm", "_BatchNorm.forward"),
    "positive definite": ("torch.distributions.constraints", "_PositiveDefinite.check"),
    "positive semidefinite": ("torch.distributions.constraints", "_PositiveSemidefinite.check"),
    "causal mask": ("torch.nn.modules.transformer", "_detect_is_causal_mask"),
    "transformer encoder": ("torch.nn.modules.transformer", "TransformerEncoder.forward"),
    "recurrent arguments": ("torch.nn.modules.rnn", "RNNBase.check_forward_args"),
    "flex_attention": ("torch._higher_order_ops.flex_attention", "FlexAttentionHOP.__call__"),
}
"""The functions and their modules. A user may have imported them from elsewhere, but they are
these objects.
"""


def higher_order_function(name: str) -> types.FunctionType | None:
    """One of these functions; None while nobody has imported its module, or where this PyTorch
    has none.
    """
    module, path = HIGHER_ORDER[name]
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, types.FunctionType) else None


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Tells when a module has been imported. First in `sys.meta_path`, it leaves finding to the
    others.
    """

    def __init__(self, modules: dict[str, list[str]], told: Callable[[str], object]) -> None:
        self.modules, self.told = modules, told

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        names = self.modules.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if names is not None else None
        if names is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            for name in names:
                self.told(name)

        spec.loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def on_import(names: Iterable[str], told: Callable[[str], object]) -> Generator[None]:
    """Tell of the import, inside, of a module with one of these higher-order functions."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(HIGHER_ORDER[name][0], []).append(name)
    watcher = _ImportWatcher(modules, told)
    sys.meta_path.insert(0, watcher)
    try:
        yield
    finally:
        sys.meta_path.remove(watcher)


FUNCTION_APPLY: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
"""`torch.autograd.Function.apply`, as a function of the class and the arguments."""

OF_AUTOGRAD = (
    "torch._",
    *(f"torch.{name}." for name in ("autograd", "cuda", "distributed", "nested", "utils")),
)
"""Prefixes of modules whose autograd functions are machinery: PyTorch records what they do."""


def forward_pre_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """The hooks that run before the module's forward."""
    return list(module._forward_pre_hooks.values())


def is_caching() -> bool:
    """Test whether `parametrize.cached` is active: what parametrizations compute is kept until
    its end.
    """
    return parametrize._cache_enabled > 0


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Test whether autograd would run a hook of this module, or of all modules, in its backward."""
    everywhere = torch.nn.modules.module
    of_all = everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks
    return bool(of_all or module._backward_hooks or module._backward_pre_hooks)


def has_setup_context(cls: Any) -> bool:
    """Test whether an autograd function's `forward` takes no context."""
    return torch.autograd.function._is_setup_context_defined(cls.setup_context)


def vmap_info(size: int, randomness: str) -> Any:
    """The info that the `vmap` staticmethod of an autograd function gets."""
    from torch._functorch.autograd_function import VmapInfo

    return VmapInfo(size, randomness)


def math_attention(*args: Any) -> Any:
    """PyTorch's eager flex_attention: attention as its definition has it, the user's functions
    batched by vmap.
    """
    from torch._higher_order_ops.flex_attention import math_attention

    return math_attention(*args)


def pytorchs(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call PyTorch's own function of this name: `cond`, `scan`, `while_loop`."""
    module, function = HIGHER_ORDER[name]
    return getattr(importlib.import_module(module), function)(*args, **kwargs)


def cond_operator(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    """Call the operator behind `torch.cond`, which takes closed functions without Dynamo."""
    operator = importlib.import_module("torch._higher_order_ops.cond").cond_op
    return operator(pred, true_fn, false_fn, operands)


def while_loop_operator(cond_fn: Any, body_fn: Any, consts: Any, carry: Any) -> Any:
    """Call the operator behind `torch.while_loop`, as `cond_operator` does. The functions take
    the consts first.
    """
    operator = importlib.import_module("torch._higher_order_ops.while_loop").while_loop_op

    def holds(*args: Any) -> Any:
        return cond_fn(*args[len(carry) :], *args[: len(carry)])[0]

    def run(*args: Any) -> tuple[Any, ...]:
        new = body_fn(*args[len(carry) :], *args[: len(carry)])
        return tuple(x.clone() if any(x is arg for arg in args) else x for x in new)

    return operator(holds, run, tuple(carry), tuple(consts))


def is_make_fx() -> bool:
    """Test whether PyTorch's `make_fx` records what runs: it has no values to decide on."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_kept_for_later() -> bool:
    """Test whether `make_fx` or `torch.export` records what runs. Before export records a program,
    it runs it on tensors without values.
    """
    return is_make_fx() or torch.compiler.is_exporting()


GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = tuple(
    value
    for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
)
"""The hooks that PyTorch runs for every module."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_FLAGS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first step makes before it updates anything, for gradients of the
    parameters' types.
    """
    initialise: Any = optimizer._init_group
    lists = len(inspect.signature(initialise).parameters) - 1
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach()
        initialise(group, *([] for _ in range(lists)))
