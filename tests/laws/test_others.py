"""The laws for other people's code: FX passes, backends of torch.compile, packages of transforms, mutants."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.ir import Trace
from thunder_fn.testing import Case, LawBroken, Program, Step, check_backend, check_pass
from thunder_fn.testing.backends import compare, surveyed
from thunder_fn.testing.growing import ALIASES, CHAIN, DEAD, EFFECTS, MATRIX, VECTOR
from thunder_fn.testing.laws.promises import ENSURED, Promised
from thunder_fn.testing.mutations import planted, survivors
from thunder_fn.testing.mutations.mutants import beyond, mutants_of, search_of, transform_at, verdict
from thunder_fn.testing.mutations.survivors import print_survivors
from thunder_fn.testing.mutations.users import USERS, sorted_sums
from thunder_fn.testing.others import transform_of
from thunder_fn.testing.plugin import transforms_of
from thunder_fn.testing.user import Search

aten = torch.ops.aten


def without_alpha(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A wrong pass, which changes the graph in place."""
    for node in graph.graph.nodes:
        if node.target is aten.sub.Tensor:
            node.kwargs = {}
    return graph


def test_a_wrong_fx_pass_is_found() -> None:
    with pytest.raises(LawBroken, match='without_alpha breaks the law "keeps values"'):
        check_pass(without_alpha, max_examples=0)


def sines_for_cosines(graph: torch.fx.GraphModule, _: Any) -> Any:
    """A wrong backend."""
    for node in graph.graph.nodes:
        if node.target is aten.cos.default:
            node.target = aten.sin.default
    graph.recompile()
    return graph.forward


def test_a_wrong_backend_is_found_and_its_script_needs_pytorch_only() -> None:
    with pytest.raises(LawBroken, match="is not eager PyTorch") as caught:
        check_backend(sines_for_cosines, max_examples=1)
    said = str(caught.value)
    assert "aten.cos.default" in said and "thunder_fn" not in said.partition("import torch")[2]


def test_a_right_backend_passes() -> None:
    assert check_backend("eager", max_examples=1) == 1
    assert 0 < check_backend("eager", max_examples=5, together=9, without=["aten.sin.default"]) < 5


def test_a_survey_goes_on_after_a_difference() -> None:
    *_, survey = surveyed(sines_for_cosines, max_examples=6, together=3)
    assert [one.ops for one in survey.found] == [{"aten.cos.default"}]
    assert 0 < survey.compared < 6 and "torch.compile(program, backend='sines_for_cosines'" in survey.found[0].report


def test_programs_that_differ_only_together_are_shown_together() -> None:
    def wrong(graph: torch.fx.GraphModule, _: Any) -> Any:
        """A wrong backend, where a graph has two programs."""
        cosines = [node for node in graph.graph.nodes if node.target is aten.cos.default]
        if len(cosines) > 1:
            cosines[0].target = aten.sin.default
        graph.recompile()
        return graph.forward

    case = Case(Program((VECTOR,), (Step("cos"),)))
    found = compare([case, case], wrong)
    assert found is not None and "is not eager PyTorch" in found.report
    script = found.report.partition("import torch")[2].replace("backend='wrong'", "backend='eager'")
    assert "*program_1(*inputs[1:2])" in script
    exec("import torch" + script, {})


MODULE = """
from thunder_fn.ir.trace import Trace

def same(trace: Trace) -> Trace:
    return trace

def pair(trace: Trace) -> Trace:
    return (trace, trace)

def _private(trace: Trace) -> Trace:
    return trace

def other(x: int) -> int:
    return x

same.laws = pair.laws = {"keeps": "nothing", "max_examples": 0}
"""


def few_programs(search: Search) -> Any:
    return ((Program((VECTOR, VECTOR), CHAIN[:n]), False) for n in (1, 2))


