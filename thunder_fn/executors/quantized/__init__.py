"""Executors that compute on codes: `kernels.py` by PyTorch's kernels, `codes_kernels.py` by C++ of
our own.

`torchao_kernels.py` and `bitsandbytes_kernels.py` call these packages where they are installed.
"""
