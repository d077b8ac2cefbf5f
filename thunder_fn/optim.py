"""`torch.optim` optimizers as functions: state in, state out.

The optimizer's own code runs on copies of the parameters; under capture it is functionalised like
any in-place code.

The update of each parameter is one equation. Values that depend on the step count and changed
options alone are computed in front of all updates. The rest is a body that parameters of one kind
share.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import Captured, capture, current, pytree
from thunder_fn.capture.apply import bind_equation, close_over, copy_trace, operands_of
from thunder_fn.capture.numbers.python_numbers import as_python
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.replaced.lookasides import divert, original_of
from thunder_fn.capture.replaced.patches import counting_in_tensors
from thunder_fn.errors import OptimizerError, callable_name, kind_of, spelled
from thunder_fn.garbage import no_collections
from thunder_fn.interpreters.partial_eval import follows_from, partial_eval
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Literal, Trace, Var, cut, type_of, type_of_value
from thunder_fn.ir.walking import begun_with
from thunder_fn.spellings import no_such_name

State = dict[str, Any]

IMPLEMENTATIONS = ("foreach", "fused")
"""Options that choose how PyTorch computes the same step. A trace has the plain ops, and its
executor chooses.
"""


_NAMES = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
EACH_ON_ITS_OWN = frozenset(
    getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name)
)
"""Optimizers that update each parameter from its own gradient and state: a step is traced once
for equal types.
"""


STARTS_AT_ZERO = frozenset(
    getattr(torch.optim, name)
    for name in (
        "Adadelta",
        "Adafactor",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
    )
    if hasattr(torch.optim, name)
)
"""Optimizers whose first step makes a state of zeros and ones, whatever its gradients and
options: they start with it.
"""


DECIDE_BY_VALUES = frozenset(getattr(torch.optim, name) for name in ("ASGD", "RAdam"))
"""Optimizers that ask for numbers in their state, unless they are `capturable`: a trace computes
with tensors.
"""


SELECT_FROM_NAN = frozenset((torch.optim.RAdam,))
"""Those of them that, as `capturable`, are right in their first steps and have a derivative of NaN
there: that of the value which `torch.where` leaves.
"""


@dataclass(frozen=True, slots=True)
class _Update:
    """The update of one parameter: what follows from the arguments that all parameters share, and
    the rest.

    `shared` gives its outputs, then the inputs of `own`; `own` reads these and a parameter's own
    tensors. `is_shared` says of each result which of the two gives it. `constants` are among the
    shared values.
    """

    captured: Captured
    shared: Trace
    own: Trace
    is_shared: tuple[bool, ...]
    constants: tuple[torch.Tensor, ...]


class _Updates:
    """Records updates of parameters as one equation for each, whose body parameters of the same
    kind share.
    """

    def __init__(
        self,
        recorder: Recorder,
        update: Callable[..., tuple[Any, dict[str, Any]]],
        name: str,
        rest: tuple[Any, ...],
    ) -> None:
        self.recorder, self.update, self.op, self.rest = recorder, update, ops.composite(name), rest
        self.shared_tensors = pytree.tensors_in(rest)
        self.known: dict[Any, _Update | None] = {}
        self.values: dict[Any, tuple[Any, ...] | None] = {}

    def __call__(self, *own: Any) -> tuple[Any, dict[str, Any]]:
        """The new parameter and its new state."""
        leaves, spec = pytree.flatten((*own, *self.rest))
        kind = spec, tuple(map(self.kind_of, leaves))
        if kind not in self.known:
            self.known[kind] = self.made((*own, *self.rest))
        update = self.known[kind]
        results = None if update is None else self.recorded(update, own)
        return (
            self.update(*own, *self.rest)
            if update is None or results is None
            else update.captured.result(results)
        )

    def kind_of(self, leaf: Any) -> Any:
        """Return what a trace depends on of a leaf."""
        return (
            (self.recorder.type_of(leaf), leaf.stride())
            if isinstance(leaf, torch.Tensor)
            else Literal(leaf)
        )

    def made(self, args: tuple[Any, ...]) -> _Update | None:
        """The update, captured on arguments of this kind; None where it changes tensors from
        outside.
        """
        captured = capture(self.update, args)
        if captured.writes:
            return None
        trace, constants = close_over(captured.trace)
        first = len(trace.inputs) - len(constants) - len(self.shared_tensors)
        is_given = tuple(position >= first for position in range(len(trace.inputs)))
        found = follows_from(trace, is_given)
        is_shared = tuple(
            not isinstance(atom, Var) or atom.index in found for atom in trace.outputs
        )
        _, after = captured.result(tuple(range(captured.num_results)))
        if any(flag and place != after.get("step") for place, flag in enumerate(is_shared)):
            # No parameter may hold what all share, so each computes it.
            mine, given = trace.inputs[:first], trace.inputs[first:]
            own = _constant(cut(trace, inputs=(*given, *mine), name=self.op.name))
            shared = cut(trace, inputs=given, equations=(), outputs=given)
            return _Update(captured, shared, own, (False,) * len(is_shared), constants)
        shared, own = partial_eval(trace, is_given, is_shared)
        return _Update(captured, shared, _constant(own).renamed(self.op.name), is_shared, constants)

    def recorded(self, update: _Update, own: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The update's results for a parameter; None where it has to run op by op."""
        shared = self.shared_values(update)
        if shared is None:
            return None
        count = sum(update.is_shared)
        tensors = pytree.tensors_in(own)
        operands = operands_of(self.recorder, (*shared[count:], *tensors))
        if operands is None:
            return None
        with torch.enable_grad():  # the body says itself that no gradient goes through it
            results = bind_equation(
                self.recorder, self.op, operands, (update.own,), update.own.output_types
            )
        given = iter(shared), iter(results)
        return tuple(next(given[0] if flag else given[1]) for flag in update.is_shared)

    def shared_values(self, update: _Update) -> tuple[Any, ...] | None:
        """Compute the results of `update.shared` once for all parameters."""
        key = update.shared, tuple(map(id, update.constants))
        if key not in self.values:
            self.values[key] = copy_trace(
                self.recorder, update.shared, (*self.shared_tensors, *update.constants)
            )
        return self.values[key]


