"""checkpoint as an interpreter: which residuals a forward keeps, and the trace that computes the
others again.

`policies.py` has the policies, `remat.py` the choice, `recomputed.py` the halves. The structured op
and its rules stand in `structured/checkpoint.py`; the transform for users in `api/checkpoint.py`.
"""
