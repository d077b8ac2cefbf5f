"""Laws of traces and interpreters, and Hypothesis strategies that draw traces.

`pip install "thunder_fn[testing]"` brings Hypothesis, which they need. `drawn_programs.py` says
how programs are data, `strategies.py` draws them, `laws/` states the laws, `mutations/` plants bugs
that the laws must catch, `user.py` has `check_transform`. A new kind of equation needs a step in
`steps/`, so that it is drawn.
"""

from thunder_fn.testing import steps
from thunder_fn.testing.backends import check_backend
from thunder_fn.testing.drawn_programs import Program, Step, build
from thunder_fn.testing.given import Given
from thunder_fn.testing.laws import (
    GROUPS,
    INTERPRETERS,
    LAWS,
    Interpreter,
    LawBroken,
    check_laws,
    laws_of,
)
from thunder_fn.testing.laws.schedules import check_schedule
from thunder_fn.testing.others import check_pass
from thunder_fn.testing.sized import Sized
from thunder_fn.testing.strategies import (
    Case,
    cases,
    in_dims,
    inputs_for,
    programs,
    pytrees,
    smooth_cases,
    traces,
)
from thunder_fn.testing.user import check_transform, reproduce
from thunder_fn.testing.watching import Coverage

__all__ = [
    "Case",
    "Coverage",
    "GROUPS",
    "Given",
    "INTERPRETERS",
    "Interpreter",
    "LAWS",
    "LawBroken",
    "Program",
    "Sized",
    "Step",
    "build",
    "cases",
    "check_backend",
    "check_laws",
    "check_pass",
    "check_schedule",
    "check_transform",
    "in_dims",
    "inputs_for",
    "laws_of",
    "programs",
    "pytrees",
    "reproduce",
    "smooth_cases",
    "steps",
    "traces",
]