def _constant(trace: Trace) -> Trace:
    """The trace with results through which no gradient goes."""
    builder, results = begun_with(trace)
    stopped = (builder.add(ops.STOP_GRADIENT, (atom,), (type_of(atom),)) for atom in results)
    return builder.build(tuple(var for (var,) in stopped))


@dataclass(frozen=True)
class FunctionalOptimizer:
    """An optimizer class with its options, as two functions. See `functional_optimizer`."""

    make: Callable[..., torch.optim.Optimizer]
    options: tuple[tuple[str, Any], ...]

    @no_collections()  # PyTorch imports Dynamo where an optimizer is made
    def init(self, params: Any) -> State:
        """The state before the first step: zeros, where the optimizer starts with such, else the
        state that it has when it is made.

        Raises:
            OptimizerError: params is no pytree of tensors.
        """
        leaves = pytree.flatten(params)[0]
        if other := [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]:
            raise OptimizerError(
                f"init: expected a pytree of tensors, but there is {kind_of(other[0])} in it",
                fix="Write `init(dict(module.named_parameters()))` for those of a module.",
            )
        leaves = [leaf.detach() for leaf in leaves]
        optimizer = self._made(leaves)
        if self.make in STARTS_AT_ZERO:
            internals.make_optimizer_state(optimizer)
        if self._has_momentum_of_zeros:
            optimizer.state.update(
                {leaf: {"momentum_buffer": torch.zeros_like(leaf)} for leaf in leaves}
            )
        entries = [
            dict(optimizer.state[leaf]) if leaf in optimizer.state else {} for leaf in leaves
        ]
        return _stored(entries, [False] * len(entries), None)

    def update(self, params: Any, grads: Any, state: State, **changed: Any) -> tuple[Any, State]:
        """One step: the new parameters, in the structure of the old, and the new state.

        `changed` are options that are other than they were when this value was made, as a
        schedule's `lr`. A tensor of rank 0 for one is an input like any other: the step is not
        traced again when its value changes.

        Values that a step writes to its parameter group, as some optimizers keep their count there,
        are in the state as `group`. If the parameters were computed from what is differentiated,
        the derivative goes through the step.

        Raises:
            OptimizerError: the gradients or the state are not those of the parameters. Or the
                optimizer has no such option, or it cannot change. Or a step keeps
                values in attributes of the optimizer. Or a derivative is to go through the step of
                an optimizer that has no option `differentiable`.
        """
        if "dampening" in changed and self._has_momentum_of_zeros:
            what = (
                "SGD's dampening cannot change: the first step leaves it out, and this state starts"
                " with a momentum of zeros"
            )
            raise OptimizerError(what, fix="Give `functional_optimizer` a dampening that is not 0.")
        leaves, spec = pytree.flatten(params)
        gradients = _gradients(params, grads)
        _check_state(state, len(leaves))
        entries, step = state["params"], state["step"]
        group: State = state.get("group", {})
        follows = torch.is_grad_enabled() and self._is_followed(
            leaves, gradients, (entries, changed)
        )
        with torch.set_grad_enabled(follows):
            if (
                not follows
                and self.make in EACH_ON_ITS_OWN
                and (recorder := current()) is not None
                and not recorder.symbolic
            ):
                update = _Updates(recorder, self._step_of_one, self.make.__name__, (step, changed))
                updated = [update(*own) for own in zip(leaves, gradients, entries, strict=True)]
                new, after = [leaf for leaf, _ in updated], [entry for _, entry in updated]
            else:
                new, after, group = self._step(
                    leaves, gradients, entries, step, changed, group, follows=follows
                )
            given = zip(gradients, entries, strict=True)
            stored = _stored(after, [_is_alone(*one, step) for one in given], step)
            return pytree.unflatten(spec, new), stored | ({"group": group} if group else {})

    def _is_followed(self, leaves: Sequence[Any], gradients: Sequence[Any], rest: Any) -> bool:
        """Test whether a derivative goes through the step: it is asked for, or the step's operands
        were computed from differentiated values.
        """
        options = dict(self.options)
        if "differentiable" in options:
            return bool(options["differentiable"])
        if current() is None:
            return False
        if any(map(_is_computed, (*leaves, *pytree.flatten((rest, options))[0]))):
            return True
        return any(map(_is_computed, gradients)) and not any(leaf.requires_grad for leaf in leaves)

    @property
    def _has_momentum_of_zeros(self) -> bool:
        """Test whether the first step's momentum, which is the gradient, is what follows from zeros
        too: it is not dampened.
        """
        options = dict(self.options)
        return (
            self.make is torch.optim.SGD
            and bool(options.get("momentum"))
            and not options.get("dampening")
        )

    def _step_of_one(
        self,
        leaf: torch.Tensor,
        gradient: torch.Tensor | None,
        entry: dict[str, Any],
        step: torch.Tensor | None,
        changed: Mapping[str, Any],
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        (new,), (after,), _ = self._step([leaf], [gradient], [entry], step, changed, {})
        return new, after

    def _step(
        self,
        leaves: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        entries: Sequence[dict[str, Any]],
        step: torch.Tensor | None,
        changed: Mapping[str, Any],
        group: Mapping[str, Any],
        *,
        follows: bool = False,
    ) -> tuple[list[torch.Tensor], list[dict[str, Any]], State]:
        """New parameters, the optimizer's state of each, and the writes of steps to its group."""
        new = [leaf.clone() for leaf in leaves]
        for leaf, gradient in zip(new, gradients, strict=True):
            leaf.grad = gradient
        optimizer = self._made(new, follows=follows)
        (own,) = optimizer.param_groups
        own.update(_cloned(dict(group)))
        own.update(_known(dict(changed), own, optimizer))
        for leaf, entry in zip(new, entries, strict=True):
            if entry:
                optimizer.state[leaf] = _working(entry, step)
        before, attributes = _snapshot(own), _snapshot(_attributes(optimizer))
        with counting_in_tensors():
            optimizer.step()
        _check_kept(optimizer, new, attributes)
        after = _snapshot(own)
        written = {key for key in after if key not in before or before[key] != after[key]}
        entries = [dict(optimizer.state[leaf]) if leaf in optimizer.state else {} for leaf in new]
        return new, entries, {key: own[key] for key in own if key in written | set(group)}

    def _made(self, leaves: list[torch.Tensor], *, follows: bool = False) -> torch.optim.Optimizer:
        """The optimizer. It checks numbers when it is made; tensors among its options are set
        afterwards.

        Raises:
            OptimizerError: a derivative is to go through its steps, and it cannot do that.
        """
        tensors = {key: value for key, value in self.options if isinstance(value, torch.Tensor)}
        options = {key: value for key, value in self.options if key not in tensors}
        if follows:
            _check_follows(self.make)
            options["differentiable"] = True
        optimizer = self.make(leaves, **options)
        for group in optimizer.param_groups:
            plain = {key: False for key in IMPLEMENTATIONS if key in group}
            if self.make in DECIDE_BY_VALUES and current() is not None:
                plain["capturable"] = not (follows and self.make in SELECT_FROM_NAN)
            group.update(plain | _known(tensors, group, optimizer))
        return optimizer


def _gradients(params: Any, grads: Any) -> list[Any]:
    """The gradients of the parameters in order.

    Raises:
        OptimizerError: their structure or types are not those of the parameters.
    """
    leaves, spec = pytree.flatten(params)
    fix = "Write `update(params, grads, state)`."
    try:
        gradients = pytree.flatten_up_to(spec, grads)
    except ValueError:
        found = pytree.difference(spec, pytree.flatten(grads)[1], "params", "grads")
        what = f"update: the gradients must have the structure of the parameters, but {found}"
        raise OptimizerError(what, fix=fix) from None
    for index, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        if gradient is None or (_kind(gradient) == _kind(leaf)):
            continue
        path = pytree.paths(params, "")[index]
        given = type_of_value(gradient) if _kind(gradient) else kind_of(gradient)
        what = f"update: grads{path} is {given}, but params{path} is {type_of_value(leaf)}"
        raise OptimizerError(what, fix=fix)
    return gradients


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def _check_state(state: Any, count: int) -> None:
    what = None
    if not isinstance(state, dict) or not {"params", "step"} <= state.keys():
        what = f"given {kind_of(state)}"
    elif len(state["params"]) != count:
        what = f"given that of {len(state['params'])} for {count}"
    if what is not None:
        raise OptimizerError(
            f"update: the state must be what `init` or `update` gave for these parameters, {what}",
            fix="Write `update(params, grads, state)`, after `state = init(params)`.",
        )


def _working(entry: dict[str, Any], step: torch.Tensor | None) -> dict[str, Any]:
    """A parameter's state to work on. The step count becomes float64, which is what eager
    PyTorch computes with.
    """
    copy = _cloned(entry)
    if "step" in copy and not _is_count(copy["step"]):
        return copy
    count = copy.pop("step", step)
    return copy if count is None or not entry else {"step": count.double(), **copy}


def _is_count(value: Any) -> bool:
    """Test for a count of steps: a tensor of rank 0 in PyTorch's own optimizers, elsewhere a number
    or a tensor of integers.
    """
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _cloned(values: dict[str, Any]) -> dict[str, Any]:
    """Clone tensors, in lists and dicts too."""
    return pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, values
    )


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and internals.node_of(value) is not None


