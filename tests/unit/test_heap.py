"""Programs that run again find the memory of the last call on the heap."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from thunder_fn.executors.heap import is_tuned

COMMON = """
import resource, torch
import thunder_fn as tfn

torch.set_num_threads(1)


def faults(calls):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        f(x)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


"""
GRADIENT = """
f = tfn.jit(tfn.grad(lambda x: (x.sin().exp().cos() * x).sum()))
x = torch.randn(1 << 20)
faults(10)
print(min(faults(10) for _ in range(5)))
"""
"""A piece that is freed in another order than before may be given back once, so the quietest of five rounds counts."""

LARGE = """
f = tfn.jit(lambda x: [x + 1, x + 2, x + 3, x + 4])
x = torch.randn(6 << 20)
faults(3)
print(min(faults(2) for _ in range(3)))
"""
"""Results of 100 MB are dropped at once."""


def faults_of(code: str, **environment: str) -> int:
    command = [sys.executable, "-c", COMMON + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return int(done.stdout)


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library, with another heap")


@glibc
def test_a_call_faults_in_no_pages() -> None:
    pages = (1 << 20) * 4 // 4096
    assert faults_of(GRADIENT) < pages, "less than one of the tensors, in ten calls"


@glibc
def test_what_is_freed_at_once_may_be_large() -> None:
    pages = (6 << 20) * 4 // 4096
    assert faults_of(LARGE) < pages, "less than one of the tensors, in two calls"
    assert faults_of(LARGE, MALLOC_TRIM_THRESHOLD_="65536") > 4 * pages, "the user has said otherwise"


def test_who_has_tuned_the_heap() -> None:
    assert not is_tuned({"GLIBC_TUNABLES": "glibc.rtld.nns=2", "MALLOC_CONF": "narenas:1", "MALLOC_ARENA_MAX": "2"})
    assert is_tuned({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=65536"})
    assert is_tuned({"MALLOC_MMAP_THRESHOLD_": "65536"}) and not is_tuned({"MALLOC_MMAP_THRESHOLD_": ""})
