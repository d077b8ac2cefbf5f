"""Fused Triton kernels as operators of an executor: cross entropy and RMSNorm, forward and
backward; attention's gradients, tangents and second derivatives.

`kernels.py` and `attention.py` are Triton's text, `operators.py` says what each kernel computes in
plain ops.
"""
