"""Interpreters: functions from trace to trace, and `evaluate`, from trace to values.

Each file is one interpreter or one step of one, and states its law. `evaluate.py` is the reference semantics for all
others. An interpreter is a step given to `walk`, or a question given to `Flow` (`thunder_fn.ir`); it names no
structured op, since their rules stand in the tables of `thunder_fn.rules`. A new one is a line in
`testing.INTERPRETERS`, which holds it to the laws.
"""
