"""Interpreters: functions from trace to trace, and `evaluate`, from trace to values.

Each file or folder is one interpreter or one step of one, and states its law. They are `grad.py`,
`jvp.py`, `vmap.py`, `checkpoint/`, `autocast.py`, `quantize/`, `lora.py`, `fsdp.py`, `ddp.py`,
`tensor_parallel/`, `simplify.py` and `partial_eval.py`. `evaluate.py` is the reference semantics
for all others. An interpreter is a step given to `walk`, or a question given to `Flow`
(`thunder_fn.ir`). It names no structured op, since their rules stand in the tables of
`thunder_fn.ir.rules`. A new one is a line in `testing.INTERPRETERS`, which holds it to the laws.
"""
