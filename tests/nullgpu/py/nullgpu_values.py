"""Values for operators that exist only on CUDA, each as a CPU function of the same schema.

Loads nullvalues.so at the end of `import torch`.
"""

import ctypes
import math
import os

import torch

here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
library = torch.library.Library("nullgpu", "DEF")


def values(*names):
    def register(function):
        for name in names:
            base, _, overload = name.partition(".")
            try:
                schema = str(torch._C._get_schema("aten::" + base, overload))
            except RuntimeError:
                continue  # not in this version of PyTorch
            library.define(schema.replace("aten::", "", 1))
            library.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


# products
@values("mm.dtype", "bmm.dtype")
def _(a, b, out_dtype):
    return torch.matmul(a.float(), b.float()).to(out_dtype)


@values("mm.dtype_out", "bmm.dtype_out")
def _(a, b, out_dtype, *, out):
    return (
        out.copy_(torch.matmul(a.float(), b.float()))
        if out.numel()
        else out.resize_(*a.shape[:-1], b.shape[-1]).copy_(torch.matmul(a.float(), b.float()))
    )


@values("addmm.dtype", "baddbmm.dtype")
def _(c, a, b, out_dtype, *, beta=1, alpha=1):
    return (beta * c.float() + alpha * torch.matmul(a.float(), b.float())).to(out_dtype)


@values("addmm.dtype_out", "baddbmm.dtype_out")
def _(c, a, b, out_dtype, *, beta=1, alpha=1, out):
    return out.copy_(beta * c.float() + alpha * torch.matmul(a.float(), b.float()))


@values("_addmm_activation")
def _(c, a, b, *, beta=1, alpha=1, use_gelu=False):
    x = beta * c.float() + alpha * (a.float() @ b.float())
    return (torch.nn.functional.gelu(x, approximate="tanh") if use_gelu else x.relu()).to(a.dtype)


@values("_int_mm")
def _(a, b):
    return a.int() @ b.int()


def scaled(a, b, scale_a, scale_b, bias, scale_result, out_dtype):
    m, n = a.shape[0], b.shape[1]
    if (
        a.dtype.itemsize != 1
        or scale_a.dtype != torch.float32
        or scale_a.numel() not in (1, m)
        or scale_b.numel() not in (1, n)
    ):
        raise NotImplementedError("nullgpu: _scaled_mm: only one scale, or one a row of a and a column of b")
    r = (a.float() * scale_a.reshape(-1, 1)) @ (b.float() * scale_b.reshape(1, -1))
    if bias is not None:
        r = r + bias.float()
    if scale_result is not None:
        r = r * scale_result
    return r.to(out_dtype or a.dtype)


