"""The interpreter under quantize, lora, fsdp, ddp and tensor_parallel: parameters stored in another
form.

`representation.py` says what a form is; `rewrite.py` carries forms through a trace to where
parameters are used. `filters.py` chooses parameters, `part_calls.py` calls functions on parts,
`units.py` gathers shards together.
"""
