"""The C++ of the executor codes: products with codes, and codes as floats.

A codec decodes sixty-four codes at a time into four vectors of sixteen floats. If two codes lie in
a byte, the first vector of thirty-two has the even columns and the second the odd ones. A shift
separates them. The files in `cpp/` are the codecs and the functions that are made of one.

int8 and int4 codes are multiplied as integers where the processor has instructions for that
(`cpp/integers.h`). Nothing here needs PyTorch's headers, whose reading would take the compiler
longer than all the rest.
"""

from __future__ import annotations

from pathlib import Path

from thunder_fn.executors.torchinductor.codegen import Kernel
from thunder_fn.executors.torchinductor.cpp_text import cpp

_SIZES = ("int64_t", "int64_t")
_HALVES = "const uint16_t*"
# the members of `Scales`, whose braces may be left out
_SCALE = ("const void*", "int64_t", "int64_t")
CODECS = {
    "int8": (("scales.h", "int8.h"), ("const int8_t*", *_SCALE, *_SIZES)),
    "fp8": (("scales.h", "fp8.h"), ("const int8_t*", *_SCALE, *_SIZES)),
    "nf4": (
        ("nf4.h",),
        (
            "const uint8_t*",
            "const int8_t*",
            "const float*",
            "const float*",
            "const float*",
            *_SIZES,
        ),
    ),
    "int4": (("int4.h",), ("const uint8_t*", _HALVES, "int64_t", *_SIZES)),
}
"""The files of the codecs, and the types of their members."""
NUMBERS = {"float32": "float", "bfloat16": "BFloat16"}


def product(codec: str, numbers: str, portable: bool = False) -> Kernel:
    """A linear layer on codes.

    Its first arguments are the members of the codec. Then come activations, a bias (or anything),
    whether there is one, results, the number of rows of activations, and threads.
    """
    files, members = CODECS[codec]
    type = NUMBERS[numbers]
    pointers = f"(const {type}*)x, has_bias ? (const {type}*)bias : nullptr, ({type}*)y"
    body = f"multiply<{type}>({_made(members)}, {pointers}, count, threads);"
    others = (
        "const void* x",
        "const void* bias",
        "int64_t has_bias",
        "void* y",
        "int64_t count",
        "int64_t threads",
    )
    parts = (*files, "few.h", "weights.h", "many.h", "integers.h", "multiply.h")
    return _kernel(members, others, parts, body, portable)


def weights(codec: str, numbers: str, portable: bool = False) -> Kernel:
    """Codes as floats, times the scales of groups within a row: the members of the codec, then
    the results and threads.
    """
    files, members = CODECS[codec]
    type = NUMBERS[numbers]
    body = f"write<{type}>({_made(members)}, ({type}*)y, threads);"
    parts = (*files, "weights.h", "write.h")
    return _kernel(members, ("void* y", "int64_t threads"), parts, body, portable)


def _made(members: tuple[str, ...]) -> str:
    """A codec of the parameters m0, m1, ..., the pointers to bf16 numbers among them as what
    they are.
    """
    names = (
        f"(const BFloat16*)m{i}" if type == _HALVES else f"m{i}" for i, type in enumerate(members)
    )
    return f"Codec{{{', '.join(names)}}}"


def _kernel(
    members: tuple[str, ...],
    others: tuple[str, ...],
    files: tuple[str, ...],
    body: str,
    portable: bool,
) -> Kernel:
    parameters = ", ".join((*(f"{type} m{i}" for i, type in enumerate(members)), *others))
    entry = f'extern "C" void kernel({parameters}) {{\n    {body}\n}}\n'
    front = "#define PORTABLE\n" if portable else "#undef PORTABLE\n"
    types = (*members, *(one.rpartition(" ")[0] for one in others))
    source = cpp(Path(__file__).parent, "vectors.h", *files)
    return Kernel(types, f"{front}#undef WIDE\n#undef INTEGERS\n{source}{entry}")
