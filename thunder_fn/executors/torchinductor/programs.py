"""Programs with compiled regions: which layouts regions are called with, and when compiled code
takes over.

A region is compiled for the strides of its inputs. Those follow from the strides of the program's
inputs. So one run of the program, on tensors without values, finds them for all regions, which are
then compiled together. Compiled regions give results in the layout that eager gives, so the
findings stay true. Sometimes only values decide on a layout, as after a choice, a loop, or code
that is not PyTorch's. Then regions look at the layouts of each call (`ByLayout`).

Until its regions are compiled a program runs on the torch executor.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.executors.torchinductor.codegen import Job, Strides
from thunder_fn.executors.torchinductor.compiling import Failed, Function, compile_jobs, find
from thunder_fn.executors.torchinductor.layouts import matcher
from thunder_fn.executors.torchinductor.parts import Part
from thunder_fn.executors.torchinductor.region_calls import (
    MAX_LAYOUTS,
    RECORDING,
    ByLayout,
    Calls,
    Region,
    recording,
    warn_of_failure,
)
from thunder_fn.executors.torchinductor.worker import WORKER
from thunder_fn.extend.regions import take
from thunder_fn.torch_internals import inductor as inductor_internals

Layout = tuple[Strides | None, ...]
Jobs = dict["Region", dict[tuple[Strides, ...], dict[Part, Job]]]


class Staged:
    """A program whose regions are compiled when it is first called with inputs of some layout.

    Law: it computes the program's results, at all times; which of its regions are compiled changes
        rounding only.

    `settled` says that the layouts that one run finds are those of all runs on inputs of its
    layout.
    """

    def __init__(self, run: types.FunctionType, *, tiered: bool, settled: bool) -> None:
        self.run, self.tiered, self.settled = run, tiered, settled
        self.is_symbolic = any(region.is_symbolic for region in regions_of(run))
        self.lock = threading.RLock()  # a program settles while its first call holds it
        self.ready: dict[tuple[Layout, int], Callable[..., tuple[Any, ...]]] = {}
        self.matches: Callable[..., bool] = _never
        self.num_pending = 0
        self.fast: Callable[..., tuple[Any, ...]] = run

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.matches(*inputs):
            return self.fast(*inputs)
        return self._call_slowly(inputs)

    def is_pending(self, inputs: Sequence[Any]) -> bool:
        """Test whether something is still being compiled, or has never run on inputs of this
        layout: the first run of a kernel may time ways to launch it.
        """
        return self.num_pending > 0 or type(self.ready.get(self._key(inputs))) is _First

    def _key(self, inputs: Sequence[Any]) -> tuple[Layout, int]:
        return () if self.is_symbolic else _layout(inputs), torch.get_num_threads()

    def take(self, box: list[Any]) -> tuple[Any, ...]:
        """Run on values that only the box holds."""
        if self.matches(*box):
            return take(self.fast, box)
        inputs = tuple(box)
        box.clear()
        return self._call_slowly(inputs)

    def _call_slowly(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if internals.inside_torch_func() or RECORDING.get() is not None:
            return self.run(*inputs)
        key = self._key(inputs)
        with self.lock:
            known = self.ready.get(key)
            if known is None and len(self.ready) < MAX_LAYOUTS:
                return self._first_call(key, inputs)
            if known is not None:
                self.fast, self.matches = known, _always if self.is_symbolic else matcher(inputs)
        return (known or self.run)(*inputs)

    def _first_call(self, key: tuple[Layout, int], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Find the jobs, and compile them: before the call is answered, or meanwhile."""
        calls: Calls = {}
        outputs = None
        if self.tiered or not _run_on_fakes(self.run, inputs, calls):
            self.settled &= self.tiered
            calls.clear()
            with recording(calls):
                outputs = self.run(*inputs)
        jobs = _jobs(calls)
        wanted = [job for found in jobs.values() for job in _all_jobs(found)]
        if self.tiered and len(find(wanted)) < len(set(wanted)):
            self.ready[key] = self.run
            self.num_pending += 1
            WORKER.submit(wanted).add_done_callback(
                lambda future: self._swap(key, jobs, future.result())
            )
        else:
            self.ready[key] = self._bound(key, jobs, compile_jobs(wanted))
        return self.ready[key](*inputs) if outputs is None else outputs

    def _swap(
        self, key: tuple[Layout, int], jobs: Jobs, results: dict[Job, Function | Failed]
    ) -> None:
        """Let calls run compiled code from here on."""
        new = self._bound(key, jobs, results)
        with self.lock:
            self.ready[key] = _First(new, lambda first: self._tried(key, first))
            self.matches = _never
            self.num_pending -= 1

    def _tried(self, key: tuple[Layout, int], first: _First) -> None:
        """Let calls run compiled code directly, which has run once."""
        with self.lock:
            if self.ready[key] is first:
                self.ready[key] = first.run
                self.matches = _never

    def _bound(
        self, key: tuple[Layout, int], jobs: Jobs, results: dict[Job, Function | Failed]
    ) -> Callable[..., tuple[Any, ...]]:
        """The program with compiled regions in place of those that could be compiled."""
        functions: dict[Region, Function] = {}
        fast: dict[Region, Function] = {}
        failed: dict[str, list[Region]] = {}
        for region, found in jobs.items():
            reasons = [
                result.reason
                for job in _all_jobs(found)
                if isinstance(result := results[job], Failed)
            ]
            if reasons:
                failed.setdefault(reasons[0], []).append(region)
            else:
                compiled = {
                    strides: {part: results[job] for part, job in parts.items()}
                    for strides, parts in found.items()
                }
                if self.is_symbolic:
                    functions[region] = region.variants(compiled, tiered=self.tiered)  # type: ignore[arg-type]
                else:
                    functions[region] = region.by_layout(compiled, tiered=self.tiered)  # type: ignore[arg-type]
                    fast[region] = region.bound(compiled)  # type: ignore[arg-type]
        for reason, regions in failed.items():
            warn_of_failure(self.run.__name__, regions, reason)
        looking = rebound(self.run, functions)
        if not fast or not self.settled:
            return looking
        return _Trial(
            looking, functions.values(), lambda: self._settle(key, rebound(self.run, fast))
        )

    def _settle(self, key: tuple[Layout, int], fast: Callable[..., tuple[Any, ...]]) -> None:
        """Stop looking at layouts: regions met those that they were compiled for."""
        with self.lock:
            self.ready[key] = fast
            self.matches = _never


