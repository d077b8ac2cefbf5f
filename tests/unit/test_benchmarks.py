"""Benchmarks run, keep their records and compare with what is installed. What they measure is no test."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.benchmarks import harness, pretrained
from thunder_fn.benchmarks.__main__ import main
from thunder_fn.benchmarks.harness import OURS, Case, once, run_case, save, show
from thunder_fn.benchmarks.models import GPT
from thunder_fn.benchmarks.train import eager_step, jitted_step


def test_a_case_compares_peers_and_is_saved(tmp_path: Path) -> None:
    result = run_case(Case("a name: 2x2", {OURS: lambda: None, "eager": lambda: None}, rounds=3, target="1.0 x eager"))
    assert set(result.seconds) == {OURS, "eager"} and set(result.ratios) == {"eager"}
    assert show(result).splitlines()[0] == "a name: 2x2   (to reach: 1.0 x eager)"
    saved = json.loads(save(result, tmp_path / "new").read_text())
    assert saved["seconds"] == result.seconds and saved["machine"]["torch"] == torch.__version__


def test_short_calls_fill_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, now = {OURS: 0, "eager": 0}, 0.0

    def peer(name: str) -> None:
        nonlocal now
        counts[name] += 1
        now += 1e-3 if name == "eager" else 1e-4

    monkeypatch.setattr(harness.time, "perf_counter", lambda: now)
    run_case(Case("spans", {name: lambda name=name: peer(name) for name in counts}, span=0.003, rounds=4, warmup=0))
    assert counts[OURS] > 2 * counts["eager"]


def test_the_garbage_collector_waits_and_comes_back() -> None:
    seen: list[bool] = []

    def fails() -> None:
        seen.append(gc.isenabled())
        raise ValueError

    with pytest.raises(ValueError):
        once(fails)
    assert seen == [False] and gc.isenabled()


def test_tracing_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    assert main(["trace", "--quick", "--json", str(tmp_path)]) == 0
    assert "gradient of the trace, nothing known: 1.00 x that of 2 layers" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {f"trace__GPT_of_{depth}_layers.json" for depth in (2, 3)}


def test_the_peers_of_a_train_step_do_the_same() -> None:
    torch.manual_seed(0)
    model = GPT(1, 16, heads=2, context=8)
    tokens, targets = torch.randint(0, 96, (2, 2, 8))
    ours, eager = jitted_step(model, tokens, targets), eager_step(model, tokens, targets)
    for _ in range(3):
        assert torch.allclose(ours(), eager(), rtol=1e-6)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ("BERT-base, sequence classification", "Llama of 4 layers, decoding"))
def test_the_peers_of_a_model_do_the_same(name: str) -> None:
    pytest.importorskip("transformers")
    chosen, results = pretrained.MODELS[name], list[torch.Tensor]()
    for prepare in (lambda model: tfn.compile(model, "auto", executors="torch"), pretrained.PEERS["eager"]):
        model = chosen.build(quick=True).train(not chosen.tokens)
        results.append(pretrained.step_of(prepare(model), chosen.inputs(model.config, True), min(chosen.tokens, 4))())
    assert torch.allclose(*results, rtol=1e-6)


def test_a_model_is_measured_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pretrained, "capture_seconds", lambda name: 1.0)
    times = {"first step": 1.0, "steady step": 0.5, "peak": 2e6}
    monkeypatch.setattr(pretrained, "_fresh", lambda name, peer, quick: times)
    found = {only: [result.name for result in pretrained.run(only=only)] for only in ("vit", "gpt-2", "of BERT", "")}
    columns = ("first step", "steady step", "peak memory")
    assert found["vit"] == [f"models: ViT-small, train step, {column}" for column in columns]
    assert found["gpt-2"] == [
        "models: capture of GPT-2 on meta",
        *(f"models: GPT-2 small, train step, {column}" for column in columns),
    ]
    assert found["of BERT"] == ["models: capture of BERT base on meta"]
    assert len(found[""]) == len(pretrained.CAPTURED) + 3 * len(pretrained.MODELS)
    for argv, message in (
        (
            ["models", "--only", "xlnet"],
            "nothing among the models has 'xlnet' in its name; there are capture of BERT base",
        ),
        (["call", "--only", "vit"], "--only chooses among models: say `models --only TEXT`"),
    ):
        with pytest.raises(SystemExit):
            main(argv)
        assert message in capsys.readouterr().err


def test_a_peer_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)gpu no such part ended with code 1: .*KeyError"):
        harness.in_process("gpu", "no such part")
    monkeypatch.setattr(pretrained, "PATIENCE_SECONDS", 0.05)
    assert pretrained._fresh("GPT-2 small", "eager", True) is None
    monkeypatch.setattr(pretrained, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(pretrained, "capture_seconds", lambda name: 1.0)
    monkeypatch.setattr(pretrained, "QUICK", {"GPT-2 small": ("eager",)})
    times = {"thunder_fn": {"first step": 1.0, "steady step": 0.5, "peak": 2e6}, "eager": None}
    monkeypatch.setattr(pretrained, "_fresh", lambda name, peer, quick: times[peer])
    text = "\n".join(map(show, pretrained.run(quick=True)))
    assert text.count("  eager: over 0.3 s") == 3 and "thunder_fn       2.0 MB   500.00 ms" in text
