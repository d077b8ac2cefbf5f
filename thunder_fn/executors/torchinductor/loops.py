"""Code for regions and for loops: a loop in C++ where its step is kernels and matrix products,
in Python elsewhere; on a GPU as one Triton kernel.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

import torch

from thunder_fn.executors.torchinductor.codegen import (
    Code,
    Job,
    Kernel,
    generate as generate_region,
)
from thunder_fn.executors.torchinductor.loop_cpp import NotCpp, in_cpp
from thunder_fn.executors.torchinductor.loop_plan import (
    Plan,
    end_lines,
    header_line,
    is_loop,
    return_line,
)
from thunder_fn.executors.torchinductor.loop_triton import in_triton
from thunder_fn.executors.torchinductor.parts import is_on_cpu
from thunder_fn.extend.regions import Loop, While
from thunder_fn.ir.equations import bound
from thunder_fn.ir.symbols import hint_of
from thunder_fn.ir.trace import TensorType, Trace


def generate(job: Job) -> Code:
    """The code of a region, or of a loop.

    Raises:
        RegionError: Inductor's code is not in the form that is known here, or a loop's layouts
            change from step to step.
        Exception: whatever Inductor raises.
    """
    if not is_loop(job.region):
        return generate_region(job, own_products=True)
    if not is_on_cpu(job.region):
        return in_triton(job)
    try:
        return in_cpp(*_with_codes(Plan.of(job, has_sums=True), job))
    except NotCpp:
        return in_python(*_with_codes(Plan.of(job), job))


WORTH_A_TEAM = 2**13
"""Elements of a step's largest tensor from which its kernels run on several threads, which each
step calls together anew.

A scan that adds and takes tanh, two threads that wait actively, one against both. 2**12 elements
take 3.3 and 3.0 us, 2**13 take 6.4 and 4.1. If threads wait passively, calling them together takes
some 50 us.
"""


def _with_codes(plan: Plan, job: Job) -> tuple[Plan, tuple[Code, ...]]:
    threads = [job.threads if _largest(step.trace) >= WORTH_A_TEAM else 1 for step in plan.steps]
    jobs = (
        Job(step.trace, step.strides, count)
        for step, count in zip(plan.steps, threads, strict=True)
    )
    return plan, tuple(map(generate_region, jobs))


def _largest(trace: Trace) -> int:
    """The elements of the largest tensor that the trace makes."""
    types = (var.type for var in bound(trace.equations))
    made = (math.prod(map(hint_of, type.shape)) for type in types if isinstance(type, TensorType))
    inner = (_largest(body) for equation in trace.equations for body in equation.bodies)
    return max((*made, *inner), default=0)


def in_python(plan: Plan, codes: Sequence[Code]) -> Code:
    """A loop in Python around compiled steps."""
    lines, kernels, constants = list[str](), dict[str, Kernel](), dict[str, torch.Tensor]()
    for number, code in enumerate(codes):
        names = {name: f"{name}_{number}" for name, _ in (*code.kernels, *code.constants)}
        names["region"] = f"step{number}"
        lines += _renamed(code.text, names).splitlines()
        kernels.update((names[name], kernel) for name, kernel in code.kernels)
        constants.update((names[name], tensor) for name, tensor in code.constants)
    carry = [f"c{i}" for i in range(plan.num_carry)]
    consts = list(map(str, plan.equation.operands[: plan.num_consts]))
    lines += ["import torch", header_line(plan)]
    lines += [
        f"    {name} = {var}.contiguous()" for name, var in zip(carry, plan.carry, strict=True)
    ]
    results = [f"r[{place}]" for place in plan.body.places]
    update = [
        f"{name} = {value}" for name, value in zip(carry, results[: plan.num_carry], strict=True)
    ]
    ys = [f"y{i}" for i in range(len(results) - plan.num_carry)]
    if plan.is_scan:
        loop = Loop.of(plan.equation)
        order = f"range({loop.steps - 1}, -1, -1)" if loop.reverse else f"range({loop.steps})"
        arguments = ", ".join([*consts, *carry, *(f"{var}[i]" for var in plan.xs)])
        lines += [f"    {y} = [None] * {loop.steps}" for y in ys]
        lines += [f"    for i in {order}:", f"        r = step0({arguments})"]
        lines += [
            f"        {y}[i] = {value}"
            for y, value in zip(ys, results[plan.num_carry :], strict=True)
        ]
    else:
        arguments = ", ".join([*consts, *carry])
        steps = While.of(plan.equation).max_steps
        lines.append("    while True:" if steps is None else f"    for _ in range({steps}):")
        lines += [
            f"        if not step0({arguments})[0]:",
            "            break",
            f"        r = step1({arguments})",
        ]
    lines += [f"        {line}" for line in update]
    lines += end_lines(plan, carry)
    lines.append(return_line(plan, [*carry, *(f"torch.stack({y})" for y in ys)]))
    return Code("\n".join(lines) + "\n", tuple(kernels.items()), tuple(constants.items()))


def _renamed(text: str, names: dict[str, str]) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
        elif isinstance(node, ast.FunctionDef):
            node.name = names.get(node.name, node.name)
    return ast.unparse(tree)
