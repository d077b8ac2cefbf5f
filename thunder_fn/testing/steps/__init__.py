"""What the steps of a program are. Importing this fills the tables of `programs.py`, simple steps first."""

from thunder_fn.testing.steps import arithmetic as arithmetic, control as control, shapes as shapes, sources as sources
