"""Values that a traced function reads from outside of its arguments, found while it runs.

`frames.py` and `expressions.py` find each read, and `lists.py` the items of a function's own lists.
`watch.py` listens to the frames, `evaluating.py` evaluates their expressions, `attributes.py` and
`reached.py` cross the edges that `edges.py` defines. `reads.py` watches modules, `properties.py`
and `process.py` watch tensors and the process. Guards are made of edges in `jitted/outside.py`.
"""
