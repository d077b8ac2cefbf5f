"""Settings of PyTorch's process: how each is asked for and set, and which functions set it."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._tensor_str import PRINT_OPTS


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: the question for its value, the function that sets it, and where this lies."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]
    places: tuple[tuple[Any, str], ...] = ()


STATE = (
    "_check_sparse_tensor_invariants",
    "_get_blas_default_backend",
    "_get_blas_preferred_backend",
    "_get_cpu_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_tf32",
    "_get_cudnn_allow_tf32",
    "_get_cudnn_benchmark",
    "_get_cudnn_depthwise_kernel",
    "_get_cudnn_deterministic",
    "_get_cudnn_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_flash_sdp_enabled",
    "_get_float32_matmul_precision",
    "_get_fp32_precision_getter",
    "_get_linalg_preferred_backend",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_math_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_miopen_immediate",
    "_get_mkldnn_deterministic",
    "_get_mkldnn_enabled",
    "_get_nnpack_enabled",
    "_get_onednn_allow_tf32",
    "_get_overrideable_sdp_enabled",
    "_get_qengine",
    "_get_rocm_fa_preferred_backend",
    "_get_sdp_priority_order",
    "_get_sm_carveout_experimental",
    "_get_warnAlways",
    "_is_xnnpack_enabled",
)
"""Functions of `torch._C` by which `torch.backends` and others ask for flags of the process."""

_SETTERS = {
    "_check_sparse_tensor_invariants": "_set_check_sparse_tensor_invariants",
    "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
    "_get_flash_sdp_enabled": "_set_sdp_use_flash",
    "_get_math_sdp_enabled": "_set_sdp_use_math",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_overrideable_sdp_enabled": "_set_sdp_use_overrideable",
}
"""Names of setters that do not follow from those of the questions."""
_PRECISIONS = tuple(
    (backend, op)
    for backend, ops in (
        ("generic", ("all",)),
        ("cuda", ("all", "conv", "rnn", "matmul")),
        ("mkldnn", ("all",)),
    )
    for op in ops
)
UNKNOWN = ((torch, "set_flush_denormal"),)
"""Functions that set what no function tells."""


def _asked(get: Callable[[], Any]) -> Callable[[], Any]:
    """The question, which PyTorch refuses where somebody has set a precision in its older and its
    newer way.
    """

    def ask() -> Any:
        try:
            return get()
        except RuntimeError:
            return None

    return ask


def _spread(put: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda value: put(*value) if isinstance(value, tuple) else put(value)


def _of_c(getter: str) -> Setting | None:
    name, of = _SETTERS.get(getter, getter.replace("_get_", "_set_", 1)), torch._C
    if getter == "_get_fp32_precision_getter" or not (hasattr(of, getter) and hasattr(of, name)):
        return None
    if name == getter:
        return None
    return Setting(_asked(getattr(of, getter)), _spread(getattr(of, name)), ((of, name),))


def _printing() -> tuple[Any, ...]:
    return tuple(vars(PRINT_OPTS).items())


def _others() -> Mapping[str, Setting]:
    mha, later, of = torch.backends.mha, torch.__future__, torch._C
    found = {
        f"fp32_precision of {backend} {op}": Setting(
            functools.partial(of._get_fp32_precision_getter, backend, op),
            functools.partial(of._set_fp32_precision_setter, backend, op),
            ((of, "_set_fp32_precision_setter"),),
        )
        for backend, op in _PRECISIONS
        if hasattr(of, "_get_fp32_precision_getter")
    }
    for name in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
        get, put = getattr(later, f"get_{name}"), getattr(later, f"set_{name}")
        found[f"get_{name}"] = Setting(get, put, ((later, f"set_{name}"),))
    anomaly = lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
    return found | {
        "get_num_threads": Setting(
            torch.get_num_threads, torch.set_num_threads, ((torch, "set_num_threads"),)
        ),
        "anomaly mode": Setting(
            anomaly, _spread(torch.set_anomaly_enabled), ((torch, "set_anomaly_enabled"),)
        ),
        "is_multithreading_enabled": Setting(
            of._is_multithreading_enabled, of._set_multithreading_enabled
        ),
        "get_fastpath_enabled": Setting(
            mha.get_fastpath_enabled, mha.set_fastpath_enabled, ((mha, "set_fastpath_enabled"),)
        ),
        "print options": Setting(
            _printing,
            lambda value: vars(PRINT_OPTS).update(value),
            ((torch, "set_printoptions"),),
        ),
        "autocast dtypes": Setting(
            lambda: tuple(map(torch.get_autocast_dtype, ("cpu", "cuda"))),
            lambda value: [*map(torch.set_autocast_dtype, ("cpu", "cuda"), value)],
        ),
    }


SETTINGS: Mapping[str, Setting] = {
    **{name: found for name in STATE if (found := _of_c(name)) is not None},
    **_others(),
}
"""The settings by the names of the questions."""


def settings() -> Mapping[str, Any]:
    """The values of all settings, by name."""
    return {
        name.removeprefix("_get_").removeprefix("get_").removeprefix("_"): one.get()
        for name, one in SETTINGS.items()
    }


def settings_kept() -> Callable[[], None]:
    """Make a function that gives all settings the values that they have now."""
    before = {name: one.get() for name, one in SETTINGS.items()}

    def put_back() -> None:
        for name, value in before.items():
            if value is not None and SETTINGS[name].get() != value:
                SETTINGS[name].put(value)

    return put_back


def setters() -> Mapping[tuple[int, str], tuple[Any, tuple[str, ...]]]:
    """The functions that set something, each by its owner and name, with the names of settings."""
    found = dict[tuple[int, str], tuple[Any, tuple[str, ...]]]()
    for name, one in SETTINGS.items():
        for owner, setter in one.places:
            _, names = found.get((id(owner), setter), (owner, ()))
            found[id(owner), setter] = owner, (*names, name)
    return found
