"""The garbage collector waits while a program is made, and is as it was afterwards."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.capture.garbage import no_collections


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


def test_it_waits_for_the_last_thread() -> None:
    inside, done = threading.Event(), threading.Event()

    def make() -> None:
        with no_collections():
            inside.set()
            done.wait()

    thread = threading.Thread(target=make)
    with no_collections():
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    done.set()
    thread.join()
    assert gc.isenabled()


def test_jit_makes_programs_without_collections() -> None:
    seen = list[bool]()
    f = tfn.jit(lambda x: seen.append(gc.isenabled()) or x.sin())
    f(torch.ones(2))
    assert seen == [False]
    assert gc.isenabled()
