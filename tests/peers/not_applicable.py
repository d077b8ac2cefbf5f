"""Tests of PyTorch's `test/functorch` that say nothing of thunder_fn: a pattern of `Class.test`, and the reason."""

from __future__ import annotations

INTERNALS = "about PyTorch's own levels, wrappers, interpreter stack or dispatch keys"
MAKE_FUNCTIONAL = "about `make_functional` and its relatives, which PyTorch has deprecated; `functional_call` is here"
DYNAMO = "about what Dynamo or `make_fx` makes of torch.func's own frames"
FALLBACK = "about functorch's fallback for ops without a batching rule, and its warning"
VERSION = "about a name that the version of PyTorch that runs it no longer has, or does not have yet"
CUDA = "needs a GPU"

NOT_APPLICABLE: dict[str, str] = {
    r"TestSliceArgnums\.": INTERNALS,
    r"TestMakeFunctional|TestExamplesCorrectness.*(lennard|maml).*": MAKE_FUNCTIONAL,
    r"CombineState|combine_state": MAKE_FUNCTIONAL,
    r"TestCompileTransforms|dynamo|torch_compile|make_fx|compile": DYNAMO,
    r"fallback": FALLBACK,
    r"dispatch_key|unwrap|interpreter|escaped_wrappers|dead_tensor|dump_tensor|level": INTERNALS,
    r"cuda|CUDA": CUDA,
}
"""The first pattern that is found in a test's name says why it is left out."""
