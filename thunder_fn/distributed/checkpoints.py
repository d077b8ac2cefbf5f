"""Checkpoints that are whole or not there, for runs that lose ranks.

`torch.distributed.checkpoint` writes a folder. The folder has another name until all ranks have
written, and is renamed then, which is atomic. So a run that is killed while it saves goes on from
the checkpoint before, on any number of ranks.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thunder_fn.distributed.heartbeat import watched
from thunder_fn.errors import DistributedError

_NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """The checkpoints of a run, in a folder that all ranks see.

    Law: whenever processes are killed, `load` reads the whole state of the last `save` that all
    ranks have ended, or of the one after.

    Args:
        folder: made if it is not there.
        keep: how many are kept, the last ones.

    Example:
        >>> import tempfile, torch
        >>> from thunder_fn.parameters import Checkpoints
        >>> saved = Checkpoints(tempfile.mkdtemp())
        >>> saved.load({"w": torch.zeros(2)})  # there is none
        0
        >>> saved.save(10, {"w": torch.ones(2)})
        >>> state = {"w": torch.zeros(2)}
        >>> saved.load(state), state["w"]
        (10, tensor([1., 1.]))
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep
        self._pending: tuple[int, Any] | None = None
        self._group: Any = None

    def save(self, step: int, state: Mapping[str, Any], *, wait: bool = True) -> None:
        """Save the state after `step` steps. All ranks call this.

        Args:
            state: as for `torch.distributed.checkpoint.save`, such as `sharded_state_dict()`.
            wait: False writes while training goes on. The next `save`, or `finish`, ends it.

        Raises:
            DistributedError: a rank does not take part. The checkpoint before is still there.
        """
        from torch.distributed.checkpoint.state_dict_saver import async_save, save  # half a second

        self.finish()
        partial = self.folder / f"step-{step}.partial"
        if _is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
        alone = not dist.is_initialized()
        options: dict[str, Any] = {"checkpoint_id": partial, "no_dist": alone}
        with watched(f"save of step {step}"), _alone_quietly():
            if wait:
                save(dict(state), **options)
                self._end(step)
            else:
                group = None if alone else self._own_group()
                self._pending = step, async_save(dict(state), process_group=group, **options)

    def finish(self) -> None:
        """Wait until the save that still writes has ended; all ranks call it."""
        if self._pending is None:
            return
        step, pending = self._pending
        self._pending = None
        with watched(f"end of the save of step {step}"):
            pending.result()
            self._end(step)

    def load(self, state: dict[str, Any]) -> int:
        """Read the last checkpoint into a state; return its step, 0 if there is none. All ranks
        call it.

        Raises:
            DistributedError: a rank does not take part.
        """
        from torch.distributed.checkpoint.state_dict_loader import load

        found = [self.steps()[-1:] if _is_first() else ()]
        with watched("load of the last checkpoint"), _alone_quietly():
            if dist.is_initialized():
                dist.broadcast_object_list(found, src=0)
            if not found[0]:
                return 0
            (step,) = found[0]
            alone = not dist.is_initialized()
            load(state, checkpoint_id=self.folder / f"step-{step}", no_dist=alone)
        return step

    def steps(self) -> tuple[int, ...]:
        """The steps of which there is a checkpoint."""
        names = (path.name for path in self.folder.glob("step-*"))
        return tuple(sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name))))

    def _own_group(self) -> Any:
        """A group for a save beside training: in one group the collectives of both would mix."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def _end(self, step: int) -> None:
        """Give the folder its name, and delete old ones. The metadata, which is written last, says
        that all ranks have written.
        """
        if not _is_first():
            return
        whole, partial = self.folder / f"step-{step}", self.folder / f"step-{step}.partial"
        if not (partial / ".metadata").exists():
            raise DistributedError(
                f"the checkpoint of step {step} has no metadata",
                fix="Save to a folder that all ranks see.",
            )
        if whole.exists():  # saved again after a step back
            _drop(whole)
        partial.rename(whole)
        for old in self.steps()[: -self.keep]:
            _drop(self.folder / f"step-{old}")


def _drop(path: Path) -> None:
    """Delete a checkpoint; its name goes first, so that none is seen in part."""
    dropped = path.with_name(f"{path.name}.dropped")
    shutil.rmtree(dropped, ignore_errors=True)
    path.rename(dropped)
    shutil.rmtree(dropped, ignore_errors=True)


@contextmanager
def _alone_quietly() -> Generator[None]:
    """Suppress the warning for a process without others."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
