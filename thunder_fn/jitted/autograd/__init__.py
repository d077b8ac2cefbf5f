"""The bridge to PyTorch's autograd: a jitted call is differentiable by `loss.backward()`.

`bridge.py` splits the trace, `pieces.py` cuts the backward, `nodes.py` leaves one node for each
piece.
"""