def test_pytest_collects_the_transforms_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_transforms.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Search, "_basic_programs", few_programs)
    monkeypatch.setattr(Search, "_further_programs", lambda search: ())
    options = ["-p", "thunder_fn.testing.plugin", "--tfn-laws", "my_transforms", "-p", "no:cacheprovider", "-rA"]
    options += ["--tfn-badge", str(tmp_path / "laws.json")]
    options += ["-p", "no:unraisableexception"]  # which collects garbage five times, among all of this process
    assert pytest.main([*options, "--rootdir", str(tmp_path), str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "FAILED " in said and "laws[my_transforms.pair]" in said and "not a Trace" in said
    assert "PASSED " in said and re.search(r"^laws: 1 of 2 transforms keep them, on \d+ traces$", said, re.MULTILINE)
    badge = json.loads((tmp_path / "laws.json").read_text())
    assert badge["message"].startswith("1 of 2 transforms, ") and badge["color"] == "red"
    names = [name for name, _ in transforms_of(sys.modules["my_transforms"])]
    assert names == ["my_transforms.pair", "my_transforms.same"]
    assert pytest.main([*options, "--exitfirst", "--rootdir", str(tmp_path), str(tmp_path)]) == 1
    assert "laws: 0 of 2 transforms keep them, on 0 traces; 1 not tried" in capsys.readouterr().out
    options[3] = "no_such_package.transforms"
    assert pytest.main([*options, "--rootdir", str(tmp_path), str(tmp_path)]) == pytest.ExitCode.USAGE_ERROR
    said = capsys.readouterr()
    assert "ERROR: --tfn-laws: No module named 'no_such_package'. Name a module" in said.out + said.err


def test_mutants_are_made_and_fit() -> None:
    found = mutants_of(sorted_sums)
    assert len(found) > 8 and len({mutation.bug for mutation in found}) > 8
    for mutation in found:
        with planted(mutation):
            pass
    assert len(USERS) == 10


@pytest.mark.parametrize(
    ("path", "bug", "programs", "law"),
    [
        ("simplify:dce", "_dce_composite:10 dropped condition 2: all(flags)", DEAD, ENSURED),
        ("noops:drop_noops", "_may_go:8 dropped condition 2", ALIASES, "keeps shared memory"),
        ("noops:drop_noops", "_may_go:8 dropped condition 3", ALIASES, "keeps shared memory"),
    ],
)
def test_mutants_that_survived_once_are_caught(path: str, bug: str, programs: Any, law: str) -> None:
    path = f"thunder_fn.interpreters.{path}"
    (mutation,) = (one for one in mutants_of(transform_at(path)) if one.bug.startswith(bug))
    cases = [Case(program) for program in programs]
    for case in cases[::9]:
        assert search_of(path).error_of(law, case.trace, case.inputs) is None
    with planted(mutation):
        search = search_of(path)
        assert any(search.error_of(law, case.trace, case.inputs) for case in cases)


def test_time_that_is_up_inside_of_a_law_is_no_broken_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes any exception for one of the transform: two mutants counted as caught that were not."""

    def endless(transform: Any, **_: Any) -> None:
        search = Search(transform, Promised())
        search.laws = {"keeps values": lambda trace, inputs: all(x >= 0 for x in itertools.count())}
        assert search.error_of("keeps values", Case(Program((VECTOR, VECTOR), CHAIN)).trace, ()) is None, "broken"

    mutants = "thunder_fn.testing.mutations.mutants"
    monkeypatch.setattr(f"{mutants}.check_transform", endless)
    monkeypatch.setattr(f"{mutants}.made_of", lambda path: ())
    sums, mutant = f"{USERS[0].__module__}:sorted_sums", mutants_of(sorted_sums)[0]
    assert verdict(sums, mutant, 0.1) == "EQUAL: makes the same trace of each of 0 witnesses"
    monkeypatch.setattr(f"{mutants}.beyond", lambda path, mutation: sum(0 for _ in itertools.count()))
    assert verdict(sums, mutant, 0.1) == "OUT OF TIME"


def test_a_table_of_mutants_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(survivors, "verdict", lambda path, mutation, seconds: asked.append(mutation.bug) or "SURVIVES")
    path, file = f"{USERS[0].__module__}:sorted_sums", tmp_path / "build" / "mutants.jsonl"
    assert print_survivors([path], count=3, file=file, budget_seconds=0) == 1
    with file.open("a") as out:
        out.write('{"key": "cut off')
    assert print_survivors([path], count=3, file=file) == 3
    assert print_survivors([path], count=3, file=file) == 3
    assert len(asked) == len(set(asked)) == 3


def test_mutants_that_no_law_catches_are_told_apart_by_witnesses(monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{USERS[-1].__module__}:sums_along_dims"
    found = {mutation.bug.partition(":")[2]: mutation for mutation in mutants_of(USERS[-1])}
    cases = [Case(Program((type,), (Step("aten.sum.default"),))) for type in (MATRIX, replace(VECTOR, shape=()))]
    made = [(case, new, new.origin) for case in cases for new in [USERS[-1](case.trace)]]
    monkeypatch.setattr("thunder_fn.testing.mutations.mutants.made_of", lambda path: made)
    for bug, said in (
        ("5 dropped condition 2", "EQUAL: makes the same trace of each of 2"),
        ("8 condition false", "NO WORSE: 1 of 2 witnesses become other traces"),
        ("12 constant: False", 'SURVIVES: breaks the law "gives checked traces" with'),
    ):
        (mutation,) = (one for name, one in found.items() if name.startswith(bug))
        assert beyond(path, mutation).startswith(said), bug


def test_dead_code_elimination_of_fx_keeps_calls_of_python() -> None:
    """`check_pass` blamed a right pass."""
    trace = Case(EFFECTS[0]).trace
    assert transform_of(lambda graph: graph.graph.eliminate_dead_code() and None)(trace) == trace


def test_a_pass_sees_fake_tensors() -> None:
    """As in a backend of torch.compile: passes of Inductor read `meta["val"]`."""
    shapes = list[Any]()
    see = lambda graph: shapes.extend(node.meta["val"].shape for node in graph.graph.nodes if node.op != "output")
    trace = Case(Program((VECTOR, VECTOR), CHAIN)).trace
    assert transform_of(see)(trace) == trace and shapes == [(2,)] * (2 + len(CHAIN))


def test_a_pass_leaves_alone_what_no_graph_expresses() -> None:
    """Numbers that are symbols: with `check_pass`, the pass that changes nothing broke a law on them."""
    f = tfn.jit(lambda x, n: x + n, cache="symbolic values")
    f(torch.ones(2), 3.0)
    trace = tfn.last_traces(f)[0]
    assert isinstance(trace, Trace) and transform_of(lambda graph: graph)(trace) is trace
