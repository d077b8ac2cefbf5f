"""Ops whose derivatives or batching rules PyTorch lacks or has wrong, one file for each family.

Each file says what PyTorch answers and why that does not do. An op that PyTorch mends leaves this
folder.
"""
