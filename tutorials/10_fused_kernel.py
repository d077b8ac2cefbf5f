# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A fused kernel in place of PyTorch's ops
#
# Cross entropy in C: the forward reads each row once and keeps the logarithm of the sum of its exponentials, the backward writes
# `(softmax - one_hot) * g` with it. NumPy stands in where there is no C compiler. The executor claims
# `torch.nn.functional.cross_entropy` whole, where the arguments are such that the kernel is right.

# %%
import ctypes
import shutil
import subprocess
import tempfile
import warnings

import numpy as np
import torch
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.extend import OperatorExecutor, get_grad, put_grads

torch.manual_seed(0)

SOURCE = r"""
#include <math.h>
void forward(const float *x, const long *y, float *loss, float *lse, long n, long k) {
  for (long i = 0; i < n; i++, x += k) {
    float top = -INFINITY, sum = 0;
    for (long j = 0; j < k; j++) {
      if (x[j] > top) { sum *= expf(top - x[j]); top = x[j]; }
      sum += expf(x[j] - top);
    }
    lse[i] = top + logf(sum);
    loss[i] = y[i] < 0 ? 0 : lse[i] - x[y[i]];
  }
}
void backward(const float *g, const float *x, const long *y, const float *lse, float *out, long n, long k) {
  for (long i = 0; i < n; i++, x += k, out += k)
    for (long j = 0; j < k; j++) out[j] = y[i] < 0 ? 0 : g[i] * (expf(x[j] - lse[i]) - (j == y[i]));
}
"""
compiler = shutil.which("cc") or shutil.which("gcc")
if compiler:
    library = tempfile.mkdtemp() + "/xent.so"
    flags = ["-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-lm"]
    subprocess.run([compiler, *flags], input=SOURCE, text=True, check=True)
    kernels = ctypes.CDLL(library)


def call(kernel, *tensors):
    sizes = (ctypes.c_long(size) for size in tensors[0 if kernel == "forward" else 1].shape)
    getattr(kernels, kernel)(*(ctypes.c_void_p(x.data_ptr()) for x in tensors), *sizes)


def xent_impl(logits, labels):
    if not compiler:
        lse = torch.from_numpy(np.logaddexp.reduce(logits.numpy(), axis=1))
        picked = logits[torch.arange(len(labels)), labels.clamp(min=0)]
        return torch.where(labels < 0, 0, lse - picked), lse
    loss, lse = torch.empty(len(labels)), torch.empty(len(labels))
    call("forward", logits.contiguous(), labels, loss, lse)
    return loss, lse


def xent_backward_impl(g, logits, labels, lse):
    if not compiler:
        return xent_backward_like(g, logits, labels, lse)
    out = torch.empty_like(logits)
    call("backward", g.contiguous(), logits, labels, lse, out)
    return out


def xent_like(logits, labels):
    lse = logits.logsumexp(1)
    picked = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels < 0, 0, lse - picked), lse


def xent_backward_like(g, logits, labels, lse):
    one_hot = F.one_hot(labels.clamp(min=0), logits.shape[1])
    return torch.where(labels < 0, 0, g)[:, None] * ((logits - lse[:, None]).exp() - one_hot)


xent_ex = OperatorExecutor("xent_ex")
xent = xent_ex.register_operator("xent", like=xent_like, fn=xent_impl)
xent_backward = xent_ex.register_operator("xent_backward", like=xent_backward_like, fn=xent_backward_impl)


def xent_checker(logits, labels, reduction="mean", **options):
    plain = options.get("weight") is None and options.get("label_smoothing", 0.0) == 0.0
    ignores_negative = options.get("ignore_index", -100) < 0
    return plain and ignores_negative and reduction == "mean" and logits.dim() == 2 and logits.dtype == torch.float32


def xent_transform(logits, labels, **options):
    return xent(logits, labels)[0].sum() / (labels >= 0).sum()


def xent_grad(logits, labels, **options):
    loss, lse = xent(logits, labels)
    count = (labels >= 0).sum()
    out = loss.sum() / count
    g = (get_grad(out) / count).expand(len(labels))
    put_grads((logits,), (xent_backward(g, logits.contiguous(), labels, lse),))
    return out


xent_ex.register_implementation(
    F.cross_entropy, checker=xent_checker, execution_transform=xent_transform, grad_transform=xent_grad
)


def program(f):
    return str(tfn.last_traces(f)[-1])


logits, labels = torch.randn(64, 1000), torch.randint(0, 1000, [64])
labels[3] = -100  # which cross_entropy ignores
loss = tfn.jit(lambda x, y: F.cross_entropy(x, y, reduction="mean"), executors=[xent_ex])
torch.testing.assert_close(loss(logits, labels), F.cross_entropy(logits, labels))
print(program(loss))

# %%
loss_grad = tfn.grad(loss)
expected = torch.func.grad(F.cross_entropy)(logits, labels)
torch.testing.assert_close(loss_grad(logits, labels), expected)
print(program(loss_grad))
assert program(loss_grad).count("= xent(") == program(loss_grad).count("= xent_backward(") == 1

# %% [markdown]
# A call that the checker refuses does not reach the kernel. The executor then computes nothing at all, which is worth a warning.

# %%
smooth = tfn.jit(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), executors=[xent_ex])
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    torch.testing.assert_close(smooth(logits, labels), F.cross_entropy(logits, labels, label_smoothing=0.1))
print(said[0].message)
assert "xent" not in program(smooth)
print(tfn.explain_claims(smooth, logits, labels))

# %% [markdown]
# In the code: `executors/operator_executor.py`, `executors/grad_transforms.py`, `executors/claims.py`.
