"""thunder_fn"""
