"""Small recipes that are added to others: ``compile(model, ["auto", "quantize_int8"])``. A plugin
that cannot apply raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thunder_fn.errors import RecipeError, kind_of
from thunder_fn.executors import Executor
from thunder_fn.executors.base import Numerics
from thunder_fn.executors.cudagraphs import EXECUTOR as CUDAGRAPHS, CudaGraphs
from thunder_fn.jitted.transforms import Transform
from thunder_fn.parameters import Group, ddp, fsdp, quantize
from thunder_fn.recipes.recipe import Recipe
from thunder_fn.recipes.registry import register


def parameters_of(recipe: Recipe, model: Any) -> list[torch.nn.Parameter]:
    """The parameters of a module.

    Raises:
        RecipeError: it is no module.
    """
    if not isinstance(model, torch.nn.Module):
        rewrite = recipe.name.partition("_")[0]
        what = f"{recipe.name}: {kind_of(model)} has no parameters of its own"
        raise RecipeError(
            what, fix=f"Give `compile` the module, or call `{rewrite}` on a function of parameters."
        )
    return list(model.parameters())


# ---- fewer bits ----


class Quantize(Recipe):
    """Weights as numbers of few bits, decoded where they are used. See `quantize`.

    Args:
        filter: which weights, as `quantize` takes it. By default all floating parameters of two or
            more dims.
    """

    scheme: ClassVar[str] = ""

    def __init__(self, filter: Any = None) -> None:
        self.filter = filter

    def validate(self, model: Any) -> None:
        """Check that there is something to quantise."""
        self.matrices_of(model)

    def matrices_of(self, model: Any) -> list[torch.nn.Parameter]:
        """The parameters that may be quantised.

        Raises:
            RecipeError: there is nothing.
        """
        parameters = parameters_of(self, model)
        found = [param for param in parameters if param.is_floating_point() and param.dim() >= 2]
        if not found:
            raise RecipeError(
                f"{self.name}: {kind_of(model)} has no floating parameter of two or more dims"
            )
        return found

    def setup_transforms(self) -> Sequence[Transform]:
        """The transform of the model that gives it other parameters."""
        change = functools.partial(quantize, scheme=self.scheme, filter=self.filter)
        others = tuple(f"quantize_{name}" for name in SCHEMES if name != self.scheme)
        return (
            Transform(
                change,
                name=f"quantize_{self.scheme}",
                after=("caches_as_arguments", "lora"),
                before=("fsdp", "ddp"),
                conflicts=others,
                idempotent=True,
                numerics="precision-changing",
                on="model",
            ),
        )

    def setup_executors(self) -> Sequence[str]:
        """Kernels for layers on codes."""
        return ("codes", "quantized")


SCHEMES = ("int8", "nf4", "fp8_dynamic")


@register
class QuantizeInt8(Quantize):
    """Eight bits a weight, one scale a row."""

    name, scheme = "quantize_int8", "int8"


@register
class QuantizeNF4(Quantize):
    """Four bits a weight, in blocks of 64 (QLoRA)."""

    name, scheme = "quantize_nf4", "nf4"


@register
class Fp8(Quantize):
    """Weights and activations as floats of eight bits, multiplied as such by the hardware."""

    name, scheme = "fp8", "fp8_dynamic"

    def validate(self, model: Any) -> None:
        """Check that the hardware multiplies e4m3 numbers with a scale for each row, and that
        PyTorch's kernel takes a weight.
        """
        fix = 'Quantise without: `quantize(model, "fp8")` stores eight bits on any machine.'
        matrices = self.matrices_of(model)
        device = matrices[0].device
        if device.type != "cuda":
            raise RecipeError(
                f"fp8: the model is on a {device.type}, which has no fp8 arithmetic", fix=fix
            )
        capability = torch.cuda.get_device_capability(device)
        if capability < (9, 0):
            has = f"{device} has compute capability {capability[0]}.{capability[1]}"
            raise RecipeError(
                f"fp8: {has}, and fp8 arithmetic with a scale for each row takes 9.0", fix=fix
            )
        if not any(
            w.dtype == torch.bfloat16 and w.dim() == 2 and all(size % 16 == 0 for size in w.shape)
            for w in matrices
        ):
            what = (
                "fp8: no matrix of the model is in bfloat16 with both sizes multiples of 16, as"
                " PyTorch's kernel takes it"
            )
            raise RecipeError(what, fix="Use `model.to(torch.bfloat16)`, or leave fp8 out.")


# ---- many ranks ----


class Distributed(Recipe):
    """A model over many ranks, each of which calls it on its own batch.

    Args:
        mesh: a DeviceMesh of one dim. By default all ranks of the present process group, on the
            model's device.
        options: of `fsdp` or `ddp`.
    """

    rewrite: ClassVar[Callable[..., Any]]
    rival: ClassVar[str] = ""

    def __init__(self, mesh: DeviceMesh | Group | None = None, **options: Any) -> None:
        self.mesh, self.options = mesh, options

    def validate(self, model: Any) -> None:
        """Check that there are parameters, and ranks."""
        if not parameters_of(self, model):
            raise RecipeError(f"{self.name}: {kind_of(model)} has no parameters")
        if self.mesh is None and not (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        ):
            fix = (
                "Start under torchrun and call `torch.distributed.init_process_group`, or pass"
                f' `get("{self.name}")(mesh)`.'
            )
            raise RecipeError(
                f"{self.name}: there is no process group, and no mesh was given", fix=fix
            )

    def spread(self, model: torch.nn.Module) -> Any:
        """The model over the mesh."""
        device = next(model.parameters()).device.type
        mesh = self.mesh or init_device_mesh(device, (torch.distributed.get_world_size(),))
        return type(self).rewrite(model, mesh, **self.options)

    def setup_transforms(self) -> Sequence[Transform]:
        """The transform of the model that gives it other parameters. Sums over ranks come in
        another order.
        """
        numerics: Numerics = "reassociating"
        spread = Transform(
            self.spread,
            name=self.name,
            conflicts=(self.rival,),
            idempotent=True,
            numerics=numerics,
            on="model",
        )
        return (spread,)


@register
class Fsdp(Distributed):
    """Shard each parameter by rows over the ranks. See `fsdp`."""

    name, rival, rewrite = "fsdp", "ddp", staticmethod(fsdp)


@register
class Ddp(Distributed):
    """Keep all parameters on each rank, and reduce the gradients. See `ddp`."""

    name, rival, rewrite = "ddp", "fsdp", staticmethod(ddp)


# ---- fewer launches ----


@register
class ReduceOverhead(Recipe):
    """Run whole programs as CUDA graphs.

    Args:
        executor: what records them.
    """

    name = "reduce_overhead"

    def __init__(self, executor: CudaGraphs = CUDAGRAPHS) -> None:
        self.executor = executor

    def validate(self, model: Any) -> None:
        """Check that programs can be recorded where the model is."""
        fix = "Leave reduce_overhead out on this machine."
        if (missing := self.executor.recording.missing()) is not None:
            raise RecipeError(f"reduce_overhead: {missing}", fix=fix)
        tensors = (
            [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else []
        )
        other = next(
            (tensor for tensor in tensors if not self.executor.recording.takes(tensor)), None
        )
        if other is not None:
            what = (
                f"reduce_overhead: the model is on a {other.device.type}, where programs cannot be"
                " recorded"
            )
            raise RecipeError(what, fix="Move it to the device first.")

    def setup_executors(self) -> Sequence[Executor]:
        """The executor that records programs."""
        return (self.executor,)
