"""The garbage collector waits while a program is made, and is as it was afterwards."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.errors import OutsideWarning
from thunder_fn.garbage import no_collections


@pytest.fixture
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is one thread: pytest-xdist has one of its own in each worker."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


@pytest.mark.usefixtures("_one_thread")
def test_it_waits_inside_and_is_as_it_was_afterwards() -> None:
    assert gc.isenabled()
    with no_collections():
        assert not gc.isenabled()
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one is not over"
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no"), no_collections():
        raise ValueError("no")
    assert gc.isenabled()


def test_one_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_other_threads_never_see_that_it_waits() -> None:
    """The collector is the process's: it goes on where another thread could see that it does not."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with no_collections():
            assert gc.isenabled()
        seen = list[bool]()
        jitted = tfn.jit(lambda x: seen.append(gc.isenabled()) or x.sin())
        with pytest.warns(OutsideWarning, match="isenabled"):
            jitted(torch.ones(2))
        assert seen == [True]
    finally:
        done.set()
        thread.join()


@pytest.mark.usefixtures("_one_thread")
def test_jit_makes_programs_without_collections() -> None:
    seen = list[bool]()
    f = tfn.jit(lambda x: seen.append(gc.isenabled()) or x.sin())
    with pytest.warns(OutsideWarning, match="isenabled"):
        f(torch.ones(2))
    assert seen == [False]
    assert gc.isenabled()


def test_a_capture_freezes_nothing() -> None:
    """Python 3.12 begins with some frozen objects, which look as if the program had frozen them."""
    before = gc.get_freeze_count()
    f = tfn.jit(lambda x: (lambda y: y[: len(y[y > 1])])(x))
    assert f(torch.tensor([1.0, 2.0])).tolist() == [1.0]
    assert gc.get_freeze_count() == before
