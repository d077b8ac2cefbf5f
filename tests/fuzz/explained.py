"""Differences that are meant to be or are PyTorch's: each with what shows it, and its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.fuzz.differential import WRITE, Outcome, beside


@dataclass(frozen=True)
class Explained:
    """`kind` and `why` match the outcome, `text` the shrunk program, all anywhere.

    `instead` replaces what a pattern matches in the program, to make one without the quirk of eager PyTorch. Eager's run of
    that beside thunder_fn's of the program has to come to `then`: a kind, or an error's text.
    """

    reason: str
    kind: str = ""
    why: str = ""
    text: str = ""
    instead: tuple[str, str] | None = None
    then: str = "same"

    def holds(self, text: str, outcome: Outcome) -> bool:
        """Test whether this is the reason of an outcome."""
        if not (
            re.search(self.kind, outcome.kind)
            and re.search(self.why, outcome.why)
            and re.search(self.text, text, re.DOTALL)
        ):
            return False
        if self.instead is None:
            return True
        found = beside(text, re.sub(*self.instead, text))
        return re.search(self.then, f"{found.kind}: {found.why}") is not None


LEAF_OF_VIEW = r"(?=.*(\)|\]|\.T)\.requires_grad_\(\))"
GRADIENTS_OFF = r"(?=.*(no_grad|set_grad_enabled\(False))"
CLONED = (r"\.requires_grad_\(\)", ".clone().requires_grad_()")

EXPLAINED = [
    Explained(
        "depends on a leaf with a zero gradient only, and so requires no gradient in a trace (docs/limits.md)",
        kind="requires_grad",
        why="False instead of True",
    ),
    Explained(
        "the same of a view of a leaf that is a view itself: eager PyTorch says that it requires nothing",
        kind="requires_grad",
        why="True instead of False",
        text=LEAF_OF_VIEW + GRADIENTS_OFF,
        instead=CLONED,
    ),
    Explained(
        "the same: a write to such a view is refused, as eager PyTorch refuses it of a view of any other leaf",
        kind="raised",
        why="a view which was created in no_grad mode",
        text=LEAF_OF_VIEW + GRADIENTS_OFF,
        instead=CLONED,
        then="a view which was created in no_grad mode",
    ),
    Explained(
        "eager PyTorch runs a checkpointed function again for gradients, with its writes to Python and to other tensors",
        kind="value of (argument|result|closed over)",
        text=r"checkpoint\.checkpoint\(",
        instead=(r"torch\.utils\.checkpoint\.checkpoint\((\w+), (.*), use_reentrant=False\)", r"\1(\2)"),
    ),
    Explained(
        "a result of a structured op depends on no leaf but one that its body makes, whose gradient is zero: it requires none",
        kind="raised",
        why="does not require grad and does not have a grad_fn",
        text=r"T\.(scan|map|cond|switch|while_loop|fori_loop)[^$]*materialize_grads=True",
        instead=(r"(?m)^( {12,}.*)\.requires_grad_\((?:True)?\)", r"\1"),  # in a body
        then="does not require grad and does not have a grad_fn",
    ),
    Explained(
        "of a view taken under no_grad eager PyTorch 2.13 says what its base requires, and gives it no gradient",
        kind="requires_grad",
        why="False instead of True",
        text=r"no_grad|set_grad_enabled\(False|inference_mode",
    ),
    Explained(
        "the same: a second derivative of nothing is asked for, since such a view says that it requires a gradient",
        kind="value of gradient",
        why="another number of values",
        text=r"no_grad|inference_mode",
    ),
    Explained(
        "eager PyTorch keeps the gradient of a tensor that `logical_not_` and its like write to, a defect of it",
        text=r"logical_(not|and|or|xor)_|\bgt_\(",
    ),
    Explained(
        "eager PyTorch 2.13 loses the gradient of a leaf that is a view itself, if a view of it is alive at a write of values",
        kind="value of gradient",
        text=r"(\)|\]|\.T)\.requires_grad_\(\).*\.(detach\(\)|data\b|view\(torch\.)",
        instead=(r"(?<!detach\(\))\.requires_grad_\(\)", ".clone().requires_grad_()"),
    ),
    Explained(
        "`kron` saves views that have no version, so eager's gradient reads what is written later; a program's does not",
        kind="value of gradient",
        text=r"torch\.kron\((\w+), ?(\w+)\)[^$]*\b(\1|\2)\.\w+_\(",
    ),
    Explained(
        "a write by `.data` to a result that its own derivative reads, which autograd does not see; eager's gradient is off",
        kind="value of gradient",
        text=r"\.data\b",
        instead=(r"\.data\b", ".detach()"),  # which has the version of the tensor
        then="modified by an inplace operation",
    ),
    Explained(
        "a write by .data to what a derivative reads: a program's backward raises, as eager's does for a write by detach()",
        kind="error",
        why="modified by an inplace operation",
        text=r"\.data\b",
    ),
    Explained(
        "`x[i]` of an argument, with a tensor `i`, as a result has memory of its own after the call (docs/limits.md)",
        kind="value of memory",
        text=r"\[[^\]\n]*torch\.tensor\(|narrow\(",
        instead=(
            r"(\w+\[[^\]\n]*torch\.tensor\(-?\d\)[^\]\n]*\]|torch\.narrow\([^)]*\), ?1\))(?!\s*[-+*/]?=(?!=)|\.)",
            r"\1.clone()",
        ),
    ),
    Explained(
        "a derivative under vmap that is the same for all examples is expanded, and so cannot be written to (docs/limits.md)",
        kind="value of (memory|result)",
        text=r"vmap\((T|torch\.func)\.(grad|jac\w+|hessian)\(",
        instead=(
            r"(T|torch\.func)\.vmap\((T|torch\.func)\.\w+\(\w+\)(, [^()]*)?\)\(\w+\)",
            r"(lambda r: r[:1].expand(r.shape))(\g<0>)",
        ),
    ),
    *(
        Explained(
            f"torch.func raises the same; only the oracle {which} goes on",
            kind="raised|error",
            why=why,
            text=r"T\.",
            instead=(r"\A", ""),
            then=why,
        )
        for which, why in (
            ("that differentiates by copies", "modified by an inplace operation"),
            ("that stacks rows", "the output of a function that returns multiple views"),
            ("whose values all require a gradient", "does not require grad and does not have a grad_fn"),
        )
    ),
    Explained(
        "a write by a view of another dtype to a part of a view of a leaf; refused, as any other write to such a view is",
        kind="error",
        why="a view of a leaf Variable that requires grad is being used in an in-place",
        text=r"\.view\(torch\.(int|float)\d+\)",
    ),
    Explained(
        "a transform writes back, where gradients are on, what its function writes under no_grad to a view of a leaf; refused",
        kind="raised|error",
        why="a view of a leaf Variable that requires grad is being used in an in-place",
        text=r"no_grad[^$]*T\.|T\.[^$]*no_grad",
    ),
    Explained(
        "a tensor that is differentiated counts as such where the function closes over it too, and so is no `out=`",
        kind="raised|error",
        why="functions with out=... arguments don't support automatic differentiation",
        text=r"T\.\w*(grad|vjp|jac|hessian)[^$]*out=|out=[^$]*T\.\w*(grad|vjp|jac|hessian)",
    ),
    Explained(
        "gradients are on in a function that is differentiated, so `out=` beside what requires one raises, as in eager where "
        "they are on around it",
        kind="raised|error",
        why="functions with out=... arguments don't support automatic differentiation",
        text=r"func\.\w*(grad|vjp|jac|hessian)",
        instead=(r"no_grad\(\)", "enable_grad()"),
        then="functions with out=... arguments don't support automatic differentiation",
    ),
    Explained(
        "an op whose result nobody uses does not run in a program, and so raises nothing for values that it refuses",
        kind="accepts",
        why="call [1-9].*(index .* is out of bounds|out of range: tried to access|must match the size of|shape mismatch: value"
        "|The shape of the mask"
        "|Class values must be smaller)",
        instead=(r"(?m)^( +)(\w+) = .*\n(?![^$]*\b\2\b)", r"\1pass\n"),  # what nobody uses
    ),
    Explained(
        "the body of a loop that takes no step is traced, and raises; eager PyTorch never runs it",
        kind="raised",
        text=r"while_loop\(lambda k, u: k < 0|fori_loop\(0, \w+\.dim\(\)",
    ),
    Explained(
        "the branch that is not taken is traced, and raises; so does eager PyTorch where it takes that one",
        kind="raised",
        text=r"T\.cond\(",
        instead=(r"T\.cond\([^,]*, ", "T.cond(True, "),
        then="raises",
    ),
    Explained(
        "open: Function with set_materialize_grads(False), in the room of derivatives",
        text=r"set_materialize_grads\(False\)",
    ),
    Explained(
        "writes to an expanded tensor, of which several elements are one; refused, where eager lets a few ops do so",
        why="writes to an expanded tensor|more than one element of the written-to tensor",
    ),
    Explained(
        "a later call's backward meets the graph of an earlier one, which autograd has freed and a program does not need",
        kind="accepts",
        why="call [1-9].*backward through the graph a second time",
    ),
    Explained(
        "what a later call's backward reads was written to since; a program's backward does not read it",
        kind="accepts",
        why="call [1-9].*modified by an inplace operation",
    ),
    Explained(
        "an op whose derivative eager PyTorch does not have, as of `0 % x`, has one by its decomposition",
        kind="accepts",
        why="derivative for aten::.* is not implemented",
    ),
    Explained(
        "an argument that is written to with the history of a leaf which the function made requires no gradient afterwards",
        kind="value of gradient",
        why="another number of values",
        text=r"autograd\.grad\(",
    ),
    Explained(
        "a differentiated function keeps its argument outside: the very tensor; the oracle that differentiates by copies, a copy",
        kind="value of (memory|argument)",
        text=r"\n {12,}d(\[[^\]]*\] = |\.update)[^$]*T\.\w*(grad|vjp|jvp|jac|hessian|linearize)",
    ),
    Explained(
        "`unsafe_chunk` gives parts whose writes autograd does not see, so eager's gradient reads what is written later",
        kind="value of gradient",
        text=r"unsafe_(chunk|split)",
        instead=(r"unsafe_(chunk|split)", r"\1"),
        then="modified by an inplace operation",
    ),
    Explained(
        "an argument that a second derivative reads is changed before; raised, as docs/limits.md says",
        kind="error",
        why="was changed in place before its gradient was differentiated",
    ),
    Explained(
        "second derivatives of normalisation layers by torch.func are wrong; a program's agree with its definition",
        kind="value of gradient",
        text="LayerNorm",
        instead=(
            r"nn\.LayerNorm\(2\)",
            'type("N", (nn.LayerNorm,), {"forward": lambda s, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, '
            "keepdim=True) + s.eps).sqrt() * s.weight + s.bias})(2)",
        ),
    ),
    Explained(
        "a write to an argument without elements counts up the version of others, which a program's backward reads",
        kind="error",
        why=r"modified by an inplace operation: \[torch\.\w+ \[[\d, ]*\b0\b",
    ),
    Explained(
        "what a transform computes in inference mode is a tensor of inference mode; torch.func makes some others",
        kind="error",
        why="Inplace update to inference tensor outside InferenceMode",
        text=r"inference_mode[^$]*T\.",
    ),
    Explained(
        "PyTorch's rule for fake tensors asks for more than its kernel does",
        kind="raised|error",
        why="size mismatch \\(got input|Dimension out of range|Index tensor must have the same number of dimensions|u0 == 1 does",
        text="nll_loss|cross_entropy|roll",
    ),
    Explained(
        "ops that are made of others resize `out=` that requires grad on a CPU or GPU alone; refused, as on the meta device",
        kind="raised",
        why="cannot resize variables that require grad",
        text=r"out=",
    ),
    Explained(
        "inference mode lets `resize_` change a leaf, whose new elements are not initialised; refused, as without it",
        kind="raised",
        why="cannot resize variables that require grad",
        text=r"inference_mode.*\.resize_\(",
    ),
    Explained(
        "of a negative or conjugate view, some views are copies in inference mode, so that eager loses what is written to them",
        kind="value",
        text=r"inference_mode.*(_neg_view|conj|imag)",
        instead=("inference_mode", "no_grad"),
    ),
    Explained(
        "what is written in a `jvp` has the history of the roots by which the oracle differentiates; torch.func refuses it",
        kind="value of gradient",
        why="another number of values",
        text=r"T\.jvp\(.*\w_\(|\w_\(.*T\.jvp\(",
    ),
    Explained(
        "`bmm` of no elements returns before it compares dtypes; refused, as for any other size",
        kind="raised",
        why=r"expected scalar type torch\.\w+ but found",
        text=r"einsum|bmm|bilinear|matmul",
    ),
    Explained(
        "PyTorch adds a bias out of place for subclasses, which promotes, and in place for others, which does not",
        kind="dtype",
        text="F.linear",
    ),
]


@dataclass(frozen=True)
class Open:
    """A class of programs that is known to be wrong or refused without a clear error: `text` holds all of these patterns."""

    what: str
    text: tuple[str, ...]


NESTED = r"\bT\.|torch\.func"

OPEN = [
    Open("in-place writes in or beside functions that are transformed or looped over", (NESTED, WRITE.pattern)),
    Open("modules whose buffers change in or beside such functions", (NESTED, r"\bm\d+\(")),
    Open(
        "gradient modes in or beside such functions", (NESTED, r"no_grad|inference_mode|set_grad_enabled|enable_grad")
    ),
    Open("inference mode inside of a traced function", (r"with torch\.inference_mode",)),
    Open(
        "`requires_grad_`, `.data`, `set_`, `resize_` and `detach_` of arguments",
        (r"    \w+\.(requires_grad_|detach_|set_|resize_)\(|\.data",),
    ),
    Open("conjugate and negative views that are written to, or of arguments", (r"conj|imag|_neg_view",)),
    Open("Function with set_materialize_grads(False)", (r"set_materialize_grads\(False\)",)),
    Open(
        "transposes in place of an argument that is passed twice",
        (r"    a\d = a\d\n", r"(swapaxes|transpose|t|squeeze)_\("),
    ),
    Open("`out=` of another size, or that overlaps an operand, which eager reads while it writes", (r"out=",)),
    Open("hooks, which are refused or dropped under transforms", (NESTED, r"register_hook")),
]


def is_open(text: str) -> str | None:
    """The open class that a program is of, None if it is of none."""
    return next((one.what for one in OPEN if all(re.search(pattern, text) for pattern in one.text)), None)


def reason(text: str, outcome: Outcome) -> str | None:
    """The reason why an outcome is no defect of ours, None if nothing says so."""
    return next((one.reason for one in EXPLAINED if one.holds(text, outcome)), None)
