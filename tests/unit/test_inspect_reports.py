"""Costs, residuals, pictures and Chrome traces."""

from __future__ import annotations

import io
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import inspect
from thunder_fn.errors import MissingExtra
from thunder_fn.interpreters.simplify import inline


def product(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.t()).relu()


def test_cost_counts_products_and_elements() -> None:
    found = inspect.cost(product, torch.ones(64, 64), machine=inspect.Machine("toy", 1e9, 1e9))
    assert found.total == inspect.Cost(2 * 64**3 + 64**2, 5 * 64 * 64 * 4)
    assert str(found).splitlines()[:3] == [
        "cost of product: 528.4 k FLOP, 80.0 KiB moved; at least 0.557 ms on toy",
        "op                 times     FLOP     moved  FLOP/B  least µs  bound by",
        "aten.mm.default        1  524.3 k  48.0 KiB    10.7     524.3  compute",
    ]


def test_cost_of_a_loop_is_that_of_its_steps() -> None:
    def loop(x: torch.Tensor) -> torch.Tensor:
        return tfn.fori_loop(0, 10, lambda i, c: c @ c, x)

    once = inspect.cost(lambda x: x @ x, torch.ones(8, 8)).total.flops
    assert 10 * once <= inspect.cost(loop, torch.ones(8, 8)).total.flops <= 10 * once + 100


def test_attention_on_the_cpu_has_the_cost_of_attention() -> None:
    q = torch.ones(2, 4, 16, 8)
    found = inspect.cost(lambda q: F.scaled_dot_product_attention(q, q, q), q)
    assert found.total.flops >= 2 * 2 * (2 * 4 * 16 * 16 * 8)


def test_residuals_of_a_module_are_those_of_its_parameters() -> None:
    found = inspect.residuals(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(4, 2))
    assert (
        found.summary == "residuals of Sequential: 3, 0 B beside the arguments"
    )  # the result and a view of the weight
    assert "argument args[1]" in str(found)


def test_graph_is_an_svg_with_a_box_for_each_equation(tmp_path: Path) -> None:
    picture = inspect.graph(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(4, 2))
    root = ElementTree.fromstring(str(picture))
    boxes = list(root.iter("{http://www.w3.org/2000/svg}g"))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert len(boxes) == 3 + 2 + 1
    assert {"Linear 0", "ReLU 1", "return"} <= set(texts)
    assert picture.save(tmp_path / "g.svg").read_text() == str(picture)


def test_graph_of_a_trace() -> None:
    assert "aten.sin" in str(inspect.graph(tfn.trace(torch.sin, torch.ones(2))))


def test_graph_of_a_long_trace_has_a_box_for_each_run_of_a_module() -> None:
    class Sines(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.times = times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = x.sin()
            return x

    module = nn.Sequential(*map(Sines, (700, 701, 702)))
    svg = str(inspect.graph(inline(tfn.trace(module, torch.ones(2)))))
    assert svg.count("<rect") == 1 + 3 + 1  # the argument, the modules, the result
    assert all(f">{times} equations<" in svg and f"{times} sin" in svg for times in (700, 701, 702))


def test_graph_of_a_long_trace_without_modules_has_boxes_of_equal_runs() -> None:
    def long(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2001):
            x = x + 1
        return x

    assert str(inspect.graph(tfn.trace(long, torch.ones(2)))).count("2 equations") == 1000


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "igraph", None)
    with pytest.raises(MissingExtra) as error:
        inspect.graph(product, torch.ones(2, 2))
    assert message_of(error.value) == (
        'a picture of a trace needs igraph, which is not installed\nInstall it with `pip install "thunder_fn[inspect]"`.'
    )


def test_chrome_trace_nests_equations_in_modules(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    path = inspect.chrome_trace(tmp_path / "trace.json", model, torch.ones(4, 2))
    events = json.loads(path.read_text())["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X" and event["pid"] == 2}
    around, inside = slices["Linear"], slices["aten.addmm.default"]
    assert around["ts"] <= inside["ts"] and inside["ts"] + inside["dur"] <= around["ts"] + around["dur"] + 1e-3
    assert inside["args"]["module"] == "0" and inside["args"]["types"] == "f32[4, 3]"
    assert [event["args"]["bytes"] for event in events if event["ph"] == "C"][-1] == 96
    made = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert made[0] == "capture Sequential"


def test_chrome_trace_is_what_perfetto_takes(tmp_path: Path) -> None:
    """Of its importer's rules: each event has its fields, counters are numbers, slices of a track nest or follow each other."""
    steps = tfn.grad(lambda x: tfn.scan(lambda c, a: (c * a.sin(), c), x[0], x)[0].sum())
    path = inspect.chrome_trace(tmp_path / "trace.json", steps, torch.ones(5, 3))
    found = json.loads(path.read_text())
    assert set(found) == {"traceEvents", "displayTimeUnit"} and found["displayTimeUnit"] in ("ms", "ns")
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in found["traceEvents"]:
        assert event["ph"] in ("M", "X", "C") and isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] == "process_name" and isinstance(event["args"]["name"], str)
        elif event["ph"] == "C":
            assert event["ts"] >= 0 and all(isinstance(value, int) for value in event["args"].values())
        else:
            assert event["ts"] >= 0 and event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) == 2
    for slices in tracks.values():
        around: list[float] = []
        for start, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while around and around[-1] <= start + 1e-3:  # microseconds: Perfetto counts nanoseconds
                around.pop()
            assert not around or end <= around[-1] + 1e-3
            around.append(end)


def test_tables_are_plain_when_piped_and_coloured_in_a_terminal() -> None:
    from rich.console import Console

    found = inspect.chain(product, torch.ones(2, 2))
    console = Console(force_terminal=True, color_system="truecolor", width=100, record=True, file=io.StringIO())
    console.print(found)
    assert "\x1b[" in console.export_text(styles=True) and "\x1b[" not in str(found)
    assert str(found).splitlines()[0].split() == ["step", "equations", "added", "removed", "changed", "ms"]
