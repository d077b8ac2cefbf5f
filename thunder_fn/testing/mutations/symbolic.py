"""Bugs in symbols, in decisions about them, in guards, and in arithmetic."""

from __future__ import annotations

from thunder_fn.testing.mutations.planting import Mutation

SYMBOLS = "thunder_fn.ir.symbols"
FAMILIES = "thunder_fn.jitted.families"
GUARDS = "thunder_fn.jitted.guards"
ARITHMETIC = "thunder_fn.capture.numbers.arithmetic"

STATIC, EAGER, PYTHON = "a symbolic trace is static ones", "jit is eager", "numbers are Python's"

SYMBOLIC = (
    Mutation(
        "constraints are not looked at",
        f"{SYMBOLS}:_specialize",
        "values) is False",
        "values) is None",
        STATIC,
        seen_in=2,
    ),
    Mutation("each symbol is the first dim", f"{SYMBOLS}:bind", ".shape[dim]", ".shape[0]", STATIC),
    Mutation(
        "values are off by one", f"{SYMBOLS}:_items", "as_dim(value))", "as_dim(value + 1))", STATIC
    ),
    Mutation(
        "a decision is taken for its opposite",
        f"{FAMILIES}:followed",
        "(type(answer), answer)",
        "(bool, True)",
        EAGER,
        seen_in=2,
    ),
    Mutation(
        "symbols are read from each other's places",
        f"{FAMILIES}:Class.find",
        "in self.places]",
        "in self.places[::-1]]",
        EAGER,
        seen_in=3,
    ),
    Mutation(
        "call paths do not ask what was decided",
        f"{GUARDS}:_symbols",
        "for decision in entry.decisions]",
        "for decision in entry.decisions[:0]]",
        EAGER,
        seen_in=2,
    ),
    Mutation(
        "all layouts are alike",
        f"{FAMILIES}:_leaf_class",
        "return sizes, stride_pattern(leaf.shape, leaf.stride())",
        "return sizes",
        EAGER,
        seen_in=10,
    ),
    Mutation(
        "divisors are not asked about",
        f"{ARITHMETIC}:_holds",
        "is None else",
        "is value or True else",
        PYTHON,
    ),
    Mutation(
        "roots are not asked about",
        f"{ARITHMETIC}:math_function",
        "math.isfinite(limit)",
        "False",
        PYTHON,
        seen_in=1,
    ),
    Mutation(
        "-0.0 is 0.0", f"{ARITHMETIC}:is_plain", "(value != 0 or", "(True or", PYTHON, seen_in=2
    ),
    Mutation(
        "floats are reals",
        f"{ARITHMETIC}:_is_float",
        "return not ",
        "return value is Sym and ",
        PYTHON,
        seen_in=3,
    ),
)
