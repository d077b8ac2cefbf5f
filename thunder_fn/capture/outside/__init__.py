"""Values that a traced function reads from outside of its arguments, found while it runs.

`frames.py` shows the frames that run, and `expressions.py` reads their code. `watch.py` observes a
capture. It evaluates the expressions on each frame (`evaluating.py`, `attributes.py`) and keeps the
objects that are reached (`reached.py`) and the reads (`edges.py`). `reads.py` tracks attributes of
modules; `properties.py` and `process.py` those of tensors and of the process. Guards are made of
edges in `jitted/outside.py`.
"""
