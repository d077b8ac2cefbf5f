"""Rewritten modules: the parameters that a rewrite makes, in a module that is called as the
original is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import current
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.distributed.optimizer_state import load_optimizer_state, sharded_optimizer_state
from thunder_fn.distributed.state import sharded_state, split_of, whole_tensor
from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.ddp import apart
from thunder_fn.interpreters.rewriting.prepared import (
    Layout,
    Prepared,
    for_pickle,
    from_pickle,
    is_adapter,
    moved_part,
)
from thunder_fn.interpreters.rewriting.representation import Step
from thunder_fn.ir.trace import static_shape, type_of_value
from thunder_fn.jitted import Jitted, Options
from thunder_fn.jitted.modules.module import STATE, Latest, is_jitted, jit_of
from thunder_fn.parameters.clipping import clip_factor, norm_over_ranks
from thunder_fn.parameters.initialising import Init, Safetensors, from_weights, initialised, reset
from thunder_fn.parameters.rewritten import Rewritten, checked
from thunder_fn.parameters.skeleton import (
    OnState,
    Skeleton,
    is_extra,
    named_parts,
    state_names,
    with_tensors,
)

_BUFFER = "buffer "


class RewrittenModule(torch.nn.Module):
    """A module whose parameters are stored in another way. Made by `quantize` and its kin.

    `state_dict()` has the names, shapes and dtypes of the module that was given, and
    `load_state_dict` takes them. `parts()` are the tensors as they are stored. Optimizers train the
    adapters where there are any, otherwise the parameters that are stored as they were.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> model = tfn.quantize(torch.nn.Linear(3, 2, bias=False), "int8")
        >>> sorted(model.state_dict()), sorted(model.parts())
        (['weight'], ['weight.scales', 'weight.values'])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        steps: tuple[Step, ...],
        options: Options | None = None,
        prepared: Prepared | None = None,
    ) -> None:
        super().__init__()
        self._skeleton = Skeleton(module)
        self._functions: dict[tuple[bool, ...], tuple[Rewritten, Jitted | None]] = {}
        self._latest: Latest | None = None
        self._options = options
        self._whole: dict[str, torch.Tensor] | None = None
        self._state_names = state_names(module)
        self._buffer_names = tuple(name for name, _ in module.named_buffers())
        params = dict(module.named_parameters())
        if prepared is None:
            prepared = Rewritten(self._skeleton, steps).prepare(params)
        self._layout = prepared.layout
        adapters = any(map(is_adapter, prepared))
        for name, value in prepared.items():
            if is_adapter(name) or (name in params and is_differentiable(type_of_value(value))):
                trained = is_adapter(name) or (not adapters and params[name].requires_grad)
                self.register_parameter(
                    _slot(name), torch.nn.Parameter(value.clone(), requires_grad=trained)
                )
            else:
                self.register_buffer(_slot(name), value)
        for name, value in module.named_buffers():
            self.register_buffer(_BUFFER + _slot(name), value.detach().clone())
        self._steps = apart(
            steps, (name for name, part in self.parts().items() if not part.requires_grad)
        )
        self._layout = replace(self._layout, steps=self._steps)
        self.train(module.training)

    def parts(self) -> Prepared:
        """The parameters as they are stored."""
        return Prepared(
            self._layout, [getattr(self, _slot(name)) for name in self._layout.rewrite.names]
        )

    @internals.outside_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module on the parameters that the parts stand for."""
        latest = self._latest
        if latest is not None and self._whole is None and current() is None and latest.holds():
            return latest.jitted(*args, **kwargs, **{STATE: latest.tensors})
        buffers = self._buffers_by_name()
        if self._whole is not None:
            return self._skeleton(self._whole, buffers, *args, **kwargs)
        function, jitted = self._chosen()
        if jitted is None:
            return function(self.parts(), buffers, *args, **kwargs)
        tensors = (*self.parts().values(), *buffers.values())
        if current() is None and all(
            isinstance(value, torch.nn.Parameter) for value in self._parameters.values()
        ):
            children = (child.__dict__ for child in self._skeleton.module.modules())
            guard = internals.dict_guard((self._parameters, self._buffers, *children))
            self._latest = Latest(jitted, tensors, guard)
        return jitted(*args, **kwargs, **{STATE: tensors})

    def sharded_state_dict(self) -> dict[str, Any]:
        """The parameters as DTensors of this rank's share of them, in the memory of the parts;
        buffers as they are.

        Codes and adapters are there as they are stored, such as `fc.weight.values`. For
        `torch.distributed.checkpoint`: `save` writes them, and `load` reads them in place, on any
        number of ranks. Codes that ranks of tensor parallelism have made of their shares are read
        on as many of these.

        Raises:
            RewriteError: the parameters are not sharded over a mesh.
        """
        known = sharded_state(self._layout, self.parts())
        known |= self._buffers_by_name()
        return {name: known[part] for name, part in named_parts(self._state_names, known)}

    def sharded_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer of this module, in the form of `sharded_state_dict`. See
        `optimizer_state`.
        """
        return sharded_optimizer_state(self.parts(), optimizer)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Give an optimizer the state that `sharded_optimizer_state_dict` gave. All ranks call
        it.
        """
        load_optimizer_state(self.parts(), optimizer, state)

    def _function(self) -> Rewritten:
        return self._chosen()[0]

    @property
    def jitted(self) -> Jitted | None:
        """The jitted function that calls run in the module's modes, where a jitted module was
        rewritten.
        """
        return self._chosen()[1]

    def _chosen(self) -> tuple[Rewritten, Jitted | None]:
        """The function for the module's modes, and its jitted form if a jitted module was
        rewritten. Whether it and its children train is part of what is traced.
        """
        modes = tuple(child.training for child in self._skeleton.module.modules())
        if modes not in self._functions:
            function = Rewritten(self._skeleton, self._steps)
            on_state = OnState(function, self._layout, self._buffer_names)
            self._functions[modes] = (
                function,
                (None if self._options is None else Jitted(on_state, self._options)),
            )
        return self._functions[modes]

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_functions": {},
            "_latest": None,
            "_buffers": for_pickle(self._buffers),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_buffers": from_pickle(state["_buffers"])})

    def rewritten(self, step: Step) -> RewrittenModule:
        """Add a step to this module. It works on the parts as they are or, if it comes before the
        module's own step, on the parameters that they stand for.
        """
        steps = Rewritten(self._skeleton, self._steps).with_step(step).steps
        if steps != (*self._steps, step):
            return self._carried(
                RewrittenModule(self.restored(), steps, self._options),
                getattr(step, "beside", False),
            )
        buffers = self._buffers_by_name()
        module = with_tensors(self._skeleton.module, lambda name, tensor: buffers.get(name, tensor))
        return RewrittenModule(module, steps, self._options, self.parts().with_step(step))

    def _carried(self, module: RewrittenModule, beside: bool) -> RewrittenModule:
        """The module with the adapters of this one, and the codes too if its last step is beside
        weights. Adapters that it has in other shapes stay merged.
        """
        parts, shapes = self.parts(), module._layout.part_shapes
        kept = {name: value for name, value in parts.items() if beside or is_adapter(name)}
        if all(shapes.get(name) == tuple(value.shape) for name, value in kept.items()):
            if kept and not beside:
                module._take(module._layout.prepare(parts.without_adapters().restore()))
            module._take(kept)
        return module

    def merge(self) -> dict[str, torch.Tensor]:
        """Add the adapters of `lora` to their matrices, in place; the adapters as they were. See
        `Prepared.merge`.
        """
        merged, adapters = self.parts().merge()
        adapters = {name: value.detach().clone() for name, value in adapters.items()}
        self._take(merged)
        return adapters

    def unmerge(self, adapters: Mapping[str, torch.Tensor]) -> None:
        """Take adapters out of the matrices that `merge` added them to, in place. See
        `Prepared.unmerge`.
        """
        with torch.no_grad():
            self._take(self.parts().unmerge(adapters))

    def calibrate(self, samples: Iterable[tuple[Any, ...]]) -> None:
        """Steps of activations from sample inputs, in place. See `Rewritten.calibrate`."""
        buffers = self._buffers_by_name()
        self._take(self._function().calibrate(self.parts(), checked(samples, buffers)))

    def initialise(
        self,
        device: Any,
        init: Init | None = None,
        *,
        weights: Mapping[str, torch.Tensor] | str | Path | None = None,
    ) -> RewrittenModule:
        """Give the parts of a module that was made on the meta device their first values, one
        module after the other. So no more than one module's parameters are ever whole.

        Law: as the module initialised whole and rewritten then. All ranks draw from generators in
            the same state.

        Args:
            device: where the parts come to lie.
            init: fills the parameters and buffers of one module in place; by default its
                `reset_parameters`.
            weights: the values by name, which are read one module at a time: a mapping, a file of
                safetensors, or a folder of them as Hugging Face writes it. Then `init` fills
                buffers and parameters that have none.

        Raises:
            RewriteError: a module has parameters and no `reset_parameters`; or a weight is missing,
                or has another shape.
        """
        known = Safetensors(weights) if isinstance(weights, str | Path) else weights
        module = self._skeleton.module
        fill = lambda path, alone: init(alone) if init is not None else reset(path, alone)
        if known is not None:
            fill = from_weights(module, known, init)
        self.to_empty(device=device)
        listed = dict(self._state_names)
        for params, buffers in initialised(module, device, fill):
            own = {name: value for name, value in params.items() if name in self._layout.names}
            if own:
                self._take(self._layout.only(own).prepare_alike(own))
            for name, value in buffers.items():
                getattr(self, _BUFFER + _slot(listed.get(name, name))).copy_(value)
        return self

    @contextlib.contextmanager
    def accumulate(self) -> Generator[None]:
        """Keep whole parameters inside and add gradients to them; at the end they are reduced once.

        Law: the gradients are those of the sum of all losses inside.
        """
        parts = self.parts()
        every, trained, pull = self._function().pulled_back(parts)
        self._whole = {
            name: value.detach().requires_grad_(name in trained) for name, value in every.items()
        }
        try:
            yield
            found = {name: self._whole[name].grad for name in trained}
        finally:
            self._whole = None
        unused = tuple(f"{name}." for name, gradient in found.items() if gradient is None)
        for name, gradient in pull(found).items():
            if f"{name}.".startswith(unused) and not gradient.any():  # of no rank
                continue
            held = parts[name].grad
            parts[name].grad = gradient if held is None else held + gradient

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm, over all ranks, is at most max_norm; the norm before.

        Law: as `torch.nn.utils.clip_grad_norm_` of one rank that sees all batches.
        """
        gradients = {
            name: value.grad for name, value in self.parts().items() if value.grad is not None
        }
        norm = norm_over_ranks(self._layout, gradients, norm_type)
        for gradient in gradients.values():
            gradient.mul_(clip_factor(norm, max_norm).to(gradient.dtype))
        return norm

    def _take(self, prepared: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in prepared.items():
                getattr(self, _slot(name)).copy_(value)

    def restored(self) -> torch.nn.Module:
        """The module that was given, with the parameters and buffers that this one stands for."""
        known = self._known()
        return with_tensors(self._skeleton.module, lambda name, _: known[name].clone())

    def _known(self) -> dict[str, torch.Tensor]:
        """The tensors of the module that was given, by the names under which they are listed."""
        with torch.no_grad():
            return {**self.parts().restore(), **self._buffers_by_name()}

    def _buffers_by_name(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, _BUFFER + _slot(name)) for name in self._buffer_names}

    def extra_repr(self) -> str:
        """The class of the module that was given, and the parts."""
        texts = (f"{name}: {type_of_value(value)}" for name, value in self.parts().items())
        return "\n".join((f"of {self._skeleton.__name__}", *texts))

    def train(self, mode: bool = True) -> RewrittenModule:
        """Set the module's mode, and its children's."""
        super().train(mode)
        self._skeleton.module.train(mode)
        return self

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """The parameters and buffers under the names, shapes and dtypes of the module that was
        given.
        """
        known = self._known() | self._skeleton.extras()
        found = {prefix + name: known[canonical] for name, canonical in self._state_names}
        destination = args[0] if args else kwargs.get("destination")
        if destination is None:
            return found
        destination.update(found)
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Prepare and load parameters under the names and shapes of the module that was given.
        Adapters begin anew. A state of `sharded_state_dict` is loaded as it is.

        Raises:
            RewriteError: under `strict`, names are missing or unknown; a shape is another.
        """
        missing, unknown, wrong = self._load(state_dict)
        if (strict and (missing or unknown)) or wrong:
            raise RewriteError(
                "\n".join((f"load_state_dict: missing {missing}, unknown {unknown}", *wrong))
            )
        return torch.nn.modules.module._IncompatibleKeys(missing, unknown)  # pyright: ignore[reportPrivateUsage]

    def _load(self, state: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
        """Take the tensors that fit, DTensors too. Returns missing names, unknown ones, and
        those of other shapes.
        """
        split = split_of(self._layout)
        if state.keys() & set(split.names) - set(self._layout.names):
            return self._load_parts(split, state)
        current = self.state_dict()
        missing = sorted(current.keys() - state.keys())
        unknown = sorted(state.keys() - current.keys())
        wrong = [
            f"  {name}: expected shape {tuple(value.shape)}, given {tuple(state[name].shape)}"
            for name, value in current.items()
            if name in state
            and not is_extra(name)
            and (state[name].shape or (1,)) != (value.shape or (1,))  # numbers are sharded as rows
        ]
        if not wrong:
            given = {
                canonical: whole_tensor(state.get(name, current[name])).reshape(current[name].shape)
                for name, canonical in self._state_names
                if not is_extra(name)
            }
            if self._skeleton.set_extras(state):
                self._functions, self._latest = {}, None
            there = {canonical for name, canonical in self._state_names if name in state}
            own = self._layout.only(name for name in self._layout.names if name in there)
            types = zip(own.names, own.types, strict=True)
            new = own.prepare_alike(
                {name: given[name].to(type.device, type.dtype) for name, type in types}
            )
            calibrated = self.parts().calibrated
            self._take({name: value for name, value in new.items() if name not in calibrated})
            for name, value in self._buffers_by_name().items():
                value.copy_(given.get(name, value))
        return missing, unknown, wrong

    def _load_parts(
        self, split: Layout, state: Mapping[str, Any]
    ) -> tuple[list[str], list[str], list[str]]:
        """Load, like `_load`, parameters as they are stored."""
        known = dict(named_parts(self._state_names, (*split.names, *self._buffer_names)))
        missing, unknown = sorted(known.keys() - state.keys()), sorted(state.keys() - known.keys())
        given = {part: whole_tensor(state[name]) for name, part in known.items() if name in state}
        types = dict(zip(split.names, split.types, strict=True))
        wrong = [
            f"  {name}: expected {types[name]}, given {type_of_value(value)}"
            for name, value in given.items()
            if name in types
            and (value.dtype, value.numel())
            != (types[name].dtype, math.prod(static_shape(types[name])))
        ]
        if not wrong:
            own = split.only(name for name in given if name in types)
            self._take(
                own.prepare(
                    {name: given[name].reshape(static_shape(types[name])) for name in own.names}
                )
            )
            for name, value in self._buffers_by_name().items():
                value.copy_(given.get(name, value))
        return missing, unknown, wrong

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load this module as part of one that holds it."""
        own = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        missing, unknown, wrong = self._load(own)
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in unknown]
        error_msgs += wrong

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> RewrittenModule:
        """`to` and its kin: parts go where the parameters go; of codes and scales only the
        device changes.
        """
        layout = self._layout.moved(fn)
        stored = self._stored(layout, fn)
        for name in self._layout.part_shapes.keys() - layout.part_shapes:
            delattr(self, _slot(name))
        types = layout.rewrite.prepare.output_types
        for (name, part), type in zip(stored.items(), types, strict=True):
            if isinstance(part, torch.nn.Parameter):
                setattr(self, _slot(name), moved_part(part, type))
            else:
                self.register_buffer(_slot(name), moved_part(part, type))
        for name in self._buffer_names:
            slot = _BUFFER + _slot(name)
            setattr(self, slot, fn(getattr(self, slot)))
        self._layout, self._functions, self._latest = layout, {}, None
        return self

    def _stored(
        self, layout: Layout, fn: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The parts that a layout has. Parts that it has and this one has not, such as the bytes in
        which int4 weights of another dtype are stored, are encoded anew.
        """
        parts, shapes = self.parts(), self._layout.part_shapes
        if shapes == layout.part_shapes:
            return dict(parts)
        with torch.no_grad():
            again = layout.prepare(
                {name: fn(value) for name, value in parts.without_adapters().restore().items()}
            )
        return {
            name: parts[name] if shapes.get(name) == again[name].shape else again[name]
            for name in again
        }


def _slot(name: str) -> str:
    """A name without dots, which modules keep for their children, and that no attribute has."""
    slot = name.replace(".", "/")
    return f"{slot}/" if hasattr(RewrittenModule, slot) else slot


def rewritten_module(module: torch.nn.Module, step: Step) -> RewrittenModule:
    """A module with one more step."""
    if isinstance(module, RewrittenModule):
        return module.rewritten(step)
    if is_jitted(module):
        inner = jit_of(module)
        return RewrittenModule(inner.module, (step,), inner.options)
    return RewrittenModule(module, (step,))
