"""Fused Triton kernels as operators of an executor: cross entropy and RMSNorm, forward and
backward.

`kernels.py` is Triton's text, `operators.py` says what each kernel computes in plain ops.
"""
