"""Heartbeats of ranks: when a collective fails, they tell which rank died or stays away.

PyTorch's error names an address at best, and a time-out nobody. So each process that runs a
collective has a thread that writes to the group's store once a second. It writes a number that
grows, and where its process is. A collective that fails looks at these. A rank whose number stands
still is gone. One whose number grows, but which is elsewhere, keeps the others waiting.

PyTorch ends a wait, at the latest after the process group's time-out; so nothing hangs, and each
rank raises on its own.

Ranks that run different programs send each other unexpected data, for which gloo, whose tensors are
on CPUs, aborts the process. So collectives are compared before they are sent. The first rank writes
to the store what it sends, and later ones send the same or raise. Other backends only wait, and
start a collective faster than the store answers: of these the first of each group are compared.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from thunder_fn import torch_internals as internals
from thunder_fn.errors import DistributedError
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Equation, Literal, TensorType, Type, python_arg, type_of_value
from thunder_fn.ir.types import is_on

SECONDS = 0.5
PATIENCE = 4
"""The beats after which a rank whose number stands still is gone."""
MOMENT = 0.05
COMPUTING = "computing"
SIMULATED = "simulated"
"""The beginning of the names of groups whose ranks are not there."""
REDUCING = ("all_reduce", "reduce_scatter_tensor")
WAIT = "_c10d_functional.wait_tensor.default"
COMPARED = 100
"""The number of collectives of each group that are compared where tensors are not on CPUs."""
KEPT = 1000
"""The number of keys of the store that serve the comparisons of a group, in turn: no rank is so far
ahead of another.
"""


class _Heart:
    """The thread of this process, and where the process is."""

    def __init__(self) -> None:
        self.where, self.lock = COMPUTING, threading.Lock()
        self.thread: threading.Thread | None = None
        self.store: Any = None
        self.stores = (
            0  # their number: a process group may be made again in the store of the one before
        )
        self.counts = Counter[str]()
        self.said: dict[str, str] = {}
        self.groups: dict[int, str] = {}  # of what is sent and not yet awaited
        self.ended = threading.Event()

    def start(self) -> None:
        with self.lock:
            if self.thread is None or not self.thread.is_alive():
                if self.thread is None:
                    atexit.register(self.end)
                self.thread = threading.Thread(
                    target=self.beat, name="thunder_fn heartbeat", daemon=True
                )
                self.thread.start()

    def end(self) -> None:
        """End the thread before Python ends: one that comes back from the store after that would
        abort the process.

        So does a thread of a process group that lets go of the last collective's tensors then; it
        has a moment to do so now.
        """
        self.ended.set()
        if self.thread is not None:
            self.thread.join(SECONDS * PATIENCE)
            time.sleep(MOMENT)

    def sends(self, equation: Equation, what: str) -> str | None:
        """Return what another rank sends in place of this collective; None if that is the same,
        or is not known.
        """
        topic = f"collective {_group_of(equation)}{_ends(equation)}"
        if self.counts[topic] >= COMPARED and not all(
            is_on(type, "cpu") for type in equation.operand_types
        ):
            return None
        other = self.other_than(topic, what)
        return (
            None
            if other is None
            else f"rank {other[0]} runs {other[1]} where this rank runs {what}"
        )

    def other_than(self, topic: str, what: str) -> tuple[int, str] | None:
        """A rank that says something else at its turn in the same topic, and what; None if there
        is none yet.
        """
        store = internals.default_store()
        if store is not self.store:
            self.store, self.stores, self.counts, self.said = store, self.stores + 1, Counter(), {}
        self.counts[topic] += 1
        count = self.counts[topic]
        key = f"thunder_fn {self.stores} {topic} {count % KEPT}"
        mine = f"{count} {dist.get_rank()} {what}"
        try:
            said = store.compare_set(key, self.said.get(key, ""), mine).decode()
        except RuntimeError:  # the store is gone
            return None
        self.said[key] = said
        number, rank, theirs = said.split(" ", 2)
        return None if theirs == what or number != str(count) else (int(rank), theirs)

    def beat(self) -> None:
        """Write to the store by a connection of its own: another thread may wait for an answer
        on the first.
        """
        count, store = 0, None
        own: Any = None
        try:
            while dist.is_initialized() and not self.ended.is_set():
                if internals.default_store() is not store:
                    store = internals.default_store()
                    own = store.clone()
                count += 1
                own.set(_key(dist.get_rank()), f"{count} {self.where}")
                self.ended.wait(SECONDS)
        except (
            RuntimeError,
            ValueError,
        ):  # the store went first, as it does at the end of a process
            return


_heart = _Heart()


def join() -> None:
    """Let the other ranks know from now on that this one is alive."""
    if dist.is_available() and dist.is_initialized():
        _heart.start()


def other_than(group: str, what: str) -> tuple[int, str] | None:
    """A rank of a group that prepares something else, and what, at its turn; None if there is
    none yet.
    """
    join()
    return _heart.other_than(f"prepared {group}", what)


def _key(rank: int) -> str:
    return f"thunder_fn heartbeat {rank}"


def run_collective(
    run: Callable[[], Any],
    equation: Equation,
    tensors: Sequence[torch.Tensor],
    text: Callable[[], str],
) -> Any:
    """Run a collective of these tensors.

    Raises:
        DistributedError: it failed; names the equation (its `text`), the user's line, and the ranks
            that are gone or elsewhere. Or no rank of the group is there: PyTorch's fake groups give
            memory that nobody wrote.
    """
    is_wait = equation.op.name == WAIT or equation.op == ops.SENT
    if not is_wait:
        _check_there(equation, tensors)
    if not (dist.is_available() and dist.is_initialized()):
        return run()
    _heart.start()
    what = _text(equation, tensors)
    other = None if is_wait else _heart.sends(equation, what)
    if other is not None:
        fix = (
            "All ranks call the same functions on parameters of the same types, in the same order."
            " Start all ranks again."
        )
        raise DistributedError(
            f"{equation.op}: {other}", equation=text(), source=equation.source, fix=fix
        )
    group = (
        _heart.groups.pop(internals.storage_id(tensors[0]), None)
        if is_wait
        else _group_of(equation)
    )
    with _watched(
        str(equation.op), what, lambda: {"equation": text(), "source": equation.source}, group
    ):
        result = run()
    if group is not None and equation.op not in (ops.SEND, ops.RECEIVE) and not is_wait:
        (sent,) = result if isinstance(result, tuple) else (result,)
        _heart.groups[internals.storage_id(sent)] = group
    return result


def _check_there(equation: Equation, tensors: Sequence[torch.Tensor]) -> None:
    group, source = _group_of(equation), equation.source
    if isinstance(group, str) and group.startswith(SIMULATED):
        what = f"{equation.op}: the ranks of this group are simulated and cannot answer"
        fix = "Trace the function on each rank, and run the traces with `evaluate_ranks`."
        raise DistributedError(what, source=source, fix=fix)
    have_values = any(type(x) is torch.Tensor and not x.is_meta for x in tensors)
    if (
        have_values
        and dist.is_available()
        and dist.is_initialized()
        and internals.is_fake_group(group)
    ):
        what = f"{equation.op}: the ranks of this group are not there, and nothing is sent"
        fix = (
            "`fake_world` is for plans of meta tensors. Make a process group, such as one by the"
            " backend gloo, to run the function."
        )
        raise DistributedError(what, source=source, fix=fix)


@contextmanager
def watched(what: str) -> Generator[None]:
    """Watch this process wait for others, as in `with watched("save"):
    torch.distributed.checkpoint.save(...)`.

    Law: the code inside does what it does without, unless a rank is gone.

    Args:
        what: it does, the same on all ranks.

    Raises:
        DistributedError: that failed; names the ranks that are gone or elsewhere.

    Example:
        >>> from thunder_fn.parameters import watched
        >>> with watched("save"):  # a process without others waits for nobody
        ...     print("saved")
        saved
    """
    join()
    with _watched(what, what):
        yield


@contextmanager
def _watched(
    what: str,
    where: str,
    place: Callable[[], dict[str, Any]] = dict[str, Any],
    group: str | None = None,
) -> Generator[None]:
    """Watch as `watched` does. `where` describes this process to other ranks, `place` is the
    equation and its source for the error. With a group, only its ranks can be missed.
    """
    _heart.where = where
    try:
        yield
    except RuntimeError as error:
        fix = (
            "The group cannot be used any more: end this process, and start all ranks again from a"
            " checkpoint."
        )
        raise DistributedError(
            f"{what}: {_absent(where, group, error)}", **place(), fix=fix
        ) from error
    finally:
        _heart.where = COMPUTING


def _absent(collective: str, group: str | None, error: Exception) -> str:
    """List the ranks that are absent, in words."""
    size = dist.get_world_size()
    ranks = [*range(size)] if group is None else internals.ranks_of_group(group)
    others = [rank for rank in ranks if rank != dist.get_rank()]
    said = str(error).partition("\n")[0]
    if not others:
        return f"the collective failed on the only rank: {said}"
    try:
        before = [_seen(rank) for rank in others]
        time.sleep(SECONDS * PATIENCE)
        after = [_seen(rank) for rank in others]
    except RuntimeError:
        return (
            "the group's store cannot be reached: the process that keeps it ended, which is rank 0"
            " or the agent that started the ranks, and without it the other ranks are unknown"
        )
    beats = list(zip(others, before, after, strict=True))
    gone = [rank for rank, then, now in beats if now is None or then == now]
    if gone:
        return (
            f"{_ranks(gone)} of {size} cannot be reached: the process ended or stands still, or its"
            " machine is cut off"
        )
    away = [(rank, str(now)) for rank, _, now in beats if not str(now).endswith(collective)]
    if away:
        places = ", ".join(sorted({now.partition(" ")[2] for _, now in away}))
        return (
            f"{_ranks([rank for rank, _ in away])} of {size} did not take part in time; the process"
            f" is alive: {places}"
        )
    return (
        f"it failed on rank {dist.get_rank()} of {size}, and all others are alive and take part:"
        f" {said}"
    )


def _group_of(equation: Equation) -> Any:
    """The name of the group in which a collective is sent."""
    return python_arg(equation.args[-1], lambda var: None)


def _ends(equation: Equation) -> str:
    """The two ranks of a message, as both of them write it; nothing for other collectives."""
    if equation.op not in (ops.SEND, ops.RECEIVE):
        return ""
    own = internals.ranks_of_group(_group_of(equation)).index(dist.get_rank())
    other = python_arg(equation.args[-3], lambda var: None)
    ends = (own, other) if equation.op == ops.SEND else (other, own)
    return " from {} to {}".format(*ends)


def _text(equation: Equation, tensors: Sequence[torch.Tensor]) -> str:
    """A collective, the types of the sent tensors and the module whose parameters these are, as all
    ranks write it.
    """
    if equation.op in (ops.SEND, ops.RECEIVE):
        sent = equation.operands if equation.op == ops.SEND else equation.outputs
        return f"a message of {_on_ranks(sent[0].type)}"
    name = equation.op.name.removesuffix(".default").rpartition(".")[2]
    reduction = "".join(
        f"({arg.value})"
        for arg in equation.args[1:2]
        if isinstance(arg, Literal) and name in REDUCING
    )
    place = f" for {equation.source.module}" if equation.source and equation.source.module else ""
    rows = slice(1) if name == "all_to_all_single" else slice(0)  # each rank may send its own
    types = [_on_ranks(_without(type_of_value(tensor), rows)) for tensor in tensors]
    return f"{name}{reduction} of {', '.join(types)}{place}"


def _without(type: Type, dims: slice) -> Type:
    """A type without some of its dims."""
    assert isinstance(type, TensorType), "the type of a tensor"
    left = list(type.shape)
    del left[dims]
    return replace(type, shape=tuple(left))


def text_on_ranks(tensor: torch.Tensor) -> str:
    """The type of a tensor as all ranks write it, without the index of a device: each rank has a
    GPU of its own.
    """
    return _on_ranks(type_of_value(tensor))


def _on_ranks(type: Type) -> str:
    assert isinstance(type, TensorType), "the type of a tensor"
    return str(replace(type, device=torch.device(type.device.type)))


def _seen(rank: int) -> str | None:
    """Return the last record that a rank wrote; None if it wrote none."""
    store = internals.default_store()
    return store.get(_key(rank)).decode() if store.check([_key(rank)]) else None


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
