"""quantize: weights stored as codes. `step.py` decides each weight; `eight_bits.py` and
`four_bits.py` pack codes.

A scheme is a `Scheme` (`scheme.py`): encode, decode, and the calls that can work on codes. Kernels
for codes are executors (`executors/quantized/`). A new scheme is one `Scheme` with its bound on the
error.
"""
