"""The schemes that there are, by name."""

from __future__ import annotations

import difflib
from typing import Any

from thunder_fn.errors import RewriteError
from thunder_fn.executors.of_traces import bring
from thunder_fn.executors.quantized.codes_kernels import EXECUTOR as CODES
from thunder_fn.executors.quantized.kernels import EXECUTOR as QUANTIZED
from thunder_fn.interpreters.quantize.eight_bits import INT8, INT8_DYNAMIC, INT8_STATIC, fp8
from thunder_fn.interpreters.quantize.four_bits import NF4, int4
from thunder_fn.interpreters.quantize.scheme import NAMESPACE, Scheme

SCHEMES: dict[str, Scheme] = {
    "int8": INT8,
    "int8_dynamic": INT8_DYNAMIC,
    "int8_static": INT8_STATIC,
    "int4": int4(),
    "nf4": NF4,
    "fp8": fp8(),
    "fp8_tensor": fp8(per_row=False),
    "fp8_dynamic": fp8(dynamic=True),
}
bring(NAMESPACE, CODES, QUANTIZED)


def scheme_named(scheme: Any) -> Scheme:
    """A scheme by name, or the scheme itself.

    Raises:
        RewriteError: there is no scheme of this name; says which there are.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        near = difflib.get_close_matches(str(scheme), SCHEMES, n=1, cutoff=0.0)[0]
        what = f"quantize: unknown scheme {scheme!r}; did you mean {near!r}?"
        raise RewriteError(
            what, fix=f"There are {', '.join(SCHEMES)}; or pass a `Scheme` of your own."
        )
    return SCHEMES[scheme]
