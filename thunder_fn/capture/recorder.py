"""The recorder: PyTorch's ops below autograd, as a tree of scopes with leaf records in them.

Three mechanisms of PyTorch stack up, outermost first:

1. a TorchFunctionMode (`scopes.py`) sees each torch function, lifts foreign tensors into tracers
    and opens scopes;
2. FunctionalTensorMode turns in-place code and views into pure ops;
3. a fake tensor mode computes types and reports every op to the recorder.

A tracer is a FunctionalTensor around a fake tensor; the recorder knows the variable of each fake
tensor.

The recorder is that fake tensor mode itself, so equations arrive directly, with no FX graph in
between. While PyTorch's own machinery runs (the backward engine, functionalization), ops arrive on
the tensors below tracers and pass unrecorded (`is_below_tracers`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.flags import Flags
from thunder_fn.capture.generators import Generators
from thunder_fn.capture.history import History
from thunder_fn.capture.hooked import Hooked
from thunder_fn.capture.kept import Kept
from thunder_fn.capture.modules import WatchedModules
from thunder_fn.capture.numbers.decided import Decisions
from thunder_fn.capture.numbers.known_values import KnownValues
from thunder_fn.capture.numbers.python_numbers import MATH, as_python
from thunder_fn.capture.outside.frames import observer
from thunder_fn.capture.outside.properties import GPU, Properties, attribute
from thunder_fn.capture.places import Snapshot
from thunder_fn.capture.recorded import Layout, Leaf, Scope, leaves_of
from thunder_fn.capture.replaced.default_dtype import promoted
from thunder_fn.capture.replaced.gradients import Gradients
from thunder_fn.capture.replaced.layout import as_found, with_plain_layout
from thunder_fn.capture.replaced.leaf_ops import ALIASES, LIFTS, PHYSICAL, RESHAPES, SAME
from thunder_fn.capture.selections import Selections
from thunder_fn.capture.supported import (
    EscapedValue,
    check_forward_mode,
    check_results,
    check_supported,
    encode_literal,
    escaped_error,
    has_settled,
    higher_order_error,
    is_wrapped,
    thread_error,
)
from thunder_fn.capture.texts import Texts
from thunder_fn.errors import EscapedTracer, ThunderError, TracedFunctionError, UnsupportedCall
from thunder_fn.ir import ops
from thunder_fn.ir.memos import kept_of_ops
from thunder_fn.ir.nesting import make_room
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import (
    Arg,
    Atom,
    Constant,
    Dim,
    Expr,
    Literal,
    NumberType,
    Op,
    Source,
    TensorType,
    Type,
    Var,
    type_of_value,
)
from thunder_fn.torch_internals.pure_twins import pure_call

_current: ContextVar[Recorder | None] = ContextVar("thunder_fn_recorder", default=None)


def current() -> Recorder | None:
    """The recorder of the capture that this thread is in, if any."""
    return _current.get()


def _nowhere() -> None:
    """The source before the capture knows how to ask for the user's line, and after its end."""


def _number_of(symbol: Any) -> Any:
    """The number for which an unbacked symbol stands, if the innermost capture knows it."""
    recorder = current()
    return None if recorder is None else recorder.values.number(symbol)


def _on_assertion(relation: Expr) -> None:
    """Tell of a demand the innermost capture that has found the sizes that it is about."""
    recorder = current()
    while recorder is not None and not recorder.decisions.concerns(relation):
        recorder = recorder.outer
    if recorder is not None:
        recorder.decisions.on_assertion(relation)


@kept_of_ops(2**16)
def _type_of_layout(layout: internals.Layout) -> TensorType:
    return TensorType(layout.dtype, layout.shape, layout.device)


def _type_of(value: Any) -> Type:
    """The type of a result; the same object for results of one layout."""
    layout = internals.layout_of(value)
    return type_of_value(value) if layout is None else _type_of_layout(layout)


