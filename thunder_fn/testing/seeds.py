"""Programs that are always tried: each rarely drawn by chance, and for one thing that is easily
got wrong.
"""

from __future__ import annotations

import torch

from thunder_fn.ir.trace import TensorType
from thunder_fn.testing.drawn_programs import Program, Step
from thunder_fn.testing.strategies import Case

X = (TensorType(torch.float64, (3,)),)
PRODUCT = Program((), (Step("mul", (1, 2)),))
AFFINE = Program((), (Step("mul", (1, 0)), Step("add", (0, 1))))

DELAY_LINE = Program(X, (Step("scan", (1, 0, 0, 1, 1, 0, 2, 1, 0, 1, 1), (PRODUCT,)),))
"""Carries that begin with constants; a computed value reaches the second a step later than the
first.
"""

WHILE_DELAY_LINE = Program(
    X,
    (
        Step(
            "while_loop",
            (1, 0, 0, 1, 1, 0, 2, 1, 1, 1),
            (Program((), (Step("mul", (1, 3)),)), Program((), (), (1,))),
        ),
    ),
)
"""A delay line in a loop that counts its steps."""

PRODUCTS_ALONG = Program(X, (Step("sin"), Step("scan", (0, 1, 0, 2, 0, 0, 0, 0), (AFFINE,))))
"""A carry that is multiplied by one element after the other, which is added, too: the order
shows.
"""

ONE_SIDED = Program(
    X,
    (Step("cond", (2, 0, 0, 1), (Program((), (Step("full_like"),)), Program((), (Step("sin"),)))),),
)
"""A choice of which only the branch that is taken has a derivative."""

STOPPED = Program(X, (Step("sin"), Step("detach"), Step("mul", (0, 2))))
"""A product of a value and its detached sine."""

CLOSED_OVER = Program(X, (Step("two_constants"), Step("mul", (0, 3))))
"""Functions that depend on closed-over tensors alone."""

DRAWS_TWICE = Program(
    X, (Step("composite", (0, 0, 0), (Program((), (Step("bernoulli"),)),)), Step("twin"))
)
"""Two equal calls, each with random numbers of its own."""

CALL_OF_TWO = Program(
    X, (Step("sum_all"), Step("composite", (0, 1, 0, 1), (Program((), (Step("mul", (0, 1)),)),)))
)
"""A call on two operands of different types."""

RULE_OF_TWO = Program(
    X, (Step("sin"), Step("custom_vjp", (1, 0, 1), (Program((), (Step("mul", (0, 1)),)),)))
)
"""A function of two different operands with a rule of its own that keeps both."""

COPY = Program(X, (Step("clone"),))
"""A copy that is returned: whoever writes to it does not change the input."""

SEEDS = tuple(
    map(
        Case,
        (
            *(DELAY_LINE, WHILE_DELAY_LINE, PRODUCTS_ALONG, ONE_SIDED, STOPPED),
            *(CLOSED_OVER, DRAWS_TWICE, CALL_OF_TWO, RULE_OF_TWO, COPY),
        ),
    )
)
