"""Steps of drawn programs, by family. Importing this fills the tables of `programs.py`, simple
steps first.

A step says what it needs of the variables so far and which equations it appends. It is valid in any
subset of the steps, so failures shrink by deleting steps. A new op or structured op gets a step
here.
"""

from thunder_fn.testing.steps import (
    arithmetic as arithmetic,
    control as control,
    shapes as shapes,
    sources as sources,
)