class _First:
    """A compiled program that has not run yet."""

    def __init__(
        self, run: Callable[..., tuple[Any, ...]], tried: Callable[[_First], None]
    ) -> None:
        self.run, self.tried = run, tried

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        outputs = self.run(*inputs)
        self.tried(self)
        return outputs

    def take(self, box: list[Any]) -> tuple[Any, ...]:
        """Run on values that only the box holds."""
        outputs = take(self.run, box)
        self.tried(self)
        return outputs


class _Trial:
    """A compiled program until it has run once: its regions look at the layouts of their inputs.

    Those were found without values. An op of PyTorch may lay its results out otherwise than it says
    of tensors without values: then regions go on looking.
    """

    def __init__(
        self,
        run: Callable[..., tuple[Any, ...]],
        regions: Iterable[Function],
        settle: Callable[[], None],
    ) -> None:
        self.run, self.settle = run, settle
        self.regions = [
            (region, len(region.known)) for region in regions if isinstance(region, ByLayout)
        ]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self._then(self.run(*inputs))

    def take(self, box: list[Any]) -> tuple[Any, ...]:
        """Run on values that only the box holds."""
        return self._then(take(self.run, box))

    def _then(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if all(len(region.known) == count for region, count in self.regions):
            self.settle()
        return outputs


def regions_of(run: types.FunctionType) -> list[Region]:
    """The regions that a program, or a function that it calls, has."""
    found: list[Region] = []
    known = set[int]()

    def visit(function: types.FunctionType) -> None:
        known.add(id(function))
        for value in function.__globals__.values():
            if isinstance(value, Region):
                found.append(value)
            elif _is_ours(value) and id(value) not in known:
                visit(value)

    visit(run)
    return found


def _is_ours(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(
        "<thunder_fn"
    )


def has_regions(run: types.FunctionType) -> bool:
    """Test whether the text of a program, or of a function that it calls, calls regions."""
    return rebound(run, {}) is not run


def rebound(run: types.FunctionType, functions: Mapping[Region, Function]) -> types.FunctionType:
    """A program's function, and those that it calls, with other functions for regions."""
    known: dict[int, types.FunctionType] = {}

    def visit(function: types.FunctionType) -> types.FunctionType:
        if id(function) in known:
            return known[id(function)]
        known[id(function)] = function
        context = {name: replaced(value) for name, value in function.__globals__.items()}
        if all(
            context[name] is value and not isinstance(value, Region)
            for name, value in function.__globals__.items()
        ):
            return function
        known[id(function)] = types.FunctionType(function.__code__, context, function.__name__)
        return known[id(function)]

    def replaced(value: Any) -> Any:
        if isinstance(value, Region):
            return functions.get(value, value)
        return visit(value) if _is_ours(value) else value

    return visit(run)


def jobs_of(program: Staged, inputs: Sequence[Any]) -> list[Job]:
    """The jobs to compile for inputs like these; nothing if that takes values to know."""
    calls: Calls = {}
    found = _run_on_fakes(program.run, inputs, calls)
    return [job for jobs in _jobs(calls).values() for job in _all_jobs(jobs)] if found else []


def _jobs(calls: Calls) -> Jobs:
    return {
        region: {strides: region.jobs(strides) for strides in found}
        for region, found in calls.items()
    }


def _all_jobs(found: dict[tuple[Strides, ...], dict[Part, Job]]) -> list[Job]:
    return [job for parts in found.values() for job in parts.values()]


def _never(*inputs: Any) -> bool:
    return False


def _always(*inputs: Any) -> bool:
    return True


def _layout(inputs: Sequence[Any]) -> Layout:
    return tuple(value.stride() if isinstance(value, torch.Tensor) else None for value in inputs)


def _run_on_fakes(run: Callable[..., Any], inputs: Sequence[Any], calls: Calls) -> bool:
    """Run a program on tensors without values. False where it needs values, or something in it
    does not know fakes.
    """
    try:
        with inductor_internals.fakes_of(inputs) as fakes, recording(calls):
            run(*fakes)
    except Exception:  # noqa: BLE001  then the program is run on the values
        return False
    return True
