"""Symbolic numbers while a function is traced: sizes and Python numbers that stand for every value.

`arguments.py` makes them, `arithmetic.py` computes with them, `decided.py` records each decision as
a constraint.
"""
