"""Rewritten functions of `(params, *inputs)`.

q = quantize(f, "int8")
new = q.prepare(params)      # codes and scales, by name
q(new, x)                    # f on what the codes stand for
new.restore()                # parameters again, under their own names
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from thunder_fn.api.calling import Transformed, apply
from thunder_fn.api.pullbacks import vjp
from thunder_fn.capture import Captured, capture, current, pytree
from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.distributed.groups import check_groups, check_there
from thunder_fn.errors import RewriteError, callable_name, kind_of
from thunder_fn.interpreters.ddp import Ddp
from thunder_fn.interpreters.fsdp import Fsdp
from thunder_fn.interpreters.lora import Lora
from thunder_fn.interpreters.quantize.calibration import calibrated
from thunder_fn.interpreters.quantize.step import Quantize
from thunder_fn.interpreters.rewriting.prepared import Layout, Prepared, check_left, layout_of
from thunder_fn.interpreters.rewriting.representation import Step
from thunder_fn.interpreters.rewriting.rewrite import Rewrite
from thunder_fn.interpreters.rewriting.tracing import example
from thunder_fn.interpreters.rewriting.units import scheduled, then
from thunder_fn.interpreters.tensor_parallel.step import TensorParallel
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import Trace
from thunder_fn.jitted import Jitted, Options

PullBack = Callable[[Mapping[str, torch.Tensor | None]], dict[str, torch.Tensor]]
ORDER: tuple[type, ...] = (Lora, TensorParallel, Quantize, Fsdp, Ddp)
"""The order of steps, whatever order they were asked for in. An adapter is added to a matrix, not
to its codes, and a whole weight is quantised, not a rank's rows of it.
"""


@dataclass(frozen=True, eq=False)
class Rewritten(Transformed):
    """A function of `(params, *inputs)` on parameters that are stored in another way. Made by
    `quantize` and its kin.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> q = tfn.quantize(lambda params, x: torch.nn.functional.linear(x, params["w"]), "int8")
        >>> q(q.prepare({"w": torch.ones(2, 3)}), torch.ones(1, 3))
        tensor([[3., 3.]])
    """

    fn: Callable[..., Any]
    steps: tuple[Step, ...]
    options: Options | None = None

    def prepare(self, params: Any) -> Prepared:
        """The parameters as this function takes them. No gradient flows back through it: parts are
        trained, which with `quantize(training=True)` are the parameters as they were.

        Args:
            params: a pytree of tensors, as the original function takes them first.

        Raises:
            DistributedError: ranks that share them were given others.
        """
        return layout_of(params, self.steps).prepare_alike(params)

    def __call__(self, params: Any, *inputs: Any, **kwargs: Any) -> Any:
        self._check(params)
        if current() is None:
            check_there(self.steps, self.__name__)
        if self.jitted is not None:
            return self.jitted(params, *inputs, **kwargs)
        return self.run(params, *inputs, **kwargs)

    @cached_property
    def jitted(self) -> Jitted | None:
        """The call as a jitted function, where a jitted function was rewritten."""
        return None if self.options is None else Jitted(self.run, self.options)

    def unjitted(self) -> Rewritten:
        """The function as it is written, for transforms, which are jitted in its place."""
        return replace(self, options=None)

    def with_step(self, step: Step) -> Rewritten:
        """Add a step to this function.

        Raises:
            RewriteError: its ranks have shares of the parameters already.
        """
        check_groups(self.steps, step)
        return replace(self, steps=in_order((*self.steps, step)))

    def rewrite(self, params: Any, *inputs: Any, **kwargs: Any) -> Rewrite:
        """The three traces, for parameters in their original form or prepared, and example
        inputs.
        """
        layout = params.layout if isinstance(params, Prepared) else layout_of(params, self.steps)
        return layout.rewritten(self._captured(layout, inputs, kwargs).trace)

    def whole(self, params: Prepared) -> Any:
        """Decode the parameters, in their original structure, as computations see them;
        differentiable.

        So gradients of many batches are reduced once: ``whole, pull = vjp(q.whole, new)``, add the
        gradients of `q.fn` at `whole`, and ``pull(total)``.
        """
        decode = params.layout.decode
        return pytree.unflatten(
            params.layout.spec, list(apply("whole", decode, list(params.values()), decode))
        )

    def pulled_back(
        self, params: Prepared
    ) -> tuple[dict[str, torch.Tensor], tuple[str, ...], PullBack]:
        """Decode a dict of parameters. Returns them, the names of those whose parts require grad,
        and a function from their gradients (None for zero) to gradients of the parts.
        """
        own = {name: value.detach() for name, value in params.items() if value.requires_grad}
        trained = tuple(
            name
            for name in params.layout.names
            if any(f"{part}.".startswith(f"{name}.") for part in own)
        )

        def seen(
            own: dict[str, torch.Tensor],
        ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
            whole = self.whole(params.replaced(own))
            return {name: whole[name] for name in trained}, whole

        some, pull, every = vjp(seen, own, has_aux=True)

        def gradients(found: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
            filled = {
                name: torch.zeros_like(some[name]) if g is None else g for name, g in found.items()
            }
            return pull(filled)[0] if filled else {}

        return every, trained, gradients

    def calibrate(self, params: Prepared, samples: Iterable[tuple[Any, ...]]) -> Prepared:
        """The parameters with steps of activations, as a scheme such as `int8_static` has them,
        from sample inputs.

        Law: on the samples themselves, those of all ranks that share the parameters, no activation
            is clipped.

        Args:
            params: prepared; all ranks call this. A weight that no sample reaches in a linear layer
                keeps the step NaN.
            samples: the inputs of some calls: `[(x,), (y,)]`.
        """
        self._check(params)

        def runs(layout: Layout) -> Iterator[tuple[Trace, list[Any]]]:
            for inputs in checked(samples):
                compute = layout.rewritten(self._captured(params.layout, inputs, {}).trace).compute
                yield (compute, pytree.tensors_in(inputs))

        return calibrated(params, runs)

    def run(self, params: Prepared, *inputs: Any, **kwargs: Any) -> Any:
        """The function on prepared parameters, which are not checked, outside of `jitted`."""
        captured = self._captured(params.layout, inputs, kwargs)
        count = len(params.layout.names)
        self._check_writes(captured, params.layout)
        tensors = pytree.tensors_in((inputs, kwargs))
        compute = params.layout.rewritten(captured.trace).compute
        written = {
            write.target - count for write in captured.writes if isinstance(write.target, int)
        }
        # autograd may save a tensor that is written to below, such as the running mean of a batch
        # norm
        given = [tensor.clone() if i in written else tensor for i, tensor in enumerate(tensors)]
        outputs = apply(self.__name__, compute, [*params.values(), *given], captured.trace)
        with torch.no_grad():
            for write, value in zip(captured.writes, outputs[captured.num_results :], strict=True):
                target = (
                    tensors[write.target - count] if isinstance(write.target, int) else write.target
                )
                target.copy_(value)
        return captured.result(outputs)

    def _captured(
        self, layout: Layout, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Captured:
        """The original function, captured on parameters of the original types. Those of a module
        require grad: for others PyTorch has ops that autograd does not follow.
        """
        examples = list(map(example, layout.types))
        if getattr(self.fn, "of_parameters", False):
            examples = [
                value.detach().requires_grad_(is_differentiable(type))
                for value, type in zip(examples, layout.types, strict=True)
            ]
        params = pytree.unflatten(layout.spec, examples)
        return capture(self.fn, (params, *inputs), kwargs)

    def _check(self, params: Any) -> None:
        name = callable_name(self.fn)
        if not isinstance(params, Prepared):
            raise RewriteError(
                f"{name} was rewritten and takes prepared parameters, given {kind_of(params)}",
                fix="Prepare them once: `new = q.prepare(params)`, then call `q(new, ...)`.",
            )
        if params.layout.steps is not self.steps and params.layout.steps != self.steps:
            raise RewriteError(
                f"{name} was given parameters that another transform prepared\n  prepared by:"
                f" {_steps_text(params.layout.steps)}\n  taken:      "
                f" {_steps_text(self.steps)}",
                fix="Use the `prepare` of the function that you call.",
            )

    def _check_writes(self, captured: Captured, layout: Layout) -> None:
        for write in captured.writes:
            if isinstance(write.target, int) and write.target < len(layout.names):
                name = layout.names[write.target]
                raise RewriteError(
                    f"the function changes its parameter {name!r} in place, which has no place"
                    " once it is rewritten",
                    fix="Return the new parameters, and prepare those.",
                )

    @property
    def __name__(self) -> str:
        words = "_".join(type(step).__name__.lower() for step in reversed(self.steps))
        return f"{words}_{getattr(self.fn, '__name__', type(self.fn).__name__)}"


def checked(samples: Iterable[Any], *first: Any) -> Iterator[tuple[Any, ...]]:
    """The inputs of some calls, after others that all have.

    Raises:
        RewriteError: those of a call are one tensor, say.
    """
    for inputs in samples:
        if not isinstance(inputs, tuple | list):
            what = f"calibrate: a sample is the inputs of a call, given {kind_of(inputs)}"
            raise RewriteError(what, fix="Write `[(x,), (y,)]`: a tuple for each call.")
        yield (*first, *inputs)


def _steps_text(steps: Sequence[Step]) -> str:
    return ", then ".join(map(str, steps)) or "nothing"


def rewritten(f: Any, step: Step) -> Any:
    """f with one more step: a function, a jitted or rewritten function, or a `Rewrite`."""
    if isinstance(f, Rewrite):
        check_left(step, f)
        done = then(f, step)
        return replace(done, compute=scheduled(done.compute, (step,)))
    if isinstance(f, Rewritten):
        return f.with_step(step)
    if isinstance(f, Jitted):
        inner = f.fn
        return (
            replace(inner.with_step(step), options=f.options)
            if isinstance(inner, Rewritten)
            else Rewritten(inner, (step,), f.options)
        )
    if isinstance(f, torch.nn.Module):
        from thunder_fn.parameters.modules import rewritten_module

        return rewritten_module(f, step)
    if not callable(f):
        what = (
            f"expected a function of (params, *inputs), a module or a Rewrite, given {kind_of(f)}:"
            f" {shown(f, 60)}"
        )
        fix = "Use `rewrites.identity(trace, names)` for a trace whose first inputs are parameters."
        raise RewriteError(what, fix=fix if isinstance(f, Trace) else None)
    return Rewritten(f, (step,))


def in_order(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps in the order in which they work on each other's results. A stable sort: others
    keep their places.
    """
    return tuple(
        sorted(
            steps, key=lambda step: ORDER.index(type(step)) if type(step) in ORDER else len(ORDER)
        )
    )
