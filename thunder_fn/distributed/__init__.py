"""Ranks: their groups, their collectives, their agreement, their heartbeat, and the state that they
save together.

`groups.py` reads a DeviceMesh or simulates one; `ranks.py` evaluates a trace on simulated ranks in
one process. The transforms that shard parameters are interpreters: `interpreters/fsdp.py`, `ddp.py`
and `tensor_parallel/`.
"""
