"""pipeline: the step of a loss, cut into stages that run on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.api.calling import Transformed
from thunder_fn.api.captures import Plan, planned
from thunder_fn.api.gradients import check_loss, differentiated_leaves
from thunder_fn.capture import EVERY_LEAF, Captured, capture, current, pytree
from thunder_fn.capture.apply import without_values
from thunder_fn.capture.failures import check_argument
from thunder_fn.capture.rewriting import is_to_be_fused
from thunder_fn.distributed.groups import Group, group_of
from thunder_fn.errors import RewriteError, callable_name, is_int, kind_of
from thunder_fn.interpreters.pipeline.programs import program_of
from thunder_fn.interpreters.pipeline.schedules import SCHEDULES, Schedule, interleaved
from thunder_fn.interpreters.pipeline.stages import Stage, stages_of
from thunder_fn.ir.trace import TensorType, Trace, Var, cut, is_differentiable, type_of_value
from thunder_fn.jitted import Jitted

Cuts = tuple[str, ...] | int


@dataclass(frozen=True)
class _OfFirst:
    """A function of parameters and all micro-batches that reads the first of them."""

    fn: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return callable_name(self.fn)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def __call__(self, params: Any, *parts: Any) -> Any:
        return self.fn(params, *parts[0])


@dataclass(frozen=True)
class Pipelined(Transformed):
    """The step of a loss on one rank of a pipeline. See `pipeline`.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> f = lambda params, x: (x @ params[0] @ params[1]).square().mean()
        >>> first, second = tfn.parameters.simulated(2)
        >>> step = tfn.pipeline(f, first, stages=2, micro=2)
        >>> step.schedule.stages, step.schedule.owners
        (2, (0, 1))
    """

    fn: Callable[..., Any]
    group: Group
    cuts: Cuts
    schedule: Schedule

    def __call__(self, /, params: Any, *batch: Any) -> Any:
        args = self._arguments(params, batch)
        recorder = current()
        if recorder is None and not internals.is_intercepted():
            with torch.no_grad():
                return self._run(args)
        if recorder is not None and not recorder.inside:  # under jit, as outside: no graph
            args = pytree.tree_map(_without_graph, args)
        return self._run(args)

    def _run(self, args: tuple[Any, ...]) -> Any:
        return planned(self, args, {}, lambda captured: self._plan(captured, args)[0])

    def prepare(self, params: Any, *batch: Any) -> Any:
        """The parameters of this rank, and tensors without values, on the device `meta`, in the
        place of others.

        Args:
            params: of the whole function; the same on all ranks.
            batch: as for a call.

        Example:
            >>> import torch, thunder_fn as tfn
            >>> f = lambda params, x: (x @ params[0] @ params[1]).square().mean()
            >>> first, second = tfn.parameters.simulated(2)
            >>> step = tfn.pipeline(f, first, stages=2, micro=2)
            >>> own = step.prepare([torch.ones(3, 4), torch.ones(4, 2)], torch.ones(6, 3))
            >>> [(tuple(w.shape), w.device.type) for w in own]
            [((3, 4), 'cpu'), ((4, 2), 'meta')]
        """
        own = self.own(params, *batch)
        leaves, spec = pytree.flatten(params)
        others = zip(leaves, _trained(params), strict=True)
        kept = [
            leaf.to("meta") if trained and at not in own else leaf
            for at, (leaf, trained) in enumerate(others)
        ]
        return pytree.unflatten(spec, kept)

    def own(self, params: Any, *batch: Any) -> tuple[int, ...]:
        """The places of this rank's parameters among the leaves of all."""
        return self._plan(capture, self._arguments(params, batch))[1]

    def _arguments(self, params: Any, batch: Sequence[Any]) -> tuple[Any, ...]:
        """The parameters, and the micro-batches."""
        leaves, spec = pytree.flatten(list(batch))
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            what = (
                "pipeline: a step is called on parameters and a batch, given no tensor of a batch"
            )
            raise RewriteError(what, fix="Write `step(params, x, y)`.")
        split = [_parts(leaf, self.schedule.micro) for leaf in leaves]
        parts = [pytree.unflatten(spec, list(part)) for part in zip(*split, strict=True)]
        return params, *parts

    def _plan(
        self, capture: Callable[..., Captured], args: tuple[Any, ...]
    ) -> tuple[Plan, tuple[int, ...]]:
        """The plan of a call, and the places of this rank's parameters among all."""
        captured, _, of_rank = self._in_stages(capture, args)
        new, own = of_rank(self.group)
        spec, count = pytree.flatten(args[0])[1], len(_places(args)[0])

        def arrange(inputs: Sequence[Any], outputs: tuple[Any, ...]) -> Any:
            found = dict(zip(own, outputs[1:], strict=True))
            return outputs[0], pytree.unflatten(spec, [found.get(at) for at in range(count)])

        return Plan(self.__name__, captured, _as_given(new, args), arrange), own

    def programs(
        self, params: Any, *batch: Any
    ) -> tuple[tuple[Stage, ...], tuple[tuple[Trace, tuple[int, ...]], ...]]:
        """The stages, and the traces of all ranks, each with the places of the rank's parameters
        among all. The loss is captured once.

        Example:
            >>> import torch, thunder_fn as tfn
            >>> f = lambda params, x: (x @ params[0] @ params[1]).square().mean()
            >>> first, second = tfn.parameters.simulated(2)
            >>> step = tfn.pipeline(f, first, stages=2, micro=2)
            >>> params = [torch.ones(3, 4), torch.ones(4, 2)]
            >>> stages, ranks = step.programs(params, torch.ones(6, 3))
            >>> len(stages), [own for _, own in ranks]
            (2, [(0,), (1,)])
        """
        _, stages, of_rank = self._in_stages(capture, self._arguments(params, batch))
        ranks = (replace(self.group, rank=rank) for rank in range(self.group.size))
        return stages, tuple(map(of_rank, ranks))

    def _in_stages(
        self, capture: Callable[..., Captured], args: tuple[Any, ...]
    ) -> tuple[Captured, tuple[Stage, ...], Callable[[Group], tuple[Trace, tuple[int, ...]]]]:
        """The captured loss, its stages, and a function from a rank to its trace and the places of
        its parameters.
        """
        name, trained = self.__name__, _trained(args[0])
        if not any(trained):
            differentiated_leaves(args, (0,), name)  # says so
        captured = capture(
            _OfFirst(self.fn),
            (_without_values(args), *args[1:]),
            {},
            inside="grad",
            differentiated=[at for at, flag in enumerate(trained) if flag],
            known=EVERY_LEAF,
        )
        check_loss(captured, False, self.fn, name)
        if not is_differentiable(loss := captured.trace.output_types[0]):
            what = f"{name}: the loss must be a real number, whose mean is taken, and it is {loss}"
            raise RewriteError(what, fix="Return the loss before it is rounded or compared.")
        if captured.writes:
            what = f"{name}: the function writes to tensors, such as buffers, on each micro-batch"
            raise RewriteError(what, fix="Return what changes, or keep buffers as they are.")
        wanted = (*trained, *(False,) * (len(captured.trace.inputs) - len(trained)))
        places, is_fused = _places(args), is_to_be_fused()
        count = len(places[0])
        stages = stages_of(captured.trace, self.cuts, wanted, params=count, fused=is_fused)
        of_rank: Callable[[Group], tuple[Trace, tuple[int, ...]]] = lambda group: program_of(
            captured.trace, stages, self.schedule, group, places[1:], wanted
        )
        return captured, stages, of_rank


