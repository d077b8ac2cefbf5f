"""Laws of traces and interpreters, and Hypothesis strategies that draw traces.

`pip install thunder_fn[testing]` brings Hypothesis, which they need. `programs.py` says how
programs are data, `strategies.py` draws them, `laws/` states the laws, `mutations/` plants bugs
that the laws must catch, `user.py` has `check_transform`. A new kind of equation needs a step in
`steps/`, so that it is drawn.
"""

from thunder_fn.testing import steps as steps
from thunder_fn.testing.drawn_programs import Program as Program, Step as Step, build as build
from thunder_fn.testing.given import Given as Given
from thunder_fn.testing.laws import (
    GROUPS as GROUPS,
    INTERPRETERS as INTERPRETERS,
    LAWS as LAWS,
    Interpreter as Interpreter,
    LawBroken as LawBroken,
    check_laws as check_laws,
    laws_of as laws_of,
)
from thunder_fn.testing.laws.schedules import check_schedule as check_schedule
from thunder_fn.testing.others import check_backend as check_backend, check_pass as check_pass
from thunder_fn.testing.sized import Sized as Sized
from thunder_fn.testing.strategies import (
    Case as Case,
    cases as cases,
    in_dims as in_dims,
    inputs_for as inputs_for,
    programs as programs,
    pytrees as pytrees,
    smooth_cases as smooth_cases,
    traces as traces,
)
from thunder_fn.testing.user import check_transform as check_transform, reproduce as reproduce
from thunder_fn.testing.watching import Coverage as Coverage
