"""Pipelines: a step is cut into stages, which run on the micro-batches of a batch on many ranks.

`schedules.py` says which rank does what in which order, as data. `stages.py` cuts the trace of a
loss. `programs.py` writes the trace of each rank.
"""
