"""Bugs in jvp, vmap, checkpoint, and the interpreters that simplify."""

from __future__ import annotations

from thunder_fn.testing.mutations.planting import Mutation

JVP = "thunder_fn.interpreters.jvp"
VMAP = "thunder_fn.interpreters.vmap"
DERIVE_VMAP = "thunder_fn.derived.leaf_vmap"
CHECKPOINT, REMAT = "thunder_fn.structured.checkpoint", "thunder_fn.interpreters.checkpoint.remat"
AUTOCAST = "thunder_fn.interpreters.autocast"
SIMPLIFY = "thunder_fn.interpreters.simplify"
NOOPS = "thunder_fn.interpreters.noops"
FOLD = "thunder_fn.interpreters.fold"
CHECK_ERRORS = "thunder_fn.interpreters.check_errors"

TRANSFORMS = (
    # jvp
    Mutation(
        "tangents of operands are swapped",
        f"{JVP}:_push",
        "tuple(tangent for _, tangent in operands if tangent is not None)",
        "tuple(tangent for _, tangent in operands[::-1] if tangent is not None)",
        "jvp is PyTorch's",
    ),
    Mutation(
        "the tangent of an op with two results goes to the last one",
        f"{JVP}:_push",
        ":], rule.active_outputs)",
        ":], rule.active_outputs[::-1])",
        "jvp is PyTorch's",
        seen_in=3,
    ),
    Mutation(
        "an output that does not move takes the tangent of the next",
        f"{JVP}:jvp",
        "next(supply) if moved else",
        "next(supply, None) or",
        "jvp is PyTorch's",
        seen_in=1,
    ),
    # vmap
    Mutation(
        "the wrong dim is the batch dim",
        f"{VMAP}:vmap",
        "move_dim(builder, value, dim, 0)",
        "move_dim(builder, value, len(shape) - 1 - dim, 0)",
        "vmap gives checked traces",
        seen_in=1,
    ),
    Mutation(
        "a batch of results passes for one result",
        f"{VMAP}:_batch_equation",
        "(isinstance(var.type, TensorType) for",
        "(isinstance(var.type, TensorType) and not var.type.dtype.is_floating_point for",
        "vmap is a loop",
    ),
    Mutation(
        "all examples share one draw of random numbers",
        f"{VMAP}:_batch_equation",
        'ops.has_random(equation) and randomness != "same"',
        "False",
        "vmap asks about randomness",
        seen_in=1,
    ),
    Mutation(
        "vmap forgets stop_gradient",
        f"{DERIVE_VMAP}:_of_whole_batch",
        "return builder.build(",
        "return builder.build((value,) if equation.op == ops.STOP_GRADIENT else ",
        "vmap and vjp",
    ),
    # checkpoint
    Mutation(
        "a checkpoint draws its random numbers again",
        f"{REMAT}:keep_random",
        "if not any(map(ops.has_side_effect, recompute(forward, needed, kept).equations)):",
        "if True:",
        "checkpoint keeps gradients bitwise",
        seen_in=3,
    ),
    Mutation(
        "a checkpoint takes one kept value for another",
        "thunder_fn.interpreters.checkpoint.recomputed:places_of",
        'Residual("extra", extras[var.index])',
        'Residual("extra", len(extras) - 1 - extras[var.index])',
        "checkpoint keeps gradients bitwise",
        seen_in=3,
    ),
    Mutation(
        "a checkpoint keeps everything",
        f"{CHECKPOINT}:_choose",
        "if policy is everything_saveable:",
        "if True:",
        "checkpoint keeps few bytes",
    ),
    # autocast
    Mutation(
        "autocast changes the types of carries",
        f"{AUTOCAST}:_Casting._keeping_types",
        "ending_in(_retyped(b, b.input_types, self.dtype, inner), b.output_types)",
        "_retyped(b, b.input_types, self.dtype, inner)",
        "autocast gives checked traces",
        seen_in=3,
    ),
    Mutation(
        "autocast takes one cast of a value for any other",
        f"{AUTOCAST}:_Casting.cast",
        "key = (atom.index, dtype)",
        "key = (0, dtype)",
        "autocast and dce",
    ),
    # simplify
    Mutation(
        "dce takes every body for random",
        "thunder_fn.ir.ops:has_effects",
        "any(map(has_side_effect, trace.equations))",
        "bool(trace.equations)",
        "dce drops the dead",
        seen_in=1,
    ),
    Mutation(
        "folding reads tensors that may change",
        f"{FOLD}:_foldable",
        "for constant in trace.constants if constant.owned",
        "for constant in trace.constants",
        "fold_constants leaves closed-over tensors alone",
    ),
    Mutation(
        "folding draws random numbers",
        f"{FOLD}:_foldable",
        "and small and not ops.has_side_effect(equation)",
        "and small",
        "fold_constants keeps values",
        seen_in=3,
    ),
    Mutation(
        "a view of another shape passes for its source",
        f"{NOOPS}:same_as",
        "found.type == equation.outputs[0].type",
        "True",
        "drop_noops gives checked traces",
        seen_in=1,
    ),
    Mutation(
        "a copy that is returned is dropped",
        f"{NOOPS}:_may_go",
        "if copy.index not in leaving:",
        "if True:",
        "drop_noops keeps memory apart",
    ),
    # check_errors
    Mutation(
        "the later error is the first",
        f"{CHECK_ERRORS}:first_code",
        "(flag, code, later)",
        "(flag, later, code)",
        "check_errors finds NaN",
    ),
    Mutation(
        "a code is that of the check before",
        f"{CHECK_ERRORS}:_Row._codes",
        "len(self.checking.checks) + 1",
        "max(len(self.checking.checks), 1)",
        "check_errors finds NaN",
    ),
    Mutation(
        "an error in a scan is forgotten",
        "thunder_fn.structured.scan:scan_check_errors_rule",
        "results[count + 1 :]), results[count]",
        "results[count + 1 :]), start",
        "check_errors finds NaN",
    ),
    Mutation(
        "an error of a loop's last condition is forgotten",
        "thunder_fn.structured.while_loop:while_check_errors_rule",
        "code = first_code(builder, code, later)",
        "pass",
        "check_errors finds NaN",
    ),
)
