"""The picture of each program, drawn with matplotlib from its result."""

import re
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, INK, GREY, PALE = "#3949ab", "#e07a1f", "#2e8b57", "#1c1c22", "#5f6070", "#c9cbd6"
STYLE = {
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "axes.labelcolor": GREY,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 9,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.solid_capstyle": "round",
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # letters stay letters: small, sharp, and read aloud
    "svg.hashsalt": "gallery",
}


def draw(name, result, path: Path) -> None:
    """Write the picture of a program's result as an SVG of a few kilobytes."""
    title, picture = DRAWN[name]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.3), layout="constrained")
        picture(figure.subplots(1, 2), result)
        figure.savefig(path, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    path.write_text(short(path.read_text()))


def short(svg):
    """Say the style of markers once, and round to tenths of a point."""
    svg = re.sub(r"(\d\.\d)\d{3,}", r"\1", svg)
    style = r'(<g clip-path="[^"]*")>((?:\s*<use [^>]*style="([^"]*)"/>)+)'
    svg = re.sub(style, lambda g: f'{g[1]} style="{g[3]}">' + re.sub(r' style="[^"]*"', "", g[2]), svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def bare(axes, title, limit=None):
    """Leave out ticks, where positions matter and numbers do not."""
    axes.set(title=title, xticks=[], yticks=[], aspect="equal")
    axes.spines[:].set_visible(False)
    if limit is not None:
        axes.set(xlim=(-limit, limit), ylim=(-limit, limit))


def falling(axes, losses, title):
    """Draw a loss, and its average, against the steps."""
    losses = torch.tensor(losses)
    smooth = losses.unfold(0, max(1, len(losses) // 40), 1).mean(1)
    every = max(1, len(losses) // 200)
    for values, color, width in ((losses, PALE, 1), (smooth, BLUE, 1.8)):
        axes.plot(range(0, len(values), every), values[::every], color=color, lw=width)
    axes.set(title=title, xlabel="step", yscale="log")


def neural_ode(axes, result):
    left, right = axes
    grid = torch.cartesian_prod(torch.linspace(-2.2, 2.2, 14), torch.linspace(-2.2, 2.2, 14))
    velocity = result["field"](grid)
    velocity = velocity / velocity.norm(dim=1, keepdim=True).clamp(min=1e-3) ** 0.75
    left.quiver(*grid.T, *velocity.T, color=PALE, width=0.004, scale=42)
    for curve in result["observed"]:
        left.plot(*curve.T, ".", ms=2.2, color=ORANGE)
    bare(left, "What was seen; the learned field", 2.3)
    truth, predicted = result["curves"]
    right.plot(*truth.T, color=PALE, lw=5, label="truth")
    right.plot(*predicted.T, color=BLUE, lw=1.6, label="in the learned field")
    bare(right, "A new start, twice as long", 2.3)
    right.legend(loc="lower center", bbox_to_anchor=(0.5, -0.06), ncols=2)


def force_field(axes, result):
    left, right = axes
    truth, predicted = (f.flatten() for f in result["forces"])
    bound = truth.abs().max().item()
    left.plot([-bound, bound], [-bound, bound], color=PALE, lw=1)
    left.plot(truth[::3], predicted[::3], ".", ms=2.5, color=BLUE, alpha=0.6)
    left.set(title="Forces on unseen positions", xlabel="true", ylabel="predicted", aspect="equal")
    potential, kinetic = (e[::4] for e in result["energies"])
    steps = range(0, 4 * len(potential), 4)
    right.plot(steps, potential - potential[0], color=ORANGE, lw=1.5, label="potential")
    right.plot(steps, kinetic, color=GREEN, lw=1.5, label="kinetic")
    right.plot(steps, potential - potential[0] + kinetic, color=INK, lw=1.8, label="total: conserved")
    right.set(title="Dynamics in the learned field", xlabel="step", ylabel="energy")
    right.legend(loc="upper right", ncols=3, columnspacing=1, handlelength=1.2)
    right.margins(y=0.2)


def dp_sgd(axes, result):
    left, right = axes
    x, y = result["x"], result["y"]
    lines = torch.linspace(-2.2, 2.2, 60)
    grid = torch.cartesian_prod(lines, lines)
    chance = result["logit"](grid).sigmoid().reshape(60, 60).T
    left.contourf(lines, lines, chance, levels=[0, 0.5, 1], colors=["#fdeede", "#e4e7f7"])
    for label, color in ((0, ORANGE), (1, BLUE)):
        left.plot(*x[y == label][:150].T, ".", ms=3, color=color)
    bare(left, f"Learned privately: {result['accuracy']:.0%} right", 2.0)
    right.hist(torch.cat(result["norms"]).clamp(max=6).numpy(), bins=60, color=PALE)
    right.axvline(1, color=ORANGE, lw=1.8)
    right.annotate(
        "clipped to this norm",
        (1, 0.92),
        xytext=(6, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=ORANGE,
        fontsize=9,
    )
    right.set(
        title="Norms of the examples' gradients", xlabel="norm; 6 and more are one bar", yscale="log", ylabel="examples"
    )


def maml(axes, result):
    left, right = axes
    curves = result["curves"]
    left.plot(result["x"], result["truth"], color=PALE, lw=5, label="the new task")
    for number, color, style in ((0, GREY, ":"), (1, ORANGE, "-"), (10, BLUE, "-")):
        label = {0: "before", 1: "after one step", 10: "after ten"}[number]
        left.plot(result["x"], curves[number], style, color=color, lw=1.8, label=label)
    left.plot(*result["seen"], "o", ms=5, color=INK, label="what is seen of it")
    left.set(title="A new wave from ten points", xlabel="x")
    left.legend(loc="upper left", ncols=2, columnspacing=1, handlelength=1.2)
    left.margins(y=0.4)
    falling(right, result["losses"], "Error after one step")


def hmc(axes, result):
    from gallery.hmc import log_density

    left, right = axes
    lines = torch.linspace(-4.4, 4.4, 90), torch.linspace(-2.2, 10.5, 90)
    grid = torch.cartesian_prod(*lines)
    density = torch.vmap(log_density)(grid).reshape(90, 90).T
    left.contourf(
        *lines, density.exp(), levels=[0.01, 0.1, 0.3, 0.6, 1.1], colors=["#eceefa", "#d5daf3", "#b7c0ea", "#8f9cdc"]
    )
    kept = result["path"][:, 50:]
    left.plot(*kept[:, ::12].flatten(0, 1).T, ".", ms=2, color=INK, alpha=0.55)
    left.plot(*result["path"][3, 30:60].T, "-o", ms=2.5, lw=0.9, color=ORANGE)
    bare(left, "Samples of all chains, the way of one")
    left.set(aspect="auto")
    x = kept[..., 0].flatten()
    right.hist(x.numpy(), bins=40, density=True, color=PALE, label="samples")
    exact = torch.linspace(-5, 5, 100)
    right.plot(
        exact, torch.exp(-0.5 * (exact / 1.6) ** 2) / (1.6 * (2 * torch.pi) ** 0.5), color=BLUE, lw=2, label="exact"
    )
    right.set(title="The first coordinate", xlabel="x", yticks=[])
    right.legend(loc="upper right")


def meanflow(axes, result):
    left, right = axes
    noise, samples = result["noise"], result["samples"]
    left.plot(*noise[:500].T, ".", ms=1.8, color=GREY, alpha=0.6)
    gap = torch.full_like(noise, torch.nan)
    left.plot(*torch.stack([noise, samples, gap], 1)[:80].flatten(0, 1).T, color=ORANGE, lw=0.6, alpha=0.8)
    bare(left, "Noise, and one step from it", 3.2)
    right.plot(*result["data"][:800].T, ".", ms=1.8, color=PALE, label="data")
    right.plot(*samples[:800].T, ".", ms=1.8, color=BLUE, alpha=0.7, label="samples")
    right.legend(loc="lower right", markerscale=3)
    bare(right, "Samples: one call of the network", 3.2)


def rnn(axes, result):
    left, right = axes
    for stroke in result["strokes"][:3]:
        left.plot(*stroke.T, ".-", ms=3, lw=0.6, color=GREY, alpha=0.8)
    bare(left, "Strokes that it learns from")
    right.plot(*result["drawn"].T, color=BLUE, lw=1.4, label="drawn alone, 240 points")
    right.plot(*result["start"].T, "o", ms=3.5, color=ORANGE, label="read")
    bare(right, "What it draws")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2)
    for one in axes:
        one.set(xlim=(-1.3, 1.3), ylim=(-0.85, 0.85))


def qlora(axes, result):
    left, right = axes
    before, after = result["losses"]
    left.plot(before[::2], color=GREY, lw=1.8)
    start = len(before) // 2
    left.plot(range(start, start + len(after[::2])), after[::2], color=BLUE, lw=1.8)
    left.set(
        title="Loss",
        yscale="log",
        xlabel="step",
        xticks=[0, start, 2 * start],
        xticklabels=[0, len(before), 2 * len(before)],
    )
    left.text(start * 0.2, max(after), "pretraining", color=GREY, fontsize=9, va="top")
    left.text(start * 1.25, max(after), "a new task,\nonly adapters learn", color=BLUE, fontsize=9, va="top")
    names, sizes = list(result["bytes"]), [count / 1000 for count in result["bytes"].values()]
    bars = right.barh(names[::-1], sizes[::-1], color=[ORANGE, BLUE, PALE], height=0.55)
    right.bar_label(bars, [f"{count:,.0f} kB" for count in sizes[::-1]], padding=4, color=INK, fontsize=8.5)
    right.set(title="Bytes of the matrices", xticks=[])
    right.spines[:].set_visible(False)
    right.tick_params(length=0)
    right.margins(x=0.25)


DRAWN = {
    "neural_ode": ("Curves, the learned vector field, and a new curve in it", neural_ode),
    "force_field": ("Predicted forces against true ones, and energies over a simulation", force_field),
    "dp_sgd": ("Two moons told apart, and the norms of the gradients that are clipped", dp_sgd),
    "maml": ("A new sine wave before and after one and ten steps", maml),
    "hmc": ("Samples along a bent ridge, and the distribution of one coordinate", hmc),
    "meanflow": ("Noise, and the pinwheel that one step makes of it", meanflow),
    "rnn": ("Noisy strokes, and the figure of eight that the network draws alone", rnn),
    "qlora": ("The loss of pretraining and of the adapters, and the bytes of each", qlora),
}
