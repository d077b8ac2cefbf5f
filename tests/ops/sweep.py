"""PyTorch's operator database through thunder_fn: how many samples agree with eager, and which do not.

python -m tests.ops.sweep                                  3 plain samples for each operator and dtype, 1 of other kinds
python -m tests.ops.sweep --limit 0                        all samples (some hours of one core)
python -m tests.ops.sweep --ops linalg_svd,stft --verbose  some operators, with tracebacks
python -m tests.ops.sweep --peer                           torch.func's gradients on the same samples beside ours
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

from tests.ops.agreement import SWEEPS, Outcome
from tests.ops.exceptions import EXEMPTIONS, Exemption, exemption
from tests.ops.samples import KINDS, OPS, Case, cases

DTYPES = {
    "forward": (torch.float32, torch.float64, torch.complex64),
    "gradient": (torch.float32, torch.float64, torch.complex64),
}


def outcome(case: Case, what: str, *, verbose: bool = False) -> Outcome:
    """How a case fares; an error of ours is a failure."""
    try:
        return SWEEPS[what](case)
    except Exception as error:  # noqa: BLE001
        if verbose:
            traceback.print_exc()
        return Outcome("error", f"{type(error).__name__}: {' '.join(str(error).split())}")


def is_good(found: Outcome, what: str, exempt: Exemption | None) -> bool:
    """Bitwise forward; gradients, and what an exception says is so, up to rounding."""
    return found.status == "passed" or (
        found.status == "close" and (what == "gradient" or (exempt is not None and exempt.close))
    )


def is_excepted(found: Outcome, exempt: Exemption | None) -> bool:
    """An exception excuses an error, and other values only if it says so."""
    return exempt is not None and (found.status == "error" or exempt.differs)


def cases_of(name: str, what: str, limit: int | None, kinds: tuple[str, ...] = KINDS) -> Iterator[Case]:
    """The cases of an operator for one sweep."""
    op = OPS[name]
    supported = op.supported_dtypes("cpu") if what == "forward" else op.supported_backward_dtypes("cpu")
    if what == "gradient" and not op.supports_autograd:
        return
    for dtype in DTYPES[what]:
        if dtype in supported:
            yield from cases(name, dtype, limit, requires_grad=what == "gradient", kinds=kinds)


def failures(name: str, what: str, limit: int | None) -> list[str]:
    """The cases of an operator that neither agree with eager nor are excepted, with what is wrong."""
    found: list[str] = []
    for case in cases_of(name, what, limit):
        result, exempt = outcome(case, what), exemption(case, what)
        if result.status != "skipped" and not is_good(result, what, exempt) and not is_excepted(result, exempt):
            found.append(f"{case}: {result.why or result.status}")
    return found


def peer(case: Case) -> bool:
    """Does torch.func.vjp run on this sample?"""
    from tests.ops.agreement import SEED, tensors_in
    from tests.ops.samples import seed
    from thunder_fn.capture import pytree

    leaves, spec = pytree.flatten((case.args, case.kwargs))
    asked = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for index, value in zip(asked, values, strict=True):
            full[index] = value
        args, kwargs = pytree.unflatten(spec, full)
        return tuple(
            t for t in tensors_in(case.function(*args, **kwargs)) if t.dtype.is_floating_point or t.dtype.is_complex
        )

    seed(SEED)
    try:
        results, pull = torch.func.vjp(run, *(leaves[index].detach() for index in asked))
        pull(tuple(torch.randn_like(result) for result in results))
    except Exception:  # noqa: BLE001
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", default=list(SWEEPS), choices=list(SWEEPS))
    parser.add_argument("--limit", type=int, default=3, help="plain samples for each operator and dtype, 0 for all")
    parser.add_argument("--ops", help="names, separated by commas")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop a sweep after so long")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    bad = 0
    for what in options.what:
        bad += sweep(what, options)
    return 1 if bad else 0


def sweep(what: str, options: argparse.Namespace) -> int:
    """One sweep, printed; the number of failures without an exception."""
    counts: collections.Counter[str] = collections.Counter()
    groups: dict[str, list[str]] = collections.defaultdict(list)
    excepted: collections.Counter[Exemption] = collections.Counter()
    start = time.perf_counter()
    for name in options.ops.split(",") if options.ops else OPS:
        if time.perf_counter() - start > options.seconds:
            print(f"stopped before {name}")
            break
        for case in cases_of(name, what, options.limit or None, tuple(options.kinds.split(","))):
            result, exempt = outcome(case, what, verbose=options.verbose), exemption(case, what)
            if result.status == "skipped":
                counts["skipped"] += 1
                continue
            counts["samples"] += 1
            counts["excepted samples"] += exempt is not None
            if options.peer and what == "gradient":
                counts["peer"] += peer(case)
            if is_good(result, what, exempt):
                counts["passed"] += 1
                counts["bitwise"] += result.status == "passed"
                counts["passed, not excepted"] += exempt is None
            elif exempt is not None and is_excepted(result, exempt):
                excepted[exempt] += 1
            else:
                groups[result.why or result.status].append(str(case))
    total = max(counts["samples"], 1)
    rest = max(total - counts["excepted samples"], 1)
    print(f"{what}: {counts['passed']} of {total} samples agree with eager ({100 * counts['passed'] / total:.2f} %)")
    rate = 100 * counts["passed, not excepted"] / rest
    print(f"  of those without an exception {counts['passed, not excepted']} of {rest} ({rate:.2f} %)")
    print(
        f"  bitwise: {counts['bitwise']}; eager itself refuses {counts['skipped']}; {time.perf_counter() - start:.0f} s"
    )
    if options.peer and what == "gradient":
        print(f"  torch.func.vjp runs on {counts['peer']} of {total} ({100 * counts['peer'] / total:.2f} %)")
    for entry in EXEMPTIONS:
        if excepted[entry]:
            print(f"  excepted: {excepted[entry]:4d} {entry.op}: {entry.reason}")
    for why, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        print(f"  FAILED {len(names)}: {why[:220]}\n    {' '.join(names[:5])}")
    return sum(map(len, groups.values()))


if __name__ == "__main__":
    sys.exit(main())
