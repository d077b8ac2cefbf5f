"""The common parts of structured ops: bodies, binding, evaluation, wrapping ops, and calls of
custom functions.

Nothing here names an op. Rules of an op stand in the op's own file, one folder up.
"""
