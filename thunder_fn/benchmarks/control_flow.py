"""Loops: a tanh RNN and an LSTM, values and gradients per step, beside loops in Python,
torch.compile and JAX.

Also what only a structured op can promise: capture takes the same time whatever the number of
steps. Conditions nested in conditions stay linear in their depth, differentiated twice too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import thunder_fn as tfn
from thunder_fn import torch_internals as internals
from thunder_fn.benchmarks.harness import OURS, Case, Result, once, run_case, single
from thunder_fn.ir.trace import Trace, every_equation

Tensor = torch.Tensor
EAGER = "Python loop, eager"
COMPILED = f"{OURS}, inductor executor"
JAX = "jax.lax.scan"
UNROLLED = 16
"""Steps of the Python loop for torch.compile, which writes all of them out: compiling takes
seconds for each.
"""


@dataclass(frozen=True)
class Net:
    """A recurrent network: its weights, the first carry and the inputs; one step for PyTorch and
    one for JAX.
    """

    name: str
    weights: tuple[Tensor, ...]
    carry: Any
    xs: Tensor
    step: Callable[..., Any]
    jax_step: Callable[..., Any]


def run(quick: bool = False) -> Iterator[Result]:
    """Per step: forward and gradient of both networks. Then capture by length, and conditions by
    depth.
    """
    for net in (rnn(32 if quick else 512), lstm(16 if quick else 256)):
        for kind, peers in (("forward", forwards(net, quick)), ("gradient", gradients(net, quick))):
            peers, notes = _working(peers)
            case = Case(
                f"control flow: {net.name}, {kind} per step", peers, rounds=9, warmup=2, notes=notes
            )
            yield _per_step(run_case(replace(case, target=f"1.1 x {EAGER}"), quick), len(net.xs))
    lengths = {
        f"{length} steps": rnn(length) for length in ((10, 100) if quick else (10, 100, 1000))
    }
    tfn.trace(forward(rnn(3), tfn.scan), rnn(3).weights, rnn(3).carry, rnn(3).xs)
    seconds = {
        name: once(lambda: tfn.trace(forward(net, tfn.scan), net.weights, net.carry, net.xs))
        for name, net in lengths.items()
    }
    yield single("control flow: capture of the RNN", seconds, "the same for every length")
    yield from nested(quick)


def rnn(length: int) -> Net:
    """`h = tanh(x + h @ w)`, batch 16, width 64."""

    def step(weights: Any, h: Any, x: Any) -> Any:
        h = torch.tanh(x + h @ weights[0])
        return h, h

    def jax_step(weights: Any, h: Any, x: Any) -> Any:
        import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

        h = jnp.tanh(x + h @ weights[0])
        return h, h

    torch.manual_seed(0)
    weights = (torch.randn(64, 64) * 0.1,)
    return Net(
        f"tanh RNN, {length} steps of 16x64",
        weights,
        torch.zeros(16, 64),
        torch.randn(length, 16, 64),
        step,
        jax_step,
    )


def lstm(length: int) -> Net:
    """An LSTM cell as its definition has it, batch 16, width 64."""

    def step(weights: Any, carry: Any, x: Any) -> Any:
        h, c = carry
        i, f, g, o = torch.addmm(weights[1], torch.cat([x, h], 1), weights[0]).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), h

    def jax_step(weights: Any, carry: Any, x: Any) -> Any:
        import jax  # pyright: ignore[reportMissingImports]
        import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], 1) @ weights[0] + weights[1], 4, 1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    torch.manual_seed(0)
    weights = (torch.randn(128, 256) * 0.1, torch.randn(256) * 0.1)
    carry = (torch.zeros(16, 64), torch.zeros(16, 64))
    return Net(
        f"LSTM, {length} steps of 16x64",
        weights,
        carry,
        torch.randn(length, 16, 64),
        step,
        jax_step,
    )


# ---- peers ----


def loop(combine: Callable[..., Any], carry: Any, xs: Tensor) -> Any:
    """The loop in Python."""
    ys: list[Tensor] = []
    for x in xs.unbind(0):
        carry, y = combine(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def forward(net: Net, scan: Callable[..., Any]) -> Callable[..., Any]:
    """The network as a function of weights, carry and inputs."""
    return lambda weights, carry, xs: scan(lambda c, x: net.step(weights, c, x), carry, xs)


def forwards(net: Net, quick: bool) -> dict[str, Callable[[], Any]]:
    """Values by everyone."""
    args = (net.weights, net.carry, net.xs)
    jitted, eager = tfn.jit(forward(net, tfn.scan)), forward(net, loop)
    peers = {OURS: lambda: jitted(*args), EAGER: lambda: eager(*args)}
    if not quick:
        compiled = tfn.jit(forward(net, tfn.scan), executors=["inductor"])
        peers[COMPILED] = lambda: compiled(*args)
    for name, (f, part) in _compiled(net).items():
        peers[name] = lambda f=f, part=part: f(part.weights, part.carry, part.xs)
    return peers | _jax(net, lambda jax, f: jax.jit(f))


def gradients(net: Net, quick: bool) -> dict[str, Callable[[], Any]]:
    """Gradients of the sum of the outputs by the weights, by everyone."""
    total = lambda weights: forward(net, tfn.scan)(weights, net.carry, net.xs)[1].sum()
    jitted = tfn.jit(tfn.grad(total))
    peers: dict[str, Callable[[], Any]] = {OURS: lambda: jitted(net.weights)}
    if not quick:
        compiled = tfn.jit(tfn.grad(total), executors=["inductor"])
        peers[COMPILED] = lambda: compiled(net.weights)
    for name, (f, part) in {EAGER: (forward(net, loop), net), **_compiled(net)}.items():
        peers[name] = lambda f=f, part=part: _backward(f, part)
    return peers | _jax(net, lambda jax, f: jax.jit(jax.grad(lambda w, c, x: f(w, c, x)[1].sum())))


def _backward(f: Callable[..., Any], net: Net) -> Any:
    weights = tuple(w.detach().requires_grad_() for w in net.weights)
    f(weights, net.carry, net.xs)[1].sum().backward()
    return [w.grad for w in weights]


def _compiled(net: Net) -> dict[str, tuple[Callable[..., Any], Net]]:
    """torch.compile of PyTorch's scan, and of the Python loop on the first steps; each with the
    network that it runs on.
    """

    def copied(combine: Callable[..., Any]) -> Callable[..., Any]:
        """PyTorch's scan takes no step that returns one tensor twice."""
        return lambda c, x: (lambda carry, y: (carry, y.clone()))(*combine(c, x))

    scanned = forward(
        net, lambda combine, carry, xs: internals.pytorchs("scan", copied(combine), carry, xs)
    )
    short = replace(net, xs=net.xs[:UNROLLED])
    return {
        "torch.compile of PyTorch's scan": (torch.compile(scanned, dynamic=False), net),
        _unrolled(len(short.xs)): (torch.compile(forward(short, loop), dynamic=False), short),
    }


