"""Rules of leaf ops, derived from PyTorch's own formulas.

`leaf_vjp.py` asks autograd, `leaf_jvp.py` asks forward AD, `leaf_vmap.py` asks functorch,
`leaf_autocast.py` asks the dispatcher. `decompositions.py` and `quirks/` hold the ops for which
PyTorch's answer is missing or wrong. A new entry there needs the op, the reason, and a sample that
fails without it.
"""
