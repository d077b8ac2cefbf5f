# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # An executor of your own
#
# The last tutorial's executor took single ops. This one takes **regions**: a closed trace of ops that it supports, which it
# makes a function in any way it likes. Ours writes elementwise ops as one C loop, so no intermediate ever reaches memory.

# %%
import ctypes
import shutil
import subprocess
import tempfile
import warnings

import torch

import thunder_fn as tfn
from thunder_fn.extend import FusionExecutor
from thunder_fn.ir import Literal, TensorType, Var

torch.manual_seed(0)
COMPILER = shutil.which("cc") or shutil.which("gcc")

C = {
    "aten.add.Tensor": "{} + {}",
    "aten.mul.Tensor": "{} * {}",
    "aten.neg.default": "-{}",
    "aten.sin.default": "sinf({})",
    "aten.cos.default": "cosf({})",
    "aten.exp.default": "expf({})",
}

# %% [markdown]
# What it supports is a question about one equation, answered from types. `None` is yes, a text says why not.


# %%
def unsupported(equation):
    if equation.op.name not in C:
        return "no C for it"
    if equation.kwargs:
        return "keyword arguments"  # such as add's alpha
    types = {var.type for var in (*equation.operands, *equation.outputs)}
    if len(types) != 1:
        return "operands are broadcast or promoted"
    (type_,) = types
    return None if isinstance(type_, TensorType) and type_.dtype == torch.float32 else "not float32"


# %% [markdown]
# `fuse` gets the region. Each equation is a line of C, each input a pointer.


# %%
def c_source(region):
    text = lambda atom: f"v{atom.index}" if isinstance(atom, Var) else f"{float(atom.value)!r}f"
    lines = [f"float v{var.index} = in{i}[i];" for i, var in enumerate(region.inputs)]
    for equation in region.equations:
        args = [text(arg) for arg in equation.args if isinstance(arg, Var | Literal)]
        lines.append(f"float v{equation.outputs[0].index} = {C[equation.op.name].format(*args)};")
    lines += [f"out{i}[i] = {text(atom)};" for i, atom in enumerate(region.outputs)]
    inputs = [f"const float *in{i}" for i in range(len(region.inputs))]
    outputs = [f"float *restrict out{i}" for i in range(len(region.outputs))]
    body = "\n    ".join(lines)
    return (
        f"#include <math.h>\nvoid run(long n, {', '.join([*inputs, *outputs])}) {{\n"
        f"  for (long i = 0; i < n; i++) {{\n    {body}\n  }}\n}}\n"
    )


def compiled(source):
    library = tempfile.mkdtemp() + "/region.so"
    flags = ["-O2", "-ffp-contract=off", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-lm"]
    subprocess.run([COMPILER, *flags], input=source, text=True, check=True)
    return ctypes.CDLL(library).run


class CLoops(FusionExecutor):
    """Elementwise float32 ops on contiguous tensors of one shape, as a C loop."""

    def supports(self, equation):
        return unsupported(equation)

    def fuse(self, region):
        types = {var.type for var in region.inputs} | {e.outputs[0].type for e in region.equations}
        if not COMPILER or len(types) != 1:
            return lambda *xs: tfn.evaluate(region, xs)
        run = compiled(c_source(region))

        def call(*xs):
            xs = [x.contiguous() for x in xs]
            outs = [torch.empty_like(xs[0]) for _ in region.outputs]
            run(ctypes.c_long(xs[0].numel()), *(ctypes.c_void_p(t.data_ptr()) for t in (*xs, *outs)))
            return tuple(outs)

        return call


cloops = CLoops("cloops", numerics="reassociating")

# %% [markdown]
# That is all. The five ops become one line of the program; what the line stands for is shown below it.


# %%
def f(x, y):
    return torch.sin(x) * y + torch.exp(-y)


x, y = torch.randn(100, 7), torch.randn(100, 7)
fast = tfn.jit(f, executors=[cloops])
torch.testing.assert_close(fast(x, y), f(x, y))
program = str(tfn.last_traces(fast)[-1])
print(program)
lines = [line.strip() for line in program.splitlines() if not line.strip().startswith("#")]
assert lines[1].startswith("(v2,) = cloops_fusion_0(v0, v1)") and lines[2:] == ["return (v2,)"]
print(c_source(tfn.trace(f, x, y)))

# %% [markdown]
# Executors come last, after every transform, so nobody has to tell this one of derivatives: what a gradient computes are
# ops too.

# %%
loss = lambda x, y: f(x, y).sum()
gradient = tfn.grad(tfn.jit(loss, executors=[cloops]), argnums=(0, 1))
for ours, theirs in zip(gradient(x, y), torch.func.grad(loss, argnums=(0, 1))(x, y), strict=True):
    torch.testing.assert_close(ours, theirs)
print(tfn.last_traces(gradient)[-1])
assert "cloops" in str(tfn.last_traces(gradient)[-1])

# %% [markdown]
# ## Is it right?
#
# An executor says how far it may be from `evaluate`, and `verify=True` holds it to that in every call: it names the first
# equation that is farther off. Here is one whose sine is a little wrong.

# %%
tfn.jit(f, executors=[cloops], verify=True)(x, y)


class Wrong(CLoops):
    def fuse(self, region):
        right = super().fuse(region)
        return lambda *xs: tuple(out * 1.01 for out in right(*xs))


try:
    tfn.jit(f, executors=[Wrong("wrong")], verify=True)(x, y)
except tfn.errors.VerificationError as error:
    print(error)
else:
    raise AssertionError("one per cent is no rounding error")

# %% [markdown]
# ## What must not hold
#
# Unsupported ops must not reach the executor. Integers stay with PyTorch. A warning says so, as nothing is left for the
# executor, and `explain_claims` says who runs what.

# %%
counts = tfn.jit(lambda n: n * n + n, executors=[cloops])
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert counts(torch.arange(3)).tolist() == [0, 2, 6]
print(said[0].message)
assert "cloops" not in str(tfn.last_traces(counts)[-1])
report = str(tfn.explain_claims(counts, torch.arange(3)))
print(report)
assert "not float32" in report

# %% [markdown]
# ## Where this lives
#
# `thunder_fn/executors/base.py` has `Executor` and `FusionExecutor`, `regions.py` cuts the regions, `verify.py` compares.
# `executors/torchinductor/` is a fusion executor of size: it hands regions to PyTorch's Inductor.
