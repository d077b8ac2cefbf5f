"""Structured ops: equations that own bodies, each with all its rules in one file.

A file begins with the op's form and its law, then has its meta, evaluation, wiring and one rule per
table of `thunder_fn.ir.rules`; common parts stand in `shared/`. A rule returns a trace over the
equation's operands and looks at nothing outside of it. A new op is one such file; ops with one body
share the rules in `shared/wrapping.py`.
"""
