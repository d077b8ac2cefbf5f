"""Bugs in the rules of structured ops."""

from __future__ import annotations

from thunder_fn.testing.mutations.planting import Mutation

SCAN, COND = "thunder_fn.structured.scan", "thunder_fn.structured.cond"
WHILE = "thunder_fn.structured.while_loop"
CUSTOM, CUSTOM_RULES = "thunder_fn.structured.custom_vjp", "thunder_fn.structured.custom_vjp_rules"

CONTROL = (
    # scan
    Mutation(
        "scan looks at one step to know which carries are active",
        "thunder_fn.structured.shared.fixpoint:active_carry",
        "return carry_fixpoint(",
        "return (lambda step, start: start)(",
        "vjp is autograd",
    ),
    Mutation(
        "scan looks at one step to know which carries have cotangents",
        f"{SCAN}:scan_vjp_rule",
        "live = carry_fixpoint(step, wanted_carry)",
        "live = wanted_carry",
        "vjp is autograd",
        seen_in=5,
    ),
    Mutation(
        "scan looks at one step to know which carries are batched",
        f"{SCAN}:scan_vmap_rule",
        "carry = carry_fixpoint(",
        "carry = (lambda step, init: init)(",
        "vmap gives checked traces",
    ),
    Mutation(
        "scan looks at one step to know which carries are used",
        f"{SCAN}:scan_dce_rule",
        "live = carry_fixpoint(step, wanted_carry)",
        "live = wanted_carry",
        "dce gives checked traces",
        seen_in=1,
    ),
    Mutation(
        "residuals of scan are swapped",
        f"{SCAN}:_backward_body",
        "*(values[place] for place in placed.places)",
        "*[values[place] for place in placed.places][::-1]",
        "vjp is autograd",
    ),
    Mutation(
        "scan takes a carry for one of its constants",
        f"{SCAN}:_place_residuals",
        "position < loop.num_consts for position",
        "position < loop.num_consts + loop.num_carry for position",
        "vjp is autograd",
    ),
    Mutation(
        "the backward of scan runs forwards",
        f"{SCAN}:_backward",
        "not loop.reverse",
        "loop.reverse",
        "vjp is autograd",
    ),
    Mutation(
        "the gradient of a constant of scan is that of the last step",
        f"{SCAN}:_backward_body",
        "add(builder, total, found[place])",
        "found[place]",
        "vjp is autograd",
    ),
    Mutation(
        "vmap reverses the xs of scan",
        f"{SCAN}:scan_vmap_rule",
        "add_scan(builder, loop,",
        "add_scan(builder, replace(loop, reverse=not loop.reverse),",
        "vmap is a loop",
    ),
    Mutation(
        "tangents of scan's carries stand in the wrong order",
        "thunder_fn.interpreters.jvp:_on_slots",
        "outputs += (tangent,) if tangent is not None",
        "outputs[-1:] = (tangent, primal) if tangent is not None",
        "jvp is PyTorch's",
    ),
    # while_loop
    Mutation(
        "while_loop looks at one step to know which carries are active",
        "thunder_fn.ir.flow:Flow.ports",
        "if len(marked) == before:",
        "if True:",
        "jvp is PyTorch's",
    ),
    Mutation(
        "while_loop looks at one step to know which carries are batched",
        f"{WHILE}:while_vmap_rule",
        "carry = carry_fixpoint(",
        "carry = (lambda step, init: init)(",
        "vmap gives checked traces",
    ),
    Mutation(
        "while_loop looks at one step to know which carries are used",
        f"{WHILE}:while_dce_rule",
        "live = carry_fixpoint(step, first)",
        "live = first",
        "dce gives checked traces",
        seen_in=1,
    ),
    Mutation(
        "an example that is done goes on",
        f"{WHILE}:_masked_bodies",
        "kept = [where(inner, mask, value, old) for",
        "kept = [value for",
        "vmap is a loop",
        seen_in=2,
    ),
    Mutation(
        "a step runs on the carry of an example that is done",
        f"{WHILE}:_masked_bodies",
        "used = [where(inner, mask, value, safe) for",
        "used = [value for",
        "vmap and vjp",
        seen_in=2,
    ),
    Mutation(
        "a bounded loop runs to its bound",
        f"{WHILE}:_guarded_step",
        "stay.build(kept[len(consts) :])",
        "body",
        "vjp is autograd",
        seen_in=3,
    ),
    # cond and switch
    Mutation(
        "the backward takes the other branch",
        f"{COND}:cond_vjp_rule",
        "one_choice(equation, bodies, [",
        "one_choice(equation, bodies[::-1], [",
        "vjp is autograd",
    ),
    Mutation(
        "a branch that is not taken sees every example",
        f"{COND}:_select",
        "where(builder, mask, operand if flag else expand(builder, operand, size), None)",
        "(operand if flag else expand(builder, operand, size))",
        "vmap and vjp",
        seen_in=2,
    ),
    Mutation(
        "examples select the first branch's results",
        f"{COND}:_select",
        "zip(column, outputs, strict=True)",
        "zip(column, column, strict=True)",
        "vmap is a loop",
        seen_in=2,
    ),
    Mutation(
        "a tangent that only one branch has is dropped",
        "thunder_fn.ir.flow:Flow.ports",
        "enumerate(equation.bodies)",
        "enumerate(equation.bodies[:1])",
        "vjp is autograd",
    ),
    # custom rules
    Mutation(
        "a custom rule keeps the first operand for every other",
        f"{CUSTOM}:custom_vjp_vjp_rule",
        'Residual("input", inputs.index(atom))',
        'Residual("input", 0)',
        "unfold keeps gradients",
    ),
    Mutation(
        "the gradient of a shared operand is that of one example",
        f"{CUSTOM_RULES}:_gradients_for",
        "wide if want else _summed(builder, wide)",
        "wide",
        "vmap and vjp",
        seen_in=6,
    ),
)