def _check_follows(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Raise an error if no derivative goes through the steps of such an optimizer."""
    if "differentiable" not in inspect.signature(make).parameters:
        name = make.__name__
        what = (
            f"functional_optimizer: the derivative of a step of {name} is asked for, which has no"
            " option `differentiable`"
        )
        raise OptimizerError(
            what,
            fix="Detach what the step is given, or write the step as a function of tensors.",
        )


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer besides state and options."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups", "defaults")
    }


def _check_kept(
    optimizer: torch.optim.Optimizer, leaves: Sequence[torch.Tensor], before: Mapping[str, Any]
) -> None:
    """Raise if a step kept values in the optimizer's attributes, or in a state of no parameter."""
    others = [key for key in optimizer.state if not any(key is leaf for leaf in leaves)]
    after = _snapshot(_attributes(optimizer))
    kept = sorted(key for key, value in after.items() if before.get(key) != value)
    if others or kept:
        where = [f"its attribute {key!r}" for key in kept] or ["its state, of no parameter"]
        what = f"a step of {type(optimizer).__name__} keeps values in {', '.join(where)}"
        fix = "Use the optimizer as it is, on the parameters of a jitted module."
        raise OptimizerError(f"functional_optimizer: {what}\n{fix}")


def _snapshot(values: Mapping[str, Any]) -> dict[str, Any]:
    """Describe values so that a later comparison shows whether something wrote to or replaced
    them.
    """
    return {
        key: tuple(map(_mark, pytree.flatten(value)[0]))
        for key, value in values.items()
        if key != "params"
    }


def _mark(leaf: Any) -> Any:
    """Equal for the same number; for other objects, for the same one as long as it is as it was."""
    if isinstance(leaf, torch.optim.Optimizer):
        return id(leaf), tuple(_snapshot(_attributes(leaf)).items())
    if isinstance(leaf, torch.Tensor):
        with internals.no_torch_function():
            return id(leaf), leaf._version  # pyright: ignore[reportPrivateUsage]
    return (
        Literal(leaf)
        if isinstance(leaf, (bool, int, float, complex, str, type(None)))
        else id(leaf)
    )


def _is_alone(
    gradient: torch.Tensor | None, entry: dict[str, Any], step: torch.Tensor | None
) -> bool:
    """Test whether the parameter does not step with the others: it has no gradient this time, or
    had none before.
    """
    return gradient is None or "step" in entry or (not entry and step is not None)


def _stored(
    entries: Sequence[dict[str, Any]], alone: Sequence[bool], step: torch.Tensor | None
) -> State:
    """The states of all parameters: one count for those that step together, which is `step`
    where none of them has.
    """
    counts = [entry.pop("step") if _is_count(entry.get("step")) else None for entry in entries]
    together = (
        count for count, own in zip(counts, alone, strict=True) if count is not None and not own
    )
    common = next(together, step)
    for entry, count, own in zip(entries, counts, alone, strict=True):
        entry.update({"step": count.float()} if own and count is not None else {})
    return {"step": None if common is None else common.float(), "params": list(entries)}


@spelled(
    "Name the options, as in `functional_optimizer(torch.optim.SGD, lr=0.1)`; `init` takes the"
    " parameters.",
    learning_rate="lr",
)
def functional_optimizer(
    make: Callable[..., torch.optim.Optimizer], **options: Any
) -> FunctionalOptimizer:
    """Make a `torch.optim` optimizer a pair of pure functions.

    Law: ``update`` gives the parameters and the state that the optimizer's own ``step`` gives on
        the same gradients.

    Args:
        make: an optimizer class, such as `torch.optim.AdamW`.
        options: its keyword arguments. With `differentiable=True` a derivative goes through the
            steps, as in MAML or where hyperparameters are learned, and with False none does.
            Without it a derivative goes through the steps inside of what `grad` and its like
            differentiate. Elsewhere, as in PyTorch, what a step gives counts as a constant.

    Returns:
        A value with `init(params) -> state` and `update(params, grads, state) -> (params, state)`.
            The state of Adam and others that start from zeros has its structure from the start. If
            the first step makes a state of its own, as that of SGD with a dampened momentum, of
            Rprop and of ASGD does, the state before is empty and a jitted step is traced twice.

    Raises:
        OptimizerError: `make` is no optimizer class, or it has no such option. Or the optimizer's
            step calls the loss itself, as that of LBFGS does.

    Example:
        >>> sgd = functional_optimizer(torch.optim.SGD, lr=0.1)
        >>> params, state = {"w": torch.ones(2)}, sgd.init({"w": torch.ones(2)})
        >>> sgd.update(params, {"w": torch.ones(2)}, state)[0]["w"]
        tensor([0.9000, 0.9000])
    """
    if isinstance(make, torch.optim.Optimizer):
        name = type(make).__name__
        what = f"functional_optimizer: expected an optimizer class, given an instance, {name}(...)"
        raise OptimizerError(
            what,
            fix=f"Write `functional_optimizer(torch.optim.{name}, lr=...)`: `init` takes the"
            " parameters.",
        )
    if not callable(make):
        what = f"functional_optimizer: expected an optimizer class, given {kind_of(make)}"
        raise OptimizerError(what, fix="Write `functional_optimizer(torch.optim.AdamW, lr=...)`.")
    _check_options(make, options)
    closure = inspect.signature(getattr(make, "step", lambda: None)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        what = (
            f"functional_optimizer: a step of {make.__name__} calls the loss itself, and is no"
            " function of gradients"
        )
        raise OptimizerError(
            what, fix="Use the optimizer as it is, on the parameters of a jitted module."
        )
    return FunctionalOptimizer(make, tuple(sorted(options.items())))


def _check_options(make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(make).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for key in options:
        if key not in parameters:
            names = [name for name in parameters if name != "params"]
            raise OptimizerError(
                f"functional_optimizer: {callable_name(make)} has no option {key!r}; it has"
                f" {', '.join(names)}"
            )


def _known(
    changed: dict[str, Any], group: dict[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    known = sorted(set(group) - {"params"})
    for key in changed:
        if key not in known:
            name = type(optimizer).__name__
            raise OptimizerError(
                f"{name} has no option {key!r}; those that can change are {', '.join(known)}"
            )
    return changed


def _adafactor(  # noqa: PLR0913 - PyTorch's signature
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    row_vars: Sequence[Any],
    col_vars: Sequence[Any],
    variances: Sequence[Any],
    state_steps: Sequence[torch.Tensor],
    *,
    d: float,
    lr: Any,
    beta2_decay: float,
    weight_decay: float,
    eps1: float | None,
    eps2: float,
    maximize: bool,
    **scaling: Any,
) -> None:
    """Run PyTorch's steps of Adafactor with the numbers that it asks for as tensors.

    Source: N. Shazeer and M. Stern, "Adafactor: adaptive learning rates with sublinear memory
        cost", 2018, algorithms 4 and 5.
    """
    for param, given, row, column, variance, step in zip(
        params, grads, row_vars, col_vars, variances, state_steps, strict=True
    ):
        grad, root = -given if maximize else given, param.numel() ** 0.5
        least = eps1 or torch.finfo(param.dtype).eps
        step += 1
        share = (step**beta2_decay).to(param.dtype)
        most = torch.as_tensor(lr, dtype=step.dtype, device=step.device)
        rate = torch.minimum(1 / step**0.5, most)
        scale: Any = (param.norm(2).double() / root).clamp_min(eps2) * rate
        if weight_decay:
            param.mul_(1 - lr * weight_decay)
        if grad.dim() > 1:
            for mean, dim in ((row, -1), (column, -2)):
                norms = torch.linalg.vector_norm(grad, dim=dim, keepdim=True)
                mean.lerp_(norms.square().div(grad.shape[dim]), share)
            estimate = (row @ column).div(row.mean(dim=-2, keepdim=True).clamp(min=least))
        else:
            estimate = variance.lerp_(grad * grad, share).clone()
        update = estimate.clamp(min=least * least).rsqrt() * grad
        clipped = (update.norm(2).double() / (root * d)).clamp_min(1.0)
        param.add_(update, alpha=-scale / clipped)


def _is_stepping() -> bool:
    """Test whether the step of an optimizer from outside is traced, as its code is written."""
    recorder = current()
    return recorder is not None and bool(recorder.steps)


def _scalar_dtype(is_fused: bool | None = None) -> torch.dtype:
    """The dtype of numbers in a state: float64, with which eager PyTorch computes; in the step of
    an optimizer from outside, that which it stores.
    """
    if _is_stepping():
        return original_of(internals.higher_order_function("optimizer scalar dtype"))(is_fused)
    return torch.float64


divert("optimizer scalar dtype", _scalar_dtype)


def _larger(*values: Any) -> Any:
    """`max` of numbers, some of which may be symbols."""
    return functools.reduce(lambda a, b: as_python(torch.sym_max(a, b)), values)


def _smaller(*values: Any) -> Any:
    """`min` of numbers, some of which may be symbols."""
    return functools.reduce(lambda a, b: as_python(torch.sym_min(a, b)), values)


def _divert_adafactor(name: str, otherwise: Callable[..., None] | None) -> None:
    """Run PyTorch's function as it is written in the step of an optimizer from outside, where `max`
    and `min` are asked of symbols.
    """

    def adafactor(*args: Any, **kwargs: Any) -> None:
        original: Any = original_of(internals.higher_order_function(name))
        if _is_stepping():
            names = {**original.__globals__, "max": _larger, "min": _smaller}
            original = types.FunctionType(original.__code__, names, original.__name__)
        elif otherwise is not None:
            original = otherwise
        original(*args, **kwargs)

    divert(name, adafactor)


_divert_adafactor("adafactor", _adafactor)
_divert_adafactor("adafactor foreach", None)


def __getattr__(name: str) -> object:
    raise no_such_name(__name__, name)