def _unrolled(steps: int) -> str:
    return f"torch.compile of the Python loop, {steps} steps"


def _jax(net: Net, make: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    try:
        import jax  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    args = jax.tree.map(
        lambda tensor: jax.numpy.asarray(tensor.numpy()), (net.weights, net.carry, net.xs)
    )
    f = make(jax, lambda w, carry, xs: jax.lax.scan(lambda c, x: net.jax_step(w, c, x), carry, xs))
    return {JAX: lambda: jax.block_until_ready(f(*args))}


def _working(
    peers: dict[str, Callable[[], Any]],
) -> tuple[dict[str, Callable[[], Any]], tuple[str, ...]]:
    """The peers that can do it, and why the others cannot."""
    working, notes = dict[str, Callable[[], Any]](), list[str]()
    for name, peer in peers.items():
        try:
            peer()
            working[name] = peer
        except Exception as error:  # noqa: BLE001  # the other peers are still measured
            notes.append(
                f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0]:.90}"
            )
    return working, tuple(notes)


def _per_step(result: Result, steps: int) -> Result:
    """Seconds and ratios for a step, of which the unrolled loop has fewer."""
    fewer = min(steps, UNROLLED)
    counts = {name: fewer if name == _unrolled(fewer) else steps for name in result.seconds}
    seconds = {name: value / counts[name] for name, value in result.seconds.items()}
    notes = result.notes
    if COMPILED in seconds and JAX in seconds:
        notes = (*notes, f"{COMPILED} / {JAX} = {seconds[COMPILED] / seconds[JAX]:.2f}")
    return replace(
        result,
        seconds=seconds,
        notes=notes,
        ratios={name: value * counts[name] / steps for name, value in result.ratios.items()},
    )


# ---- nested conditions ----


def nested(quick: bool) -> Iterator[Result]:
    """A cond in the branch of a cond, and so on, differentiated twice: time, and equations of
    the trace.
    """
    x = torch.linspace(-1, 1, 4)
    seconds: dict[str, float] = {}
    notes: list[str] = []
    for depth in (2, 4) if quick else (3, 6, 12):
        f = tfn.hessian(conditions(depth))
        traces: list[Trace] = []
        seconds[f"depth {depth}"] = once(lambda: traces.append(tfn.trace(f, x)))
        size = sum(1 for _ in every_equation(traces[0]))
        notes.append(f"depth {depth}: {size} equations in distinct bodies")
    yield single(
        "control flow: Hessian of nested conditions", seconds, "linear in depth", tuple(notes)
    )


def conditions(depth: int) -> Callable[[Tensor], Tensor]:
    """`cond(p, f, g)` where f is such a condition again."""
    if not depth:
        return lambda x: (x * x.sin()).sum()
    inner = conditions(depth - 1)
    return lambda x: tfn.cond(x.sum() > depth, inner, lambda x: (x.cos() * depth).sum(), (x,))