@values("_scaled_mm")
def _(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    return scaled(a, b, scale_a, scale_b, bias, scale_result, out_dtype)


@values("_scaled_mm.out")
def _(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False, *, out):
    return out.resize_(a.shape[0], b.shape[1]).copy_(scaled(a, b, scale_a, scale_b, bias, scale_result, out_dtype))


@values("_convert_weight_to_int4pack")  # the packing is our own: only _weight_int4pack_mm reads it
def _(w, tiles):
    n, half = w.shape
    return w.contiguous().view(torch.int32).reshape(n // 8, half * 2 // (tiles * 16), 32, tiles // 2)


@values("_weight_int4pack_mm")
def _(x, packed, group, scales):
    n = packed.shape[0] * 8
    w = packed.contiguous().view(-1).view(torch.uint8).reshape(n, -1)
    q = torch.stack([w >> 4, w & 15], -1).reshape(n, -1).float() - 8
    s, z = (scales[..., i].float().T.repeat_interleave(group, 1) for i in (0, 1))
    return (x.float() @ (q * s + z).T).to(x.dtype)


# attention: (query, key, value) as batch, time, heads, width
def allowed(tq, tk, causal, left, right):
    i, j = torch.arange(tq)[:, None], torch.arange(tk)[None]
    m = torch.ones(tq, tk, dtype=torch.bool)
    if causal == 1:
        m &= j <= i
    if causal == 2:
        m &= j <= i + tk - tq
    if left is not None and left >= 0:
        m &= j >= i + tk - tq - left
    if right is not None and right >= 0:
        m &= j <= i + tk - tq + right
    return m


def scores(q, k, v, bias, causal, scale, p, seed, left=None, right=None):
    """float q, k, v as batch, heads, time, width; the probabilities, what dropout keeps, log-sum-exp and the repeated k, v"""
    r = q.shape[1] // max(k.shape[1], 1)
    k, v = (t.float().repeat_interleave(r, 1) if r > 1 else t.float() for t in (k, v))
    s = (q.float() @ k.mT) * scale
    if bias is not None:
        s = s + bias.float()
    s = s.masked_fill(~allowed(q.shape[2], k.shape[2], causal, left, right), -math.inf)
    lse = s.logsumexp(-1)
    w = torch.nan_to_num((s - lse[..., None]).exp())
    keep = None
    if p > 0:
        keep = (torch.rand(w.shape, generator=torch.Generator().manual_seed(seed)) >= p).float() / (1 - p)
    return w, keep, lse, k, v, r


def attend(q, k, v, bias, causal, scale, p, seed, left=None, right=None):
    w, keep, lse, k, v, _r = scores(q, k, v, bias, causal, scale, p, seed, left, right)
    return (w if keep is None else w * keep) @ v, lse


def attend_backward(g, q, k, v, bias, causal, scale, p, seed, left=None, right=None):
    w, keep, _lse, kk, vv, r = scores(q, k, v, bias, causal, scale, p, seed, left, right)
    g = g.float()
    dv = (w if keep is None else w * keep).mT @ g
    dw = g @ vv.mT
    if keep is not None:
        dw = dw * keep
    ds = w * (dw - (dw * w).sum(-1, keepdim=True))
    dq = ds @ kk * scale
    dk = ds.mT @ q.float() * scale
    if r > 1:
        dk, dv = (t.unflatten(1, (-1, r)).sum(2) for t in (dk, dv))
    return dq, dk, dv, ds


def pieces(q, k, cq, ck, dim):  # of packed sequences
    if cq is None:
        return [(slice(None), slice(None))]
    cq = cq.tolist()
    ck = cq if ck is None else ck.tolist()
    return [(slice(a, b), slice(c, d)) for a, b, c, d in zip(cq, cq[1:], ck, ck[1:], strict=False)]


def heads_first(t, packed):
    return (t[None] if packed else t).transpose(1, 2)


def new_seed():
    return int(torch.randint(1, 2**31, ()))


def seed_of(t):
    return int(t.reshape(-1)[:1].to(torch.int64)) if t is not None and t.numel() and True else 0


def default(scale, q):
    return q.shape[-1] ** -0.5 if scale is None else scale


@values("_flash_attention_forward")
def _(
    q,
    k,
    v,
    cq,
    ck,
    max_q,
    max_k,
    p,
    causal,
    debug,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    **other,
):
    if seqused_k is not None or alibi_slopes is not None or any(x is not None for x in other.values()):
        raise NotImplementedError("nullgpu: _flash_attention_forward: seqused_k, alibi_slopes, block_table")
    seed = new_seed() if p > 0 else 0
    out = torch.empty_like(q)
    lse = []
    packed = cq is not None
    for a, b in pieces(q, k, cq, ck, 0):
        args = (
            [heads_first(t, packed) for t in (q[a], k[b], v[b])] if packed else [t.transpose(1, 2) for t in (q, k, v)]
        )
        o, sums = attend(*args, None, 2 * causal, default(scale, q), p, seed, window_size_left, window_size_right)
        o = o.transpose(1, 2)
        out[a] = o[0].to(q.dtype) if packed else o.to(q.dtype)
        lse.append(sums[0] if packed else sums)
    state = torch.tensor([seed, 0]).to(torch.uint64)
    return (
        out,
        torch.cat(lse, -1) if packed else lse[0],
        state,
        torch.zeros((), dtype=torch.uint64),
        torch.empty(0, dtype=q.dtype),
    )


@values("_flash_attention_backward")
def _(
    g,
    q,
    k,
    v,
    out,
    lse,
    cq,
    ck,
    max_q,
    max_k,
    p,
    causal,
    seed,
    offset,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    grads = [torch.empty_like(t) for t in (q, k, v)]
    packed = cq is not None and cq.numel() > 0
    for a, b in pieces(q, k, cq if packed else None, ck, 0):
        args = [heads_first(t, packed) for t in ((g[a], q[a], k[b], v[b]) if packed else (g, q, k, v))]
        got = attend_backward(
            *args, None, 2 * causal, default(scale, q), p, seed_of(seed), window_size_left, window_size_right
        )
        for to, at, x in zip(grads, (a, b, b), got, strict=False):
            x = x.transpose(1, 2)
            to[at] = (x[0] if packed else x).to(to.dtype)
    return tuple(grads)


@values("_efficient_attention_forward")
def _(q, k, v, bias, cq, ck, max_q, max_k, p, mask, compute_lse=False, *, scale=None, seqlen_k=None, window_size=None):
    if seqlen_k is not None or window_size:
        raise NotImplementedError("nullgpu: _efficient_attention_forward: seqlen_k, window_size")
    seed = new_seed() if p > 0 else 0
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    parts = pieces(q, k, cq, ck, 1)
    lse = []
    for a, b in parts:
        o, sums = attend(
            *(t.transpose(1, 2) for t in (q[:, a], k[:, b], v[:, b])), bias, mask, default(scale, q), p, seed
        )
        out[:, a] = o.transpose(1, 2).to(q.dtype)
        lse.append(sums)
    longest = max(sums.shape[-1] for sums in lse)
    to = (longest + 31) // 32 * 32 if compute_lse else 0
    lse = torch.cat(
        [torch.nn.functional.pad(s, (0, to - s.shape[-1]), value=math.inf) if to else s[..., :0] for s in lse]
    )
    return out, lse, torch.tensor(seed), torch.tensor(0), longest, max_k if max_k is not None else k.shape[1]


@values("_efficient_attention_backward")
def _(
    g,
    q,
    k,
    v,
    bias,
    out,
    cq,
    ck,
    max_q,
    max_k,
    lse,
    p,
    seed,
    offset,
    mask,
    bias_grad,
    *,
    scale=None,
    num_splits_key=None,
    window_size=None,
    shared_storage_dqdkdv=False,
):
    grads = [torch.empty_like(t) for t in (q, k, v)]
    dbias = None
    for a, b in pieces(q, k, cq, ck, 1):
        *got, ds = attend_backward(
            *(t.transpose(1, 2) for t in (g[:, a], q[:, a], k[:, b], v[:, b])),
            bias,
            mask,
            default(scale, q),
            p,
            seed_of(seed),
        )
        for to, at, x in zip(grads, (a, b, b), got, strict=False):
            to[:, at] = x.transpose(1, 2).to(to.dtype)
    if bias_grad and bias is not None:
        dbias = ds.expand(ds.shape).sum_to_size(bias.shape).to(bias.dtype)
    return *grads, dbias if dbias is not None else torch.empty(0)


@values("_cudnn_attention_forward")
def _(q, k, v, bias, cq, ck, max_q, max_k, compute_lse, p=0.0, causal=False, debug=False, *, scale=None):
    if cq is not None:
        raise NotImplementedError("nullgpu: _cudnn_attention_forward: packed sequences")
    seed = new_seed() if p > 0 else 0
    o, sums = attend(q, k, v, bias, int(causal), default(scale, q), p, seed)
    o = o.transpose(1, 2).contiguous().transpose(1, 2)
    return o.to(q.dtype), sums[..., None], None, None, q.shape[2], k.shape[2], torch.tensor(seed), torch.tensor(0), None


@values("_cudnn_attention_backward")
def _(g, q, k, v, out, lse, seed, offset, bias, cq, ck, max_q, max_k, p, causal, *, scale=None):
    got = attend_backward(
        g,
        q,
        k,
        v,
        bias if bias is not None and bias.numel() else None,
        int(causal),
        default(scale, q),
        p,
        seed_of(seed),
    )
    return tuple(x.to(t.dtype) for x, t in zip(got, (q, k, v), strict=False))


# convolution, normalization, recurrence, dropout
@values("cudnn_convolution")
def _(x, w, padding, stride, dilation, groups, *_):
    return torch.ops.aten.convolution(x, w, None, stride, padding, dilation, False, [0] * len(stride), groups)


@values("cudnn_convolution_transpose")
def _(x, w, padding, output_padding, stride, dilation, groups, *_):
    return torch.ops.aten.convolution(x, w, None, stride, padding, dilation, True, output_padding, groups)


@values("cudnn_convolution_relu")
def _(x, w, b, stride, padding, dilation, groups):
    return torch.ops.aten.convolution(x, w, b, stride, padding, dilation, False, [0] * len(stride), groups).relu()


@values("cudnn_convolution_add_relu")
def _(x, w, z, alpha, b, stride, padding, dilation, groups):
    return (
        torch.ops.aten.convolution(x, w, b, stride, padding, dilation, False, [0] * len(stride), groups)
        + (1 if alpha is None else alpha) * z
    ).relu()


@values("_conv_depthwise2d", "conv_depthwise3d")
def _(x, w, size, b, stride, padding, dilation):
    return torch.ops.aten.convolution(x, w, b, stride, padding, dilation, False, [0] * len(stride), x.shape[1])


@values("cudnn_batch_norm")
def _(x, w, b, mean, var, training, momentum, eps):
    return *torch.native_batch_norm(x, w, b, mean, var, training, momentum, eps), torch.empty(0, dtype=torch.uint8)


@values("cudnn_batch_norm_backward")
def _(x, g, w, mean, var, save_mean, save_var, eps, reserve):
    return torch.ops.aten.native_batch_norm_backward(g, x, w, mean, var, save_mean, save_var, True, eps, [True] * 3)


def per_channel(t, x):
    return t.reshape([1, -1] + [1] * (x.dim() - 2)).float()


def but_channel(x):
    return [d for d in range(x.dim()) if d != 1]


@values("batch_norm_stats")
def _(x, eps):
    x = x.float()
    d = but_channel(x)
    return x.mean(d), (x.var(d, unbiased=False) + eps).rsqrt()


@values("batch_norm_elemt")
def _(x, w, b, mean, invstd, eps):
    y = (x.float() - per_channel(mean, x)) * per_channel(invstd, x)
    if w is not None:
        y = y * per_channel(w, x)
    return (y if b is None else y + per_channel(b, x)).to(x.dtype)


@values("batch_norm_gather_stats_with_counts")
def _(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    n = counts.reshape(-1, 1).float()
    m = (mean * n).sum(0) / n.sum()
    second = ((invstd**-2 - eps + mean**2) * n).sum(0) / n.sum()
    var = second - m**2
    if running_mean is not None:
        running_mean.lerp_(m.to(running_mean.dtype), momentum)
        running_var.lerp_((var * n.sum() / (n.sum() - 1)).to(running_var.dtype), momentum)
    return m, (var + eps).rsqrt()


@values("batch_norm_backward_reduce")
def _(g, x, mean, invstd, w, input_g, weight_g, bias_g):
    d = but_channel(x)
    dy = g.float().sum(d)
    xmu = (g.float() * (x.float() - per_channel(mean, x))).sum(d)
    return dy, xmu, xmu * invstd if weight_g else None, dy.clone() if bias_g else None


@values("batch_norm_backward_elemt")
def _(g, x, mean, invstd, w, dy, xmu, counts):
    n = counts.sum()
    c = (x.float() - per_channel(mean, x)) * per_channel(invstd**2 * xmu / n, x)
    return ((g.float() - per_channel(dy / n, x) - c) * per_channel(invstd if w is None else invstd * w, x)).to(x.dtype)


@values("_fused_rms_norm_backward")
def _(g, x, shape, rstd, w, mask):
    d = tuple(range(x.dim() - len(shape), x.dim()))
    h = x.float() * rstd
    gw = g.float() * (1 if w is None else w.float())
    return ((gw - h * (gw * h).mean(d, keepdim=True)) * rstd).to(x.dtype) if mask[0] else None, (
        g.float() * h
    ).sum_to_size(w.shape).to(w.dtype) if mask[1] and w is not None else None


# shapes of what backwards read are CUDA's own
@values("_embedding_bag", "_embedding_bag_forward_only")
def _(
    weight,
    ids,
    offsets,
    scale_grad_by_freq=False,
    mode=0,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
):
    y, _, size, largest = torch.ops.aten._embedding_bag.default(
        weight.float(), ids, offsets, False, mode, False,
        None if per_sample_weights is None else per_sample_weights.float(), include_last_offset, padding_idx,
    )  # fmt: skip
    sizes = torch.zeros(offsets.shape, dtype=ids.dtype)
    sizes[: size.numel()] = size[: sizes.numel()]
    bags = torch.searchsorted(offsets[: y.shape[0]].contiguous(), torch.arange(ids.numel()).to(offsets), right=True) - 1
    return y.to(weight.dtype), bags.to(ids.dtype), sizes, largest if mode == 2 else ids.new_empty(0)


@values("log_sigmoid_forward")
def _(x):
    return torch.nn.functional.logsigmoid(x), x.new_empty(0)


@values("log_sigmoid_backward")
def _(g, x, buffer):
    return g * torch.sigmoid(-x)


@values("_fused_dropout")
def _(x, keep, generator=None):
    m = torch.rand(x.shape) < keep
    return (x * m / keep).to(x.dtype), m.to(torch.uint8)


@values("_masked_scale")
def _(x, mask, scale):
    return (x * mask * scale).to(x.dtype)


@values("_thnn_fused_lstm_cell")
def _(a, b, cx, ib=None, hb=None):
    i, f, g, o = (sum(t.float() for t in (a, b, ib, hb) if t is not None)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx.float() + i * g
    return (o * cy.tanh()).to(a.dtype), cy.to(a.dtype), torch.cat([i, f, g, o], 1).to(a.dtype)


@values("_thnn_fused_lstm_cell_backward_impl")
def _(gh, gc, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.float().chunk(4, 1)
    t = cy.float().tanh()
    gh = 0 * t if gh is None else gh.float()
    c = gh * o * (1 - t * t) + (0 if gc is None else gc.float())
    d = torch.cat([c * g * i * (1 - i), c * cx.float() * f * (1 - f), c * i * (1 - g * g), gh * t * o * (1 - o)], 1).to(
        workspace.dtype
    )
    return d, (c * f).to(cx.dtype), d.sum(0) if has_bias else None


@values("_thnn_fused_gru_cell")
def _(a, b, hx, ib=None, hb=None):
    x = (a if ib is None else a + ib).float().chunk(3, 1)
    h = (b if hb is None else b + hb).float().chunk(3, 1)
    r, z = (x[0] + h[0]).sigmoid(), (x[1] + h[1]).sigmoid()
    n = (x[2] + r * h[2]).tanh()
    return (n + z * (hx.float() - n)).to(a.dtype), torch.cat([r, z, n, hx.float(), h[2]], 1).to(a.dtype)


@values("_thnn_fused_gru_cell_backward")
def _(g, workspace, has_bias):
    r, z, n, hx, hn = workspace.float().chunk(5, 1)
    g = g.float()
    dn = g * (1 - z) * (1 - n * n)
    dz = g * (hx - n) * z * (1 - z)
    dr = dn * hn * r * (1 - r)
    a = torch.cat([dr, dz, dn], 1).to(workspace.dtype)
    b = torch.cat([dr, dz, dn * r], 1).to(workspace.dtype)
    return a, b, (g * z).to(workspace.dtype), a.sum(0) if has_bias else None, b.sum(0) if has_bias else None


def recurrent(x, weights, per_layer, hx, cx, mode, layers, batch_first, dropout, train, both, sizes, seed):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        has_bias = per_layer >= 4
        h = (hx, cx) if mode == 2 else hx
        f = {0: torch.rnn_relu, 1: torch.rnn_tanh, 2: torch.lstm, 3: torch.gru}[mode]
        packed = (torch.tensor(sizes, dtype=torch.int64),) if sizes else ()
        o, *states = (
            f(x, *packed, h, weights, has_bias, layers, dropout, train, both)
            if packed
            else f(x, h, weights, has_bias, layers, dropout, train, both, batch_first)
        )
    return o, states[0], states[1] if mode == 2 else None


def outside(function):  # a new thread has no dispatch keys excluded: autograd works in it
    import threading

    box = []

    def run():
        try:
            box.append((True, function()))
        except BaseException as e:  # noqa: BLE001
            box.append((False, e))

    t = threading.Thread(target=run)
    t.start()
    t.join()
    if not box[0][0]:
        raise box[0][1]
    return box[0][1]


@values("_cudnn_init_dropout_state")
def _(dropout, train, seed, **options):
    return torch.empty(8, dtype=torch.uint8)


@values("_cudnn_rnn_flatten_weight")
def _(weights, *_):
    return torch.cat([w.reshape(-1) for w in weights])


@values("_cudnn_rnn")
def _(
    x,
    weights,
    per_layer,
    buffer,
    hx,
    cx,
    mode,
    hidden,
    projected,
    layers,
    batch_first,
    dropout,
    train,
    both,
    sizes,
    state,
):
    seed = new_seed()
    o, h, c = recurrent(x, weights, per_layer, hx, cx, mode, layers, batch_first, dropout, train, both, sizes, seed)
    return (
        o.clone(),
        h.clone(),
        c.clone() if c is not None else x.new_empty(0),
        torch.tensor([seed]).view(torch.uint8),
        torch.cat([w.reshape(-1) for w in weights]),
    )


@values("_cudnn_rnn_backward")
def _(
    x,
    weights,
    per_layer,
    buffer,
    hx,
    cx,
    output,
    go,
    gh,
    gc,
    mode,
    hidden,
    projected,
    layers,
    batch_first,
    dropout,
    train,
    both,
    sizes,
    state,
    reserve,
    mask,
):
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")

    def run():
        leaf = lambda t: None if t is None else t.detach().clone().requires_grad_()
        ins = [leaf(x), leaf(hx), leaf(cx)]
        ws = [leaf(w) for w in weights]
        outs = recurrent(
            ins[0],
            ws,
            per_layer,
            ins[1],
            ins[2],
            mode,
            layers,
            batch_first,
            dropout,
            train,
            both,
            sizes,
            int(reserve.view(torch.int64)[0]),
        )
        pairs = [(o, g) for o, g in zip(outs, (go, gh, gc), strict=False) if o is not None and g is not None]
        wanted = [t for t in (*ins, *ws) if t is not None]
        got = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        return [None if t is None else next(got) for t in ins], [next(got) for _ in ws]

    (gx, ghx, gcx), gw = outside(run)
    return gx, ghx, gcx, [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gw, strict=False)]


@values("cudnn_grid_sampler")
def _(x, grid):
    return torch.grid_sampler_2d(x, grid, 0, 0, True)


@values("cudnn_grid_sampler_backward")
def _(x, grid, g):
    return torch.ops.aten.grid_sampler_2d_backward(g, x, grid, 0, 0, True, [True, True])


def weak(value):
    """The same memory: a graph's node keeps nothing alive."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.untyped_storage()
    told = {"size": value.size(), "stride": value.stride(), "storage_offset": value.storage_offset()}
    told |= {"dtype": value.dtype, "device": value.device, "nbytes": whole.nbytes(), "data_ptr": whole.data_ptr()}
    storage = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), value.device, whole.nbytes())
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(told, storage)


def widen_products(interpreter, tl, np):
    """The interpreter reads bfloat16 operands of a product as integers: make them float32 first."""
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(value):
        if value.dtype.scalar != tl.bfloat16:
            return value
        return interpreter.TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)


def interpret():
    """TRITON_INTERPRET=1: Triton's interpreter knows no libdevice (which kernels of Inductor call), and counts no launches."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    n = ctypes.CDLL(None)
    run = interpreter.GridExecutor.__call__
    nodes = []

    def counted(self, *args, **kwargs):
        if n.nullcuda_capturing():
            args, kwargs = tuple(map(weak, args)), {name: weak(value) for name, value in kwargs.items()}
            nodes.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: run(self, *args, **kwargs) and None))
            n.nullcuda_record(nodes[-1], None)
            return None
        n.nullcuda_cover(1)
        try:
            n.nullcuda_count()
            return run(self, *args, **kwargs)
        finally:
            n.nullcuda_cover(-1)

    interpreter.GridExecutor.__call__ = counted
    widen_products(interpreter, tl, np)
    special = torch.special
    known = {
        "fabs": torch.abs,
        **{f"{op}_rn": getattr(torch, op) for op in ("add", "sub", "mul", "div")},
        "rint": torch.round,
        "nearbyint": torch.round,
        "llrint": lambda x: torch.round(x).long(),
        "round": lambda x: torch.where(x < 0, -(0.5 - x).floor(), (x + 0.5).floor()),
        "tgamma": lambda x: (
            torch.where(x < 0, torch.cos(torch.pi * torch.floor(x)), torch.ones_like(x)) * torch.lgamma(x).exp()
        ),
        "cbrt": lambda x: x.sign() * x.abs().pow(1 / 3),
        "exp10": lambda x: 10.0**x,
        "isnan": lambda x: x.isnan().int(),
        "isinf": lambda x: x.isinf().int(),
        "isfinited": lambda x: x.isfinite().int(),
        "finitef": lambda x: x.isfinite().int(),
        "signbit": lambda x: x.signbit().int(),
        "j0": special.bessel_j0,
        "j1": special.bessel_j1,
        "y0": special.bessel_y0,
        "y1": special.bessel_y1,
        "cyl_bessel_i0": special.i0,
        "cyl_bessel_i1": special.i1,
        "erfcx": special.erfcx,
        "normcdf": special.ndtr,
        "normcdfinv": special.ndtri,
        "fmod": torch.fmod,
        "remainder": lambda a, b: a - b * torch.round(a / b),
        "fma": lambda a, b, c: a * b + c,
        "fast_expf": torch.exp,
        "fast_dividef": torch.div,
        "div_rn": torch.div,
        "div_rz": torch.div,
        "ilogb": lambda x: x.abs().log2().floor().int(),
        "float_as_int": lambda x: x.view(torch.int32),
        "int_as_float": lambda x: x.view(torch.float32),
        "double_as_longlong": lambda x: x.view(torch.int64),
        "max": torch.maximum,
        "min": torch.minimum,
        "logb": lambda x: x.abs().log2().floor(),
        "ldexp": lambda x, e: x * 2.0**e,
    }

    def valued(name, function):
        def call(*args, **_):
            args = [getattr(a, "value", a) for a in args]
            like = next(a for a in args if isinstance(a, tl.tensor))
            ins = [
                torch.from_numpy(np.array(a.handle.data))
                if isinstance(a, tl.tensor)
                else torch.tensor(a, dtype=torch.from_numpy(np.array(like.handle.data)).dtype)
                for a in args
            ]
            out = function(*ins).numpy()
            kind = {"b": tl.int1, "f4": tl.float32, "f8": tl.float64, "f2": tl.float16, "i4": tl.int32, "i8": tl.int64}
            scalar = kind.get(out.dtype.kind) or kind[out.dtype.str[1:]]
            return tl.tensor(
                interpreter.TensorHandle(out, scalar),
                tl.block_type(scalar, list(out.shape)) if like.type.is_block() else scalar,
            )

        call.__name__ = name
        return call

    def missing(name):
        def call(*_, **__):
            raise NotImplementedError(
                f"nullgpu: libdevice.{name} in Triton's interpreter: nullgpu_values.py gives no values for it"
            )

        return call

    for name, old in list(vars(libdevice).items()):
        if name.startswith("_") or not callable(old) or isinstance(old, type):
            continue
        f = known.get(name) or getattr(torch, name, None) or getattr(special, name, None)
        setattr(libdevice, name, valued(name, f) if f else missing(name))


def counters():
    """The kernels launched, those without values (`uncovered`, must be 0), and the ATen calls with values."""
    n, v = ctypes.CDLL(None), ctypes.CDLL(os.path.join(here, "nullvalues.so"))
    v.nullvalues_table.restype = n.nullcuda_uncovered_names.restype = ctypes.c_char_p
    operators = {k: int(c) for k, c in (line.split() for line in v.nullvalues_table().decode().splitlines())}
    return {
        "launches": n.nullcuda_launches(),
        "gemms": n.nullcuda_gemms(),
        "tritons": n.nullcuda_tritons(),
        "uncovered": n.nullcuda_uncovered(),
        "uncovered_names": n.nullcuda_uncovered_names().decode().split("\n")[:-1],
        "calls": v.nullvalues_calls(),
        "nested": v.nullvalues_nested(),
        "operators": operators,
    }


def load():
    import torch._native  # overrides of ATen by PyTorch itself: ours come after them

    torch.ops.load_library(os.path.join(here, "nullvalues.so"))
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpret()
