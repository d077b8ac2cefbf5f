"""Functions of PyTorch and Python that behave differently while a thread captures.

`lookasides.py` and `patches.py` put the replacements in; they are entered in the one registry of
patches, `torch_internals/patches.py`. In other threads every replacement does what it replaces.
"""
