"""tensor_parallel: weights split over ranks that work on one batch together.

`step.py` splits weights, and `shares.py` carries activations of which each rank has a share.
`crossings.py` has the pairs of collectives at a layer's border, each the adjoint of the other.
"""