def _trained(params: Any) -> tuple[bool, ...]:
    """For each leaf of the parameters, whether it has a gradient; others, such as the number of a
    rank, are each rank's own.
    """
    leaves = pytree.flatten(params)[0]
    for path, leaf in zip(pytree.paths(params, "args[0]"), leaves, strict=True):
        check_argument(leaf, lambda path=path: path)
    return tuple(is_differentiable(type_of_value(leaf)) for leaf in leaves)


def _without_graph(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _as_given(trace: Trace, args: tuple[Any, ...]) -> Trace:
    """The trace, with the types of the arguments: parameters of other ranks are on `meta`."""
    leaves = pytree.tensors_in(args)
    given = [Var(at, type_of_value(leaf)) for at, leaf in enumerate(leaves)]
    return cut(trace, inputs=(*given, *trace.inputs[len(given) :]))


def _places(args: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """For each argument, the places of its tensors among those of all."""
    count, found = 0, list[tuple[int, ...]]()
    for arg in args:
        end = count + len(pytree.tensors_in(arg))
        found.append(tuple(range(count, end)))
        count = end
    return tuple(found)


def _parts(leaf: Any, micro: int) -> Sequence[Any]:
    """The micro-batches of a leaf of the batch: its rows; the whole of what has none."""
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return (leaf,) * micro
    if leaf.shape[0] % micro:
        what = f"pipeline: {leaf.shape[0]} examples are no {micro} micro-batches of one size"
        raise RewriteError(what, fix="Give a batch that `micro` divides.")
    return leaf.unflatten(0, (micro, leaf.shape[0] // micro)).unbind()


def _without_values(args: tuple[Any, ...]) -> Any:
    """The parameters as all ranks see them: without values, and those of other ranks on the device
    of this one's tensors.
    """
    leaves, spec = pytree.flatten(args[0])
    tensors = pytree.tensors_in(args)
    device = next((one.device for one in tensors if not one.is_meta), torch.device("meta"))
    types = [type_of_value(leaf) for leaf in leaves]
    known = [replace(one, device=device) if isinstance(one, TensorType) else one for one in types]
    return pytree.unflatten(spec, without_values(known))


def pipeline(
    f: Any,
    mesh: Any,
    *,
    stages: Sequence[str] | int | None = None,
    micro: int | None = None,
    schedule: str | Schedule = "1f1b",
) -> Any:
    """Cut a loss into stages, one or several for each rank of a mesh; run them on micro-batches.

    Law: on every rank the value is that of eager's loop over micro-batches. The gradients on each
        rank are those that ``(f(params, *part) / micro).backward()`` adds up, to the bit where a
        parameter is read by one stage. Random numbers are each rank's own.

    Args:
        f: a loss of `(params, *batch)`, the mean over examples; jitted or not.
        mesh: a DeviceMesh of one dim, such as `mesh["pp"]`. Every rank calls the step, on the same
            batch.
        stages: the modules with which the second stage and later ones begin, such as
            `["layers.4", "layers.8"]`; or their number, for stages of about the same cost. Left
            out, there is one stage for each rank (two for `"interleaved"`). Stage i is on rank
            ``i % ranks``.
        micro: the number of micro-batches, which are rows of the batch. By default two for each
            rank.
        schedule: `"gpipe"`, `"1f1b"`, `"interleaved"`, `"zero_bubble"`, or a `Schedule`.

    Returns:
        The step, a function of `(params, *batch)` that returns the loss and the gradients, None
            for parameters of other ranks. `step.prepare(params, *batch)` keeps the parameters of
            this rank. `step.schedule` is a table that prints. A jitted function's step is jitted.

    Raises:
        RewriteError: there is no such schedule or module; or the number of stages, of ranks or of
            examples does not fit.
        DistributedError: the ranks of a schedule would wait for each other.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> f = lambda params, x: (x @ params[0] @ params[1]).square().mean()
        >>> first, second = tfn.parameters.simulated(2)
        >>> step = pipeline(f, first, stages=2, micro=3)
        >>> print(step.schedule)
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Source: `thunder_fn.interpreters.pipeline.schedules` names the papers.
    """
    group = group_of(mesh)
    cuts = _read_stages(stages)
    count = cuts if isinstance(cuts, int) else None if cuts is None else len(cuts) + 1
    known = _read_schedule(schedule, group.size, count, micro)
    chosen = known.stages if cuts is None else cuts
    if isinstance(f, Jitted):
        return f.with_function(Pipelined(f.fn, group, chosen, known))
    if not callable(f):
        raise RewriteError(f"pipeline: expected a function of (params, *batch), given {kind_of(f)}")
    return Pipelined(f, group, chosen, known)


def _read_stages(given: Any) -> Cuts | None:
    """The option for where stages begin.

    Raises:
        RewriteError: it is neither a number nor names.
    """
    if given is None or is_int(given, 1):
        return given
    is_names = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_names or not all(isinstance(name, str) for name in given):
        what = f"pipeline: stages is a number from 1 on or names of modules, given {given!r}"
        raise RewriteError(what, fix='Write `stages=["layers.4", "layers.8"]`.')
    return tuple(given)


def _read_schedule(
    given: str | Schedule, ranks: int, stages: int | None, micro: int | None
) -> Schedule:
    """Return the schedule for these numbers of ranks, stages and micro-batches.

    Raises:
        RewriteError: these do not fit together.
    """
    if isinstance(given, Schedule):
        found = given
    elif given not in SCHEDULES:
        what = f"pipeline: schedule is {', '.join(map(repr, SCHEDULES))} or a Schedule"
        raise RewriteError(f"{what}, given {given!r}")
    else:
        micro = 2 * ranks if micro is None else micro
        if not is_int(micro, 1):
            raise RewriteError(f"pipeline: micro is a number from 1 on, given {micro!r}")
        chunks = (stages or 0) // ranks
        is_chunked = given == "interleaved" and chunks > 0
        found = interleaved(ranks, micro, chunks) if is_chunked else SCHEDULES[given](ranks, micro)
    sizes = (
        ("ranks", len(found.rows), ranks),
        ("stages", found.stages, found.stages if stages is None else stages),
        ("micro-batches", found.micro, found.micro if micro is None else micro),
    )
    for name, has, asked in sizes:
        if has != asked:
            raise RewriteError(
                f"pipeline: the schedule has {has} {name}, and there are {asked}",
                fix="Give one stage for each rank; a multiple of that for `interleaved`.",
            )
    return found
