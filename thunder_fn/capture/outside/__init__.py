"""Values that a traced function reads from outside of its arguments, found while it runs.

`frames.py` and `expressions.py` find each read, `values.py` makes edges of them, `reads.py` watches
modules, `properties.py` and `process.py` watch tensors and the process. Guards are made of edges in
`jitted/outside.py`.
"""
