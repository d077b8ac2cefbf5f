"""Ops whose derivatives or batching rules are missing or wrong in PyTorch, by family.

Each file says what PyTorch answers and what is wrong with it. An op that PyTorch fixes leaves this
folder.
"""
