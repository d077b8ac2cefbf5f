"""PyTorch's operator database through thunder_fn: how many samples agree with eager, and which do not.

python -m tests.ops.sweep                                  3 plain samples for each operator and dtype, 1 of other kinds
python -m tests.ops.sweep --limit 0                        all samples (some hours of one core)
python -m tests.ops.sweep --ops linalg_svd,stft --verbose  some operators, with tracebacks
python -m tests.ops.sweep --seed 3                         samples with other numbers in them
python -m tests.ops.sweep --what jvp vmap --peer           forward mode and batching, torch.func on the same samples beside
python -m tests.ops.sweep --device cuda                    on a GPU, or on the simulated one (tests/nullgpu)

The sweeps are forward and gradient, which are bitwise and up to rounding against eager, and the transforms of
`compositions.py` on plain samples.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import traceback
import warnings
from collections.abc import Iterator

import torch

import thunder_fn as tfn
from tests.ops.agreement import SWEEPS, Outcome
from tests.ops.compositions import TRANSFORMS, run
from tests.ops.exceptions import EXEMPTIONS, Exemption, exemption
from tests.ops.samples import DTYPES, KINDS, OPS, Case, cases

WITHOUT_GRAD = ("forward", "vmap")
"""The sweeps that take no derivative."""


def outcome(case: Case, what: str, *, verbose: bool = False) -> Outcome:
    """The outcome of a case; an error of ours is a failure."""
    if what in TRANSFORMS:
        return run(tfn, what, case, verbose=verbose)
    try:
        return SWEEPS[what](case)
    except Exception as error:  # noqa: BLE001
        if verbose:
            traceback.print_exc()
        return Outcome("error", f"{type(error).__name__}: {' '.join(str(error).split())}")


def is_good(found: Outcome, what: str, exempt: Exemption | None) -> bool:
    """Bitwise forward; derivatives, batches, and what an exception says is so, up to rounding."""
    return found.status == "passed" or (
        found.status == "close" and (what != "forward" or (exempt is not None and exempt.close))
    )


def is_excepted(found: Outcome, exempt: Exemption | None) -> bool:
    """An exception excuses an error, and other values only if it says so."""
    return exempt is not None and (found.status == "error" or exempt.differs)


def cases_of(
    name: str,
    what: str,
    limit: int | None,
    kinds: tuple[str, ...] = KINDS,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    number: int = 0,
    device: str = "cpu",
) -> Iterator[Case]:
    """The cases of an operator for one sweep."""
    op, grad = OPS[name], what not in WITHOUT_GRAD
    supported = op.supported_backward_dtypes(device) if grad else op.supported_dtypes(device)
    if grad and not op.supports_autograd:
        return
    for dtype in dtypes:
        if dtype in supported:
            chosen = ("plain",) if what in TRANSFORMS else kinds
            yield from cases(name, dtype, limit, requires_grad=grad, kinds=chosen, number=number, device=device)


def failures(
    name: str,
    what: str,
    limit: int | None,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    kinds: tuple[str, ...] = KINDS,
    device: str = "cpu",
) -> list[str]:
    """The cases of an operator that neither agree with eager nor are excepted, with what is wrong."""
    found: list[str] = []
    for case in cases_of(name, what, limit, kinds, dtypes, device=device):
        result, exempt = outcome(case, what), exemption(case, what)
        if result.status != "skipped" and not is_good(result, what, exempt) and not is_excepted(result, exempt):
            found.append(f"{case}: {result.why or result.status}")
    return found


def peer(case: Case, what: str) -> bool:
    """Is torch.func right on this sample, by the same oracle? `gradient`: does torch.func.vjp run on it?"""
    if what in TRANSFORMS:
        return run(torch.func, what, case).status in ("passed", "close")
    return run(torch.func, "vjp", case).status != "error"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", default=list(SWEEPS), choices=[*SWEEPS, *TRANSFORMS, "transforms"])
    parser.add_argument("--limit", type=int, default=3, help="plain samples for each operator and dtype, 0 for all")
    parser.add_argument("--ops", help="names, separated by commas")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--dtypes", default="float32,float64,complex64")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop a sweep after so long")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="other numbers in the samples")
    parser.add_argument("--peer", action="store_true", help="torch.func beside it")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    what = [sweep for name in options.what for sweep in (TRANSFORMS if name == "transforms" else (name,))]
    return 1 if sum(sweep(name, options) for name in what) else 0


def sweep(what: str, options: argparse.Namespace) -> int:
    """One sweep, printed; the number of failures without an exception."""
    counts: collections.Counter[str] = collections.Counter()
    groups: dict[str, list[str]] = collections.defaultdict(list)
    excepted: collections.Counter[Exemption] = collections.Counter()
    only: dict[str, set[str]] = {"thunder_fn": set(), "torch.func": set()}
    dtypes = tuple(getattr(torch, name) for name in options.dtypes.split(","))
    beside = options.peer and what != "forward"
    start = time.perf_counter()
    for name in options.ops.split(",") if options.ops else OPS:
        if time.perf_counter() - start > options.seconds:
            print(f"stopped before {name}")
            break
        kinds = tuple(options.kinds.split(","))
        for case in cases_of(name, what, options.limit or None, kinds, dtypes, options.seed, options.device):
            result, exempt = outcome(case, what, verbose=options.verbose), exemption(case, what)
            if result.status == "skipped":
                counts["skipped"] += 1
                continue
            good = is_good(result, what, exempt)
            inside = exempt is None or not exempt.outside
            counts["samples"] += 1
            counts["inside"] += inside
            counts["passed, inside"] += good and inside
            counts["excepted samples"] += exempt is not None
            if beside:
                theirs = peer(case, what)
                counts["peer"] += theirs
                counts["peer, inside"] += theirs and inside
                if theirs != good:
                    only["torch.func" if theirs else "thunder_fn"].add(name)
            if good:
                counts["passed"] += 1
                counts["bitwise"] += result.status == "passed"
                counts["passed, not excepted"] += exempt is None
            elif exempt is not None and is_excepted(result, exempt):
                excepted[exempt] += 1
            else:
                groups[result.why or result.status].append(str(case))
    total = max(counts["samples"], 1)
    rest = max(total - counts["excepted samples"], 1)
    print(f"{what}: {counts['passed']} of {total} samples are right ({100 * counts['passed'] / total:.2f} %)")
    inside = max(counts["inside"], 1)
    share = f"{counts['passed, inside']} of {inside} ({100 * counts['passed, inside'] / inside:.2f} %)"
    if beside:
        print(f"  torch.func: {counts['peer']} of {total} ({100 * counts['peer'] / total:.2f} %)")
        share += f"; torch.func {counts['peer, inside']} ({100 * counts['peer, inside'] / inside:.2f} %)"
    print(f"  deterministic, dense, of static shape: {share}")
    if beside:
        for who, names in only.items():
            print(f"  only {who} (for some sample): {' '.join(sorted(names)) or 'none'}")
    rate = 100 * counts["passed, not excepted"] / rest
    print(f"  of those without an exception {counts['passed, not excepted']} of {rest} ({rate:.2f} %)")
    print(
        f"  bitwise: {counts['bitwise']}; eager itself refuses {counts['skipped']}; {time.perf_counter() - start:.0f} s"
    )
    for entry in EXEMPTIONS:
        if excepted[entry]:
            print(f"  excepted: {excepted[entry]:4d} {entry.op}: {entry.reason}")
    for why, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        print(f"  FAILED {len(names)}: {why[:220]}\n    {' '.join(names[:5])}")
    return sum(map(len, groups.values()))


if __name__ == "__main__":
    sys.exit(main())
