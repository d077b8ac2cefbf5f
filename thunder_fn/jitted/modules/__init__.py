"""jit of modules: a module of the same class on the same state, whose `forward` is jitted.

`state.py` says what a program depends on, `hooks.py` which hooks a trace has, `containers.py` what
a forward fills.
"""