CHANGED = (
    *("is_inference_mode_enabled", "is_anomaly_enabled", "is_anomaly_check_nan_enabled"),
    "is_autocast_cache_enabled",
)
"""Functions of `torch` whose answers a capture changes, or asks for itself. PyTorch's own code
is told how it is.
"""


@dataclass(slots=True)
class _CallState:
    """The state that the capture of a call and those inside it share."""

    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    answers: dict[str, Any] = field(
        default_factory=lambda: (
            {name: getattr(torch, name)() for name in CHANGED}
            | {"is_multithreading_enabled": internals.is_multithreaded()}
            | {GPU: internals.current_gpu()}
        )
    )
    """The answers of the process around the call, by the name of the question."""
    inference: list[bool] = field(default_factory=list[bool])
    """The inference modes that the function has entered."""
    generators: Generators = field(default_factory=Generators)
    runs_users: bool = False
    """Set where any function of PyTorch's may call hooks of the user's."""
    met: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """The tensors from outside, by their id."""


class Recorder:
    """Records one run of one function. Lives only inside `capture`."""

    def __init__(
        self,
        *,
        track_no_grad: bool = True,
        symbolic: bool = False,
        outer: Recorder | None = None,
        inside: str = "",
        is_same_function: bool = True,
        is_of_call: bool = False,
    ) -> None:
        self.outer, self.track_no_grad = outer, track_no_grad
        self.call = _CallState() if outer is None else outer.call
        self.symbolic = symbolic or (outer is not None and outer.symbolic)
        self.transform, self.batched = inside, frozenset[int]()
        """The transform whose function this is, and the inputs that it batches, by index."""
        self.inside = inside or ("" if outer is None else outer.inside)
        self.is_same_function = is_same_function or (outer is None and not inside)
        self.filled: Any = () if outer is None else outer.filled
        """The arguments of the call, whose containers the traced function may fill."""
        self.is_users = False
        """The function is a user's: tensors that it keeps outlive the capture."""
        self.late_error: ThunderError | None = None
        """The error of something after which Python code has gone on: a use of its tracers in
        another thread, a comparison of types, or an operator that hides it.
        """
        self.lengths: dict[Any, None] | None = None
        """The codes of functions that take a symbolic size for a number by `len(x)`, if anybody
        traces them again as copies that do not.
        """
        self._begin_scopes()
        self._forget_tensors()
        self._begin_parts(is_of_call=is_of_call and (outer is None or outer.values.is_of_call))

    def _begin_scopes(self) -> None:
        outer = self.outer
        module = "" if outer is None else outer.scope.module
        self.root = self.scope = Scope("", "root", None, 0, module=module)
        self.level: int = 0 if outer is None else outer.level + outer.scope.depth + 1
        make_room(self.level)
        self.inputs: list[Var] = []
        self.constants: list[Constant] = []
        self.states: list[tuple[torch.Tensor, int, Leaf]] = []
        self.hooked: list[Hooked] = []
        self.draws = self._next = 0
        self.detaching = False
        self.source: Source | None = None
        self.where: Callable[[], Source | None] = _nowhere
        self.function: Any = None
        self.modules = WatchedModules()
        self.around: list[Snapshot] = []
        self.module_paths: dict[torch.nn.Module, str] = (
            {} if outer is None else dict(outer.module_paths)
        )
        self.kept: Kept | None = None
        self.steps: list[AbstractContextManager[None]] = []
        self._undone: dict[tuple[int, str], Var] = {}
        self.viewed: dict[int, Var] = {}
        self.contiguous: set[int] = set()

    def _forget_tensors(self) -> None:
        """Know no tensors, as at the beginning and at the end."""
        self.arguments: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []
        self.results_from_outside: list[tuple[torch.Tensor, Any, torch.Tensor]] = []
        self._vars: dict[int, tuple[torch.Tensor, Var]] = {}
        self._lifted: dict[int, tuple[torch.Tensor, torch.Tensor, Var]] = {}
        self._given = set[int]()
        self._made: dict[int, torch.Tensor] = {}
        self._outside: dict[int, torch.Tensor] = {}
        self._tracers: list[weakref.ref[torch.Tensor]] = []
        self.hooked_inside: list[tuple[torch.Tensor, Any, Source | None]] = []

    def _begin_parts(self, *, is_of_call: bool) -> None:
        """Make PyTorch's modes, and who answers the questions that arise in them."""
        self.mode = internals.RecordingMode(
            self._on_op,
            lambda question, answer: self.decisions.on_decision(question, answer),
            lambda *asked: self.values.answer(*asked),
        )
        self.values = KnownValues(self, is_of_call=is_of_call)
        self.mode.elsewhere = self._on_other_thread
        self.mode.write = self.values.write
        self.texts = Texts() if self.outer is None else self.outer.texts
        self.properties = Properties(self)
        if self.outer is not None:
            self.mode.share_numbers(self.outer.mode)
        self.decisions = Decisions(self)
        if self.symbolic and self.mode.shape_env is None:
            self.mode.allow_data_dependent_sizes(
                _on_assertion, _number_of, is_rule=not self.track_no_grad
            )
        self.history = History(self, is_tracked=self.track_no_grad)
        self.selections = Selections(self)
        told = self.history if self.track_no_grad else None
        self.functional_mode = internals.TracerMode(
            self._remember, self._on_higher_order, told, pure_call, self._on_attribute
        )
        self.gradients = Gradients(self)
        self.flags = Flags(self)

    # ---- running ----

    @contextmanager
    def running(self, *around: AbstractContextManager[Any]) -> Generator[None]:
        """Enter PyTorch's modes around the traced function, and then `around`.

        A derived rule is the same whoever asks: with gradients on and without autocast.
        """
        token = _current.set(self)
        try:
            with ExitStack() as stack:
                for context in (
                    internals.isolated(),
                    internals.compiling(),
                    *(
                        (internals.no_autocast_cache(), internals.forward_mode_on())
                        if self.track_no_grad
                        else (internals.autocast_off(), torch.enable_grad())
                    ),
                    *((internals.symbolic_dispatch(), MATH.applied()) if self.symbolic else ()),
                    self.mode,
                    self.functional_mode,
                    *around,
                ):
                    stack.enter_context(context)
                yield
        except TracedFunctionError:
            raise
        except ThunderError:
            self.values.undo_draws()
            raise
        finally:
            _current.reset(token)
            self._close()

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Leave the capture: inside, PyTorch computes values. Casts are those of the equations."""
        with (
            setting(_current, None),
            internals.isolated(),
            internals.no_torch_function(),
            internals.autocast_off(),
            torch.no_grad(),
        ):
            yield

    @contextmanager
    def resumed(self) -> Generator[None]:
        """Enter PyTorch's modes again from a capture inside this one."""
        with internals.isolated(), self.mode, self.functional_mode:
            yield

    def _home_of(self, tensor: torch.Tensor) -> AbstractContextManager[None]:
        """The capture around this one that made a tracer: autograd takes a view of what was written
        to again when it is asked for its node, and that is recorded there.
        """
        is_own = internals.is_tracer(tensor) and not is_wrapped(tensor)
        outer = self.outer if is_own and tensor._is_view() else None
        while outer is not None and not outer.owns(tensor):
            outer = outer.outer
        return nullcontext() if outer is None else outer.resumed()

    def _close(self) -> None:
        """Close: tracers that are still alive become values that say so when used, or what is known
        of them. Only these hold something any more.
        """
        living = self.living()
        past = self.values.past() if self.is_users and living else None
        held = [one for one in living if not one.requires_grad] if past is not None else []
        variables = [self._last_var_of(one) for one in held]
        for tracer in living:
            internals.set_class(tracer, EscapedValue)
        for tracer, var in zip(held, variables, strict=True):
            if past is not None and var is not None:
                tracer.find = functools.partial(past.value, var)  # type: ignore[attr-defined]
        self.give_up_steps()
        self._forget_tensors()
        for part in (self.gradients, self.flags, self.properties, self.history, self.selections):
            part.forget()
        if past is None:
            self.values.forget()
        self.decisions.forget()
        self.module_paths.clear()
        self.kept, self.filled, self.where = None, (), _nowhere
        self.mode.elsewhere = None
        self.mode.forget()
        self.functional_mode.forget()
        if self.outer is None:
            self.call.met = {}

    def living(self) -> list[torch.Tensor]:
        """The tracers that are still alive."""
        found = (ref() for ref in self._tracers)
        return [one for one in found if internals.is_living_tracer(one)]

    def _last_var_of(self, tracer: torch.Tensor) -> Var | None:
        """The variable that a tracer stands for at the end; None if writes to its memory wait for
        what is over: a level of torch.func, or an inference mode; or its memory has been resized.
        """
        try:
            return self.var_of(tracer)
        except (EscapedTracer, RuntimeError, IndexError):
            return None

    @contextmanager
    def open(self, scope: Scope) -> Generator[None]:
        """Open a scope, to which everything recorded inside belongs."""
        outer = self.scope
        outer.items.append(scope)
        self.scope = scope
        try:
            yield
        finally:
            self.scope = outer

    def begin_step(self) -> None:
        """Begin the step of an optimizer: PyTorch's code takes its eager branches, which compute
        with Python's numbers.
        """
        self.steps.append(internals.eager_branches())
        self.steps[-1].__enter__()

    def end_step(self) -> None:
        """End the step."""
        if self.steps:
            self.steps.pop().__exit__(None, None, None)

    def give_up_steps(self) -> None:
        """End all steps, one of which has failed."""
        while self.steps:
            self.end_step()

    @contextmanager
    def detaches(self) -> Generator[None]:
        """Enter where the traced function itself detaches tensors; autograd does so for its own
        purposes.
        """
        before, self.detaching = self.detaching, True
        try:
            yield
        finally:
            self.detaching = before

    # ---- tensors and variables ----

    def fresh(self, type: Type) -> Var:
        """A new variable."""
        var = Var(self._next, type)
        self._next += 1
        return var

    def input(
        self,
        tensor: torch.Tensor,
        layout: Layout | None = None,
        *,
        is_differentiated: bool = False,
        has_value: bool = False,
    ) -> torch.Tensor:
        """A tracer for an argument; of these sizes and strides, where some of them are symbols.

        `has_value`: the tensor is that of the call, no example.
        """
        tracer, var = self._trace_like(tensor, layout, is_differentiated=is_differentiated)
        self.inputs.append(var)
        if is_differentiated:
            self.properties.differentiated.add(id(tracer))
        if has_value:
            self.values.give(var, tensor)
        self.arguments.append(tensor)
        self.given.append(tracer)
        self.gradients.take(tensor, tracer)
        self.properties.take(tensor, tracer, is_same=self.is_same_function)
        return tracer

    def number(self, symbol: Expr) -> Any:
        """PyTorch's number for an argument that is a symbol."""
        self.inputs.append(self.fresh(NumberType(symbol.kind, symbol)))
        return as_python(self.mode.size(symbol))

    def identify(self, tensor: torch.Tensor, tracer: torch.Tensor) -> None:
        """Take the tensor, though the function closes over it, for the input that this tracer
        stands for.
        """
        var = self.var_of(tracer)
        if var is not None:
            self._lifted[id(tensor)] = (tensor, tracer, var)
            self._given.add(id(tensor))

    def input_of_type(self, type: TensorType, *, is_transposed: bool = False) -> torch.Tensor:
        """A tracer for an input of which only the type is known, or that it is the transpose of
        a contiguous matrix.
        """
        tracer, var = self._trace_fake(
            internals.fake_of_type(self.mode, type, is_transposed=is_transposed)
        )
        self.inputs.append(var)
        return tracer

    def inputs_of_types(self, types: Iterable[Type]) -> list[torch.Tensor]:
        """Tracers for inputs of which only the types are known, without those that are numbers."""
        return [self.input_of_type(type) for type in types if isinstance(type, TensorType)]

    def tracer_of(self, var: Var, strides: Sequence[Dim] | None = None) -> Any:
        """A tracer for a variable that an equation binds, or its number; None for a result that
        is None. It is contiguous, unless other strides are given.
        """
        if not isinstance(var.type, TensorType):
            number = var.type.value if isinstance(var.type, NumberType) else None
            return None if number is None else as_python(self.mode.size(number))
        fake = internals.fake_of_type(self.mode, var.type, strides=strides)
        self.bind(fake, var)
        return internals.functionalize(fake, self.functional_mode)

    def lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tracer of a closed-over tensor: the same one each time. A tracer of this recorder
        stays as it is.
        """
        if self.owns(tensor):
            return tensor
        known = self._lifted.get(id(tensor))
        if known is not None:
            self.gradients.met(tensor)
            return known[1]
        if is_wrapped(tensor):
            outside = internals.is_from_outside(tensor)
            if outside is None:
                what = (
                    "a tensor of a torch.func transform around the traced function is closed over"
                    " inside another transform"
                )
                fix = "Pass it as an argument, or use thunder_fn's transforms for both."
                raise UnsupportedCall(what, source=self.source, fix=fix)
            if not outside:
                return tensor
        elif internals.is_below_tracers(tensor, self.mode):
            return tensor
        tracer, var = self._trace_like(tensor)
        owned = id(tensor) in self._made
        self.constants.append(Constant(var, tensor, owned))
        self._lifted[id(tensor)] = (tensor, tracer, var)
        self.given.append(tracer)
        if not owned:
            self.gradients.take(tensor, tracer)
            self.properties.take(tensor, tracer, is_same=True)
            if not (internals.is_tracer(tensor) or is_wrapped(tensor)):
                self.call.met[id(tensor)] = tensor
        return tracer

    def take_kept(self) -> None:
        """Watch the optimizers that a capture before this one has met."""
        if self.kept is not None:
            self.kept.take_all()

    def restore(self) -> None:
        """Give modules and optimizers back what they held before."""
        try:
            self.modules.restore()
            if self.kept is not None:
                self.kept.restore()
        finally:
            self.modules.release()

    def is_from_outside(self, tensor: torch.Tensor) -> bool:
        """Test for a tensor, no tracer, that the traced function found outside."""
        return not internals.is_tracer(tensor)

    def is_given(self, tensor: torch.Tensor) -> bool:
        """Test for a tensor that is taken for an input: the next call may have another one."""
        return id(tensor) in self._given

    def stopped(self, atom: Atom) -> Atom:
        """A constant of the atom's value, for autograd."""
        if not isinstance(atom, Var):
            return atom
        (var,) = self.emit(ops.STOP_GRADIENT, (atom,), (atom.type,), ())
        return var

    def outside_of(self, tracer: torch.Tensor) -> torch.Tensor:
        """The tensor from outside that a tracer stands for, or the tracer."""
        return self._outside.get(id(tracer), tracer)

    def know_made(self, constants: Iterable[Constant]) -> None:
        """Take over the tensors that a function used inside made itself (`torch.tensor([1,
        2])`).
        """
        self._made.update(
            (id(constant.tensor), constant.tensor) for constant in constants if constant.owned
        )

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Tell whether a function that runs inside made the tensor itself."""
        return id(tensor) in self._made

    def owns(self, tensor: torch.Tensor) -> bool:
        """Test for a tracer that was made by this recorder."""
        if not has_settled(tensor):
            raise escaped_error()
        if not isinstance(tensor, internals.FunctionalTensor):
            return False
        return internals.fake_mode_of(tensor) is self.mode

    def has_made(self, value: Any) -> bool:
        """Test for a living tracer of this recorder."""
        return internals.is_living_tracer(value) and self.owns(value)

    def _trace_like(
        self, tensor: torch.Tensor, layout: Layout | None = None, *, is_differentiated: bool = False
    ) -> tuple[torch.Tensor, Var]:
        check_supported(tensor)
        if layout is None:
            fake = internals.fake_like(self.mode, tensor)
        else:
            fake = internals.symbolic_like(self.mode, tensor, layout.shape, layout.stride)
        with internals.outside_torch_func(), self._home_of(tensor):
            requires_grad = tensor.requires_grad
            is_leaf = not requires_grad or internals.is_leaf(tensor)
            in_memory = () if is_wrapped(tensor) else internals.bits_in_memory(tensor)
        tracer, var = self._trace_fake(fake)
        if in_memory:
            is_leaf = bool(is_leaf) and not is_differentiated
            tracer = self._under_bits(tracer, var, in_memory, is_leaf)
        elif not is_leaf:
            with internals.outside_torch_func():
                internals.become_results((tracer,))
        if requires_grad and is_leaf:
            with internals.outside_torch_func():
                tracer.requires_grad_(True)
        self._outside[id(tracer)] = tensor
        self.flags.take(tracer, var)
        if requires_grad and not is_leaf:
            self.results_from_outside.append((tracer, internals.node_of(tracer), tensor))
        return tracer, var

    def _under_bits(
        self, memory: torch.Tensor, var: Var, views: Sequence[Any], is_leaf: bool
    ) -> torch.Tensor:
        """A tracer of a tensor with a conjugate or negative bit: a view of the memory, as the
        tensor is one.

        Its variable is the value, without a bit; the content of the memory is computed from that.
        """
        found: list[Leaf | Scope] = []
        value = var
        for view in views:
            new = self.fresh(value.type)
            name = PHYSICAL[str(view)]
            found.append(Leaf(ops.leaf(ops.overload_named(name)), (value,), (), (new,), None))
            self._undone[new.index, name], value = value, new
        self.root.items[:0] = found
        self.know(internals.inner_fake(memory), value)
        with internals.outside_torch_func(), torch.enable_grad():
            if not is_leaf:
                internals.become_results((memory,))
            for view in reversed(views):
                memory = view(memory)
        return memory

    def _trace_fake(self, fake: torch.Tensor) -> tuple[torch.Tensor, Var]:
        var = self.fresh(self.type_of(fake))
        self.know(fake, var)
        return internals.functionalize(fake, self.functional_mode), var

    def _remember(self, tracer: torch.Tensor) -> None:
        self._tracers.append(weakref.ref(tracer))

    def var_of(self, tensor: torch.Tensor) -> Var | None:
        """The variable that a tracer stands for now, None if it is no tracer of this recorder at
        the base level.
        """
        if isinstance(tensor, internals.FunctionalTensor):
            self.history.bring_up_to_date((tensor,))
            entry = self._vars.get(id(internals.inner_fake(tensor)))
            return entry[1] if entry else None
        if id(tensor) in self._lifted:
            return self.var_of(self._lifted[id(tensor)][1])
        return None

    def type_of(self, tracer: torch.Tensor) -> Type:
        """The type of a tracer."""
        with internals.no_torch_function():
            return type_of_value(tracer)

    def lifted(self) -> list[tuple[torch.Tensor, torch.Tensor, Var]]:
        """Closed-over tensors that are no inputs: (tensor, its tracer, its variable)."""
        inputs = {var.index for var in self.inputs}
        return [entry for entry in self._lifted.values() if entry[2].index not in inputs]

    def sources(
        self, tracers: Sequence[torch.Tensor]
    ) -> list[tuple[int | torch.Tensor, torch.Tensor]]:
        """The arguments, by position, and the tensors from outside, each with its tracer."""
        outside = [(one, tracer) for one, tracer, _ in self.lifted() if not self.is_made(one)]
        return [*enumerate(tracers), *outside]

    # ---- ops ----

    def _on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not isinstance(func, internals.OpOverload):
            self._on_higher_order(func, args, kwargs)
        if func.namespace in ("prim", "profiler"):
            return
        op = ops.leaf(func)
        if ops.may_be_defined_anew(op):
            self._on_custom_op(op)
        if op.name in SAME:
            func, args, kwargs = SAME[op.name](*args, **kwargs)
            op = ops.leaf(func)
        name = op.name
        if name in LIFTS:
            self._bind_fresh(args[0], result)
        elif (
            name == "aten.alias.default"
            and self.track_no_grad
            and not internals.inside_torch_func()
        ):
            # the user's view, such as `x[...]`; forward mode makes aliases of its own
            self._record(ops.RESHAPE, (args[0], tuple(result.shape)), {}, result)
        elif name in ALIASES and not (
            name == "aten.detach.default" and self.detaching and self.track_no_grad
        ):
            self._vars[id(result)] = (result, self.read(args[0]))
        elif name in PHYSICAL:
            self._record_physical(PHYSICAL[name], args[0], result)
        else:
            self._record(ops.RESHAPE if name in RESHAPES else op, args, kwargs, result)

    def _on_custom_op(self, op: Op) -> None:
        """Forget what is known of another op that had this name, and guard the definition."""
        ops.overload(op)
        if (watch := observer()) is not None:
            watch.called_custom_op(op)

    def _on_other_thread(self, func: Any) -> ThunderError:
        """Refuse a use of a tracer in a thread that is not the capture's. The thread and the
        capture raise it.
        """
        self.late_error = thread_error(func, self.where())
        return self.late_error

    def _on_attribute(self, tracer: torch.Tensor, name: str) -> Any:
        return attribute(self, tracer, name)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Test whether the trace computes with this tensor from outside."""
        return id(tensor) in self._lifted

    def counterpart(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tracer of a tensor from outside that the trace computes with, or the tensor."""
        known = self._lifted.get(id(tensor))
        return tensor if known is None else known[1]

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Test whether the function has written to this tensor from outside."""
        known = self._lifted.get(id(tensor))
        return known is not None and self.var_of(known[1]) != known[2]

    def _on_higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise higher_order_error(func, args, self.source)

    def _record_physical(self, name: str, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Record a change of bits: values in a trace have no conjugate or negative bit; twice is
        not at all.
        """
        if not isinstance(tensor, torch.Tensor):  # a number
            value = (-tensor if name == "aten.neg.default" else tensor.conjugate(),)
            self._record(ops.leaf(ops.aten.scalar_tensor.default), value, {}, result)
            return
        before = self._vars[id(tensor)][1] if id(tensor) in self._vars else self._foreign(tensor)
        if (before.index, name) in self._undone:
            self.bind(result, self._undone[before.index, name])
            return
        self._record(ops.leaf(ops.overload_named(name)), (tensor,), {}, result)
        self._undone[self._vars[id(result)][1].index, name] = before

    def _bind_fresh(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Bind a tensor that the function makes from Python data, as by `torch.tensor([1, 2])`."""
        known = self._vars.get(id(tensor))
        self.know(result, known[1] if known is not None else self.constant(tensor, owned=True))

    def _record(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if ops.is_factory(op) and isinstance(result, torch.Tensor):
            kwargs = {**kwargs, "dtype": result.dtype, "device": result.device}
        with internals.no_torch_function():
            plain = with_plain_layout(self, op.name, args, kwargs, result)
        if plain is not None:
            for value, var in zip(ops.flatten_result(result), plain, strict=True):
                self.bind(value, var)
            if ops.is_view(op):
                self.viewed.update((var.index, self.read(args[0])) for var in plain)
            return
        new_args = tuple(self.encode(arg) for arg in args)
        new_kwargs = tuple((key, self.encode(value)) for key, value in kwargs.items())
        if op.is_foreign:
            new_args = as_found(self, op, args, new_args)
        values = () if ops.returns_nothing(op) else ops.flatten_result(result)
        check_results(op, values, self.source)
        if self.track_no_grad and not internals.is_forward_mode_on():
            check_forward_mode(self.source)
        if ops.is_random(op):
            self.draws += 1
        types = tuple(map(_type_of, values))
        new_args, new_kwargs = promoted(self, new_args, new_kwargs, types)
        outputs = tuple(map(self.fresh, types))
        leaf = Leaf(op, new_args, new_kwargs, outputs, self.source)
        self.append(leaf)
        if ops.is_view(op) and op != ops.STOP_GRADIENT and isinstance(new_args[0], Var):
            self.viewed.update((var.index, new_args[0]) for var in outputs)
        for value, var in zip(values, outputs, strict=True):
            self.bind(value, var)
        self.history.recorded(leaf)

    def draws_for(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Test whether these tensors depend on random numbers that are drawn in the capture, other
        than those of a generator that is made inside.
        """
        wanted = {var.index for tensor in tensors if (var := self.var_of(tensor)) is not None}
        for leaf, _ in reversed([*leaves_of(self.root)]):
            if wanted.isdisjoint(var.index for var in leaf.outputs):
                continue
            if ops.draws(leaf) and dict(leaf.kwargs).get("generator") in (None, Literal(None)):
                return True
            wanted.update(var.index for var in leaf.operands)
        return False

    def append(self, leaf: Leaf) -> None:
        """Append a leaf; the unbacked sizes and numbers that it finds are known from now on."""
        self.scope.items.append(leaf)
        if self.symbolic:
            self.decisions.recorded(leaf)

    def bind(self, value: Any, var: Var) -> None:
        """`value`, a fake tensor, is what `var` stands for from now on."""
        if isinstance(value, torch.Tensor):
            self.know(value, var)
            self.history.bound(var)

    def know(self, fake: torch.Tensor, var: Var) -> None:
        """`fake` stands for `var`, whose history is known."""
        self._vars[id(fake)] = (fake, var)

    def known(self, fake: torch.Tensor) -> Var:
        """The variable that a fake tensor of this recorder stands for, whatever its history."""
        return self._vars[id(fake)][1]

    def fakes(self) -> Iterator[tuple[internals.FakeTensor, Var]]:
        """The fake tensors of this recorder, each with its variable."""
        return (
            (fake, var)
            for fake, var in self._vars.values()
            if isinstance(fake, internals.FakeTensor)
        )

    def emit(
        self,
        op: Op,
        args: tuple[Arg, ...],
        types: tuple[Type, ...],
        kwargs: tuple[tuple[str, Arg], ...],
    ) -> tuple[Var, ...]:
        """Record an equation whose results no tracer stands for yet."""
        outputs = tuple(self.fresh(type) for type in types)
        self.scope.items.append(Leaf(op, args, kwargs, outputs, self.source))
        return outputs

    def constant(self, tensor: torch.Tensor, *, owned: bool = False) -> Var:
        """The variable of a tensor from outside, or of one that capture or the function made."""
        var = self.fresh(type_of_value(tensor))
        self.constants.append(Constant(var, tensor, owned=owned))
        return var

    def encode(self, value: Any) -> Arg:
        """A runtime argument as one of an equation: tensors as variables, the rest as literals."""
        if isinstance(value, torch.Tensor):
            return self.read(value)
        if isinstance(value, (list, tuple)):
            return tuple(self.encode(item) for item in value)
        if isinstance(value, torch.Generator):
            value = self.call.generators.used(value)
        return encode_literal(value, self.source)

    def read(self, tensor: torch.Tensor) -> Var:
        """The variable of a fake tensor, stopped where gradients stop."""
        entry = self._vars.get(id(tensor))
        if entry is None:
            return self._foreign(tensor)
        return self.history.read(entry[1])

    def _foreign(self, tensor: torch.Tensor) -> Var:
        """A tensor that reached the dispatcher without passing a torch function."""
        if isinstance(tensor, internals.FakeTensor):
            raise escaped_error()
        known = self.var_of(tensor)
        if known is not None:
            return self.history.read(known)
        check_supported(tensor)
        self.know(tensor, self.constant(tensor))
        return self.known(tensor)
