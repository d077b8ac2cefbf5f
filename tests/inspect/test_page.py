"""The inspector's page in Chromium: what it shows is what the chain says, and every way through it works."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import thunder_fn as tfn
from thunder_fn import inspect
from thunder_fn.benchmarks.models import GPT, gpt_loss, params_of
from thunder_fn.executors import FusionExecutor
from thunder_fn.inspect.chains import Chain, chain
from thunder_fn.inspect.encode import Run, encode
from thunder_fn.inspect.memory_use import memories_of, memory_of
from thunder_fn.inspect.page import asset, page_of
from thunder_fn.inspect.tables import bytes_text

ROOT = Path(__file__).parents[2]
MACHINE = inspect.Machine("toy", 1e10, 1e9)


def loops(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    carry, ys = tfn.scan(lambda c, a: ((c * w).sin() + a, c), x[0], x)
    twice = carry.sin().sin() + carry.sin().sin()
    return tfn.cond(twice.sum() > 0, lambda y: y * 2, lambda y: y.cos(), (twice,)) + ys.sum(0)


def fused_loops() -> tuple[Any, ...]:
    fuser = FusionExecutor("fuser", fuse=lambda region: region.python_callable())
    fuser.register_supported(torch.sin, checker=lambda x: x.dim() == 1)
    fuser.register_supported(torch.cos, checker=lambda x: False)
    return tfn.jit(loops, transforms=[tfn.simplify], executors=[fuser]), torch.ones(5, 3), torch.ones(3)


def gradient() -> tuple[Any, ...]:
    model = GPT(2, 16, context=8)
    tokens = torch.randint(0, 96, (2, 8))
    return tfn.grad(gpt_loss(model)), params_of(model), tokens, tokens


def module() -> tuple[Any, ...]:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(3, 4)


CASES = {"loops": fused_loops, "gradient": gradient, "module": module, "three": lambda: (torch.sin, torch.ones(2))}


@pytest.fixture(scope="module")
def made() -> Callable[[str], tuple[Chain, inspect.Page]]:
    known: dict[str, tuple[Chain, inspect.Page]] = {}

    def make(name: str) -> tuple[Chain, inspect.Page]:
        if name not in known:
            args = CASES[name]()
            known[name] = chain(*args), inspect.show(*args, machine=MACHINE)
        return known[name]

    return make


def steps(tab: Any) -> Any:
    return tab.locator("nav .step")


def test_bundle_is_made_of_the_sources() -> None:
    digest = hashlib.sha256()
    for path in sorted((ROOT / "inspector" / "src").iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    for name in ("inspector.js", "inspector.css"):
        found = re.match(r"/\* sources (\w+);", asset(name))
        assert found is not None and found[1] == digest.hexdigest()[:16], "run `npm ci && npm run build` in inspector/"


def test_page_of_a_12_layer_gpt_is_small_and_alone() -> None:
    model = GPT(12, 16, context=8)
    tokens = torch.randint(0, 96, (2, 8))
    page = inspect.show(tfn.grad(gpt_loss(model)), params_of(model), tokens, tokens)
    assert len(page.html.encode()) < 2 * 2**20
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page.html)


@pytest.mark.parametrize("name", sorted(CASES))
def test_page_unfolds_as_python_does(name: str, made: Any, opened: Any) -> None:
    """Leaves, values and what they are called with have the same numbers on both sides."""
    found, page = made(name)
    tab = opened(page)
    script = """step => { const flat = inspector.flat(step); return [
        flat.leaves.map(i => [flat.nodes[i].outs, flat.nodes[i].operands.filter(v => typeof v === "number")]),
        flat.leaves.map(i => inspector.module(step, flat.nodes[i])), flat.outputs.filter(v => typeof v === "number")] }"""
    for position, step in enumerate(found.steps):
        leaves, modules, outputs = tab.evaluate(script, position)
        assert leaves == [
            [list(leaf.outputs), [one for one in leaf.operands if isinstance(one, int)]] for leaf in step.flat.leaves
        ]
        assert tuple(modules) == found.modules(position)
        assert outputs == [value for value in step.flat.outputs if isinstance(value, int)]


@pytest.mark.parametrize("name", sorted(CASES))
def test_steps_say_what_they_changed(name: str, made: Any, opened: Any) -> None:
    found, page = made(name)
    tab = opened(page)
    assert steps(tab).count() == len(found.steps)
    for position, step in enumerate(found.steps):
        steps(tab).nth(position).click()
        assert step.name in steps(tab).nth(position).inner_text()
        tab.keyboard.press("e")
        diff = found.diff(position)
        for mark, key in (("ghost", "removed"), ("changed", "changed")):
            shown = tab.evaluate("() => inspector.data.steps.map((_, at) => inspector.changed(at).counts ?? null)")[
                position
            ]
            assert shown == (None if diff is None else diff.counts)
            if diff is not None and len(step.flat.leaves) < 20:
                assert tab.locator(f".row.{mark}").count() == diff.counts[key]


def test_composites_fold_and_unfold_in_place(made: Any, opened: Any) -> None:
    _, page = made("module")
    tab = opened(page)
    before = tab.locator(".row.node").count()
    fold = tab.locator(".row.node button.fold").first
    assert fold.get_attribute("aria-expanded") == "true"
    fold.click()
    assert tab.locator(".row.node").count() < before and fold.get_attribute("aria-expanded") == "false"
    fold.click()
    assert tab.locator(".row.node").count() == before


def test_equation_has_type_line_cost_and_who_runs_it(made: Any, opened: Any) -> None:
    _, page = made("loops")
    tab = opened(page)
    tab.keyboard.press("e")
    row = tab.locator(".row.node", has_text="sin(v3)").first
    assert "f32[3]" in row.locator(".type").inner_text()
    assert "test_page.py:" in row.locator(".line").inner_text() and "carry.sin()" in row.locator(".line").inner_text()
    row.click()
    details = tab.locator("aside")
    assert (
        "fuser" in details.locator(".who").inner_text()
        and "carry.sin().sin()" in details.locator(".code .on").inner_text()
    )
    assert "bound by memory" in details.inner_text()
    tab.locator(".row.node:has(.op[title='aten.cos.default'])").first.click()
    assert "fuser did not: the checker <lambda> said no" in details.inner_text()
    assert details.locator(".who").inner_text() == "torch"


def test_variable_is_followed_through_all_steps(made: Any, opened: Any) -> None:
    _, page = made("module")
    tab = opened(page)
    tab.keyboard.press("e")
    relu = tab.locator(".row.node", has_text="relu").first
    relu.locator("var").first.click()
    life = tab.locator(".life li")
    assert life.count() == steps(tab).count()
    texts = life.all_inner_texts()
    assert "made by" in texts[0] and all("not there" not in text for text in texts)
    assert "saved for the backward" in texts[1] and "saved for the backward" in texts[3] and "an input" in texts[4]
    assert tab.locator(".rows var.on").count() > 1
    life.nth(2).locator("button.stepname").click()
    assert steps(tab).nth(2).get_attribute("aria-current") == "true" and tab.locator(".rows var.on").count() > 1
    tab.keyboard.press("Escape")
    assert tab.locator(".life").count() == 0


def test_memory_is_a_timeline_that_leads_to_equations(made: Any, opened: Any) -> None:
    found, page = made("gradient")
    tab = opened(page)
    steps(tab).last.click()
    assert f"peak {bytes_text(memory_of(found).peak)}" in tab.locator(".tabs").inner_text()
    over = tab.locator(".memory .u-over")
    box = over.bounding_box()
    over.hover(position={"x": box["width"] * 0.5, "y": 40})
    assert re.search(r"^\d+  aten", tab.locator(".memory .tip").inner_text())
    over.click(position={"x": box["width"] * 0.5, "y": 40})
    assert steps(tab).last.get_attribute("aria-current") == "true"
    assert tab.locator(".row.selected").count() == 1


PICTURE = """new Promise(done => requestAnimationFrame(() => requestAnimationFrame(
    () => done(document.querySelector('.memory canvas').toDataURL()))))"""
"""The memory chart once it is drawn. It may be drawn anew at any time, so a screenshot may lose its element."""


@pytest.mark.parametrize("name", sorted(CASES))
def test_charts_draw_the_step_that_is_chosen(name: str, made: Any, opened: Any) -> None:
    """They name it, have its peak and its ops, and lead to its own equations."""
    found, page = made(name)
    tab = opened(page)
    drawn: dict[tuple[str, int], str] = {}
    for position, (step, memory) in enumerate(zip(found.steps, memories_of(found), strict=True)):
        steps(tab).nth(position).click()
        text = tab.locator(".tabs .quiet").inner_text()
        assert step.name in text and f"peak {bytes_text(memory.peak)}" in text
        assert ("op by op" in text) == (step.program is None)
        drawn.setdefault((bytes_text(memory.peak), len(memory.names)), tab.evaluate(PICTURE))
        tab.keyboard.press("g")
        pair = [at for at, one in enumerate(found.steps) if one.kind == step.kind in ("split", "program")]
        reached = tab.evaluate(
            "[...document.querySelectorAll('nav .step')].findIndex(one => one.ariaCurrent === 'true')"
        )
        assert reached in (pair or [position])
        row = tab.locator(".row.selected").inner_text().split("(")[0]
        assert memory.names[memory.peak_at].removeprefix("aten.").split(".")[0] in row
        steps(tab).nth(position).click()
        tab.keyboard.press("m")
        leaves = {leaf.equation.op.name for at in pair or [position] for leaf in found.steps[at].flat.leaves}
        titles = tab.locator(".roofline circle title").all_text_contents()
        assert step.name in tab.locator(".tabs .quiet").inner_text()
        assert {title.split("\n")[0] for title in titles} <= leaves
        for _ in "mm":
            tab.keyboard.press("m")
    assert len(set(drawn.values())) == len(drawn), "other steps look other"


def test_roofline_has_the_ops_under_the_machines_peaks(made: Any, opened: Any) -> None:
    _, page = made("gradient")
    tab = opened(page, "#chart=roofline")
    assert "toy: 10.0 GFLOP/s" in tab.locator(".tabs").inner_text()
    assert tab.locator(".roofline circle").count() > 5 and tab.locator(".roofline .roof").count() == 1
    assert "FLOP per byte" in tab.locator(".roofline circle title").first.text_content()


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("width", [400, 1440])
def test_words_of_the_roofline_do_not_overlap(name: str, width: int, made: Any, opened: Any) -> None:
    """Neither each other nor the dearest op's circle, in each step."""
    tab = opened(made(name)[1], "#chart=roofline", viewport={"width": width, "height": 800})
    over = """() => {
        const boxes = [...document.querySelectorAll(".roofline text")].map(one => [one.textContent, one.getBoundingClientRect()]);
        const circles = [...document.querySelectorAll(".roofline circle")].map(one => ["circle", one.getBoundingClientRect()]);
        const largest = circles.sort((a, b) => b[1].width - a[1].width).slice(0, 1);
        const meet = (a, b) => a.right > b.left + 1 && b.right > a.left + 1 && a.bottom > b.top + 1 && b.bottom > a.top + 1;
        const inside = ([, box]) => box.left >= 0 && box.right <= innerWidth;
        const after = (k) => [...boxes.slice(k + 1), ...largest];
        return [...boxes.flatMap((a, k) => after(k).filter(b => meet(a[1], b[1])).map(b => [a[0], b[0]])),
                ...boxes.filter(one => !inside(one)).map(one => [one[0], "cut"])];
    }"""
    for position in range(steps(tab).count()):
        steps(tab).nth(position).click()
        assert tab.evaluate(over) == []


@pytest.mark.parametrize("width", [400, 1440])
def test_a_plan_has_one_step_and_no_times_of_tracing(width: int, opened: Any) -> None:
    """Sentences of its report are whole on a phone; its tables are a box that keys can scroll."""
    f, *args = gradient()
    tab = opened(tfn.planning.plan(f, args).page(), viewport={"width": width, "height": 900})
    assert re.fullmatch(r"1 step · \d+ equations", tab.locator("header .figures").text_content())
    assert tab.locator("nav .ms, nav .legend").count() == 0
    head, tables = tab.locator("#report pre").all()
    assert head.evaluate("one => one.scrollWidth <= one.clientWidth")
    assert (
        "fits in" in head.inner_text()
        and "time by op" in tables.inner_text()
        and tables.get_attribute("tabindex") == "0"
    )
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tables.focus()
    tab.keyboard.press("ArrowRight")
    tab.wait_for_timeout(200)
    assert (tables.evaluate("one => one.scrollLeft") > 0) == (width == 400) and tab.locator(
        ".row.selected"
    ).count() == 0
    tab.locator("#report summary").focus()
    tab.keyboard.press("Enter")
    assert not tab.locator("#report").evaluate("one => one.open")


def test_search_goes_from_hit_to_hit(made: Any, opened: Any) -> None:
    _, page = made("gradient")
    tab = opened(page)
    tab.keyboard.press("/")
    tab.keyboard.type("layer_norm.default")
    tab.wait_for_function("document.querySelector('[data-testid=hits]')?.textContent === '5'")
    picked = set()
    for _ in range(5):
        tab.keyboard.press("Enter")
        tab.locator(".row.selected", has_text="native_layer_norm").wait_for()
        picked.add(tab.locator(".row.selected").get_attribute("data-node"))
    assert len(picked) == 5


def test_address_says_where_one_is(made: Any, opened: Any) -> None:
    _, page = made("gradient")
    first = opened(page)
    first.keyboard.press("]")
    for _ in range(3):
        first.keyboard.press("n")
    first.locator(".row.selected var").first.click()
    fragment = first.evaluate("location.hash")
    assert "step=1" in fragment and "at=" in fragment and "var=" in fragment
    second = opened(page, fragment)
    second.wait_for_selector(".row.selected")
    for what in (".row.selected", ".variable h2"):
        assert second.locator(what).inner_text() == first.locator(what).inner_text()


def test_keys(made: Any, opened: Any) -> None:
    _, page = made("gradient")
    tab = opened(page)
    tab.keyboard.press("j")
    tab.keyboard.press("j")
    first = tab.locator(".row.selected").inner_text()
    tab.keyboard.press("k")
    assert tab.locator(".row.selected").inner_text() != first
    tab.keyboard.press("]")
    assert steps(tab).nth(1).get_attribute("aria-current") == "true"
    for key, place in (("End", "last"), ("Home", "first")):
        tab.keyboard.press(key)
        tab.wait_for_timeout(100)
        shown = tab.locator(".row[role=row][tabindex], .row.node, .row.group")
        assert getattr(shown, place).get_attribute("class").find("selected") >= 0, key
    tab.keyboard.press("n")
    assert "added" in tab.locator(".row.selected").get_attribute("class")
    tab.keyboard.press("c")
    assert tab.locator(".row.node button[aria-expanded=true]").count() == 0
    tab.keyboard.press("?")
    assert tab.locator("[role=dialog]").count() == 1
    tab.keyboard.press("Escape")
    tab.keyboard.press("m")
    tab.keyboard.press("m")
    assert tab.locator(".charts").count() == 0


AXE = Path(os.environ.get("AXE", ROOT / "inspector" / "node_modules" / "axe-core" / "axe.min.js"))


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not there: `npm install --no-save axe-core` in inspector/")
@pytest.mark.parametrize(("name", "width"), [("gradient", 1440), ("loops", 400), ("two runs", 400), ("two runs", 1440)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(name: str, scheme: str, width: int, made: Any, opened: Any) -> None:
    """Roles, names and contrast, by axe-core: with a row and a variable chosen, on each chart, and with the keys shown."""
    size = {"width": width, "height": 900}
    page = inspect.compare(made("three")[0], made("loops")[0], machine=MACHINE) if name == "two runs" else made(name)[1]
    tab = opened(page, viewport=size, color_scheme=scheme)
    tab.evaluate(AXE.read_text())
    for keys in ("jjjv", "m", "]n", "?"):
        for key in keys:
            tab.keyboard.press(key)
        found = tab.evaluate("axe.run().then(found => found.violations)")
        assert not [(one["id"], one["nodes"][0]["html"], one["nodes"][0]["failureSummary"]) for one in found]


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("width", [320, 400])
def test_nothing_is_cut_on_a_phone(name: str, width: int, made: Any, opened: Any) -> None:
    """The page does not scroll sideways, and every control lies inside of it."""
    tab = opened(made(name)[1], viewport={"width": width, "height": 800})
    tab.keyboard.press("j")
    outside = """() => [...document.querySelectorAll("header *, nav *, .tabs *, .row.head *, aside button, aside h2, aside dd")]
        .filter(one => one.getBoundingClientRect().right > innerWidth + 0.5).map(one => one.outerHTML.slice(0, 80))"""
    assert tab.evaluate(outside) == []
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    tab.keyboard.press("?")
    box = tab.locator("[role=dialog]").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width


def test_rows_are_a_tree_for_a_screen_reader(made: Any, opened: Any) -> None:
    tab = opened(made("module")[1])
    grid = tab.get_by_role("treegrid")
    assert "capture" in grid.get_attribute("aria-label")
    tab.keyboard.press("j")
    row = tab.locator(f"#{grid.get_attribute('aria-activedescendant')}")
    assert row.get_attribute("aria-selected") == "true" and row.get_attribute("aria-level") == "1"
    assert row.get_attribute("aria-expanded") == "true"
    below = tab.locator(".row.node").nth(1)
    assert below.get_attribute("aria-level") == "2"
    assert int(below.get_attribute("aria-rowindex")) == int(row.get_attribute("aria-rowindex")) + 1
    assert row.get_by_role("gridcell").count() == grid.get_by_role("columnheader").count()
    tab.keyboard.press("ArrowLeft")
    assert row.get_attribute("aria-expanded") == "false"


def test_variables_and_the_peak_are_reached_by_keys(made: Any, opened: Any) -> None:
    tab = opened(made("loops")[1])
    for key in ("j", "v"):
        tab.keyboard.press(key)
    first = tab.locator(".variable h2 var").inner_text()
    assert first == tab.locator(".row.selected var").first.inner_text()
    tab.keyboard.press("v")
    assert tab.locator(".variable h2 var").inner_text() != first
    tab.keyboard.press("g")
    assert steps(tab).first.get_attribute("aria-current") == "true" and tab.locator(".row.selected").count() == 1
    tab.keyboard.press("m")
    tab.locator(".roofline circle").first.focus()
    tab.keyboard.press("Enter")
    assert tab.locator(".row.selected").count() == 1


def test_the_program_folds_by_module(made: Any, opened: Any) -> None:
    """Equations that stand together and belong to one module are one row, which says how many they are and what they cost."""
    found, page = made("gradient")
    tab = opened(page)
    steps(tab).last.click()
    program = found.steps[-1].flat
    count = tab.evaluate(
        "inspector.flat(inspector.data.steps.length - 1).nodes.filter(node => node.depth === 0).length"
    )
    names = [
        re.search(r"([\w.]+) (\d+) equations", " ".join(row.split()))
        for row in tab.locator(".row.group").all_inner_texts()
    ]
    assert all(names) and [name[1] for name in names if name].count("blocks.0") == 2, "forward and backward"
    folded = sum(int(name[2]) for name in names if name)
    assert tab.locator(".row.node").count() + folded == count > 44 and len(program.leaves) >= count
    tab.locator(".row.group").first.click()
    tab.keyboard.press("ArrowRight")
    assert tab.locator(".row.group").first.get_attribute("aria-expanded") == "true"
    tab.keyboard.press("j")
    assert tab.locator(".row.selected").get_attribute("aria-level") == "2"
    tab.keyboard.press("ArrowLeft")
    assert "group" in tab.locator(".row.selected").get_attribute("class")
    assert tab.locator(".row.node").count() + folded == count
    tab.keyboard.press("g")
    assert "node" in tab.locator(".row.selected").get_attribute("class"), "the peak's group is unfolded"


def test_the_page_may_ask_nobody(made: Any, opened: Any) -> None:
    tab = opened(made("gradient")[1], bypass_csp=False)
    for key in "jjvm]ntm?":  # what the policy forbids is an error in the console
        tab.keyboard.press(key)
    assert tab.get_by_role("dialog").count() == 1
    policy = tab.locator("meta[http-equiv='Content-Security-Policy']").get_attribute("content")
    assert policy.startswith("default-src 'none'") and "http" not in policy and "*" not in policy


def test_a_loop_says_how_often_and_what_it_carries(made: Any, opened: Any) -> None:
    tab = opened(made("loops")[1])
    tab.locator(".row.node:has(.op[title='scan'])").first.click()
    details = tab.locator("aside").inner_text()
    assert "The loop, 5 trips" in details
    for part in (r"consts\s+v1", r"carry\s+v2", r"xs\s+v0", r"carry after\s+v3", r"ys\s+v4"):
        assert re.search(part, details), part
    label = tab.locator(".row.node", has_text="body(").first.inner_text()
    assert "consts v3:0.x0; carry v3:0.x1; xs v3:0.x2" in label
    tab.locator(".row.node", has_text="body(").first.locator("var").nth(2).click()
    variable = tab.locator(".variable")
    assert "argument 2 of body 0 of the loop or choice that makes v3" in variable.inner_text()
    assert re.search(r"an input\s+read by add", variable.inner_text())
    tab.keyboard.press("e")
    tab.locator(".row.node", has_text="= add").first.locator("var").first.click()
    assert "returned by the body" in variable.inner_text() and "read by nothing" not in variable.inner_text()


def test_a_short_time_is_no_zero(opened: Any) -> None:
    """32 bytes at 1e9 bytes a second."""
    tab = opened(inspect.show(torch.sin, torch.ones(4), machine=MACHINE))
    tab.locator(".row.node", has_text="sin").first.click()
    assert re.search(r"at least\s+32 ns on toy, bound by memory", tab.locator("aside").inner_text())


def newton(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return tfn.while_loop(lambda x: (x * x - a).abs().max() > 1e-5, lambda x: ((x + a / x) / 2,), (x,))[0]


def test_a_while_loop_has_a_condition_and_a_step(opened: Any) -> None:
    tab = opened(inspect.show(newton, torch.tensor([2.0]), torch.ones(1), machine=MACHINE))
    tab.locator(".row.node:has(.op[title='while_loop'])").first.click()
    details = tab.locator("aside").inner_text()
    assert "The loop, as long as its condition holds" in details
    for part in (r"consts\s+v0", r"carry\s+v1", r"carry after\s+v2"):
        assert re.search(part, details), part
    labels = tab.locator(".row.node", has_text="; carry").all_inner_texts()
    assert [re.match(r"\W*(\w+)\(consts v2:\d.x0; carry v2:\d.x1\)", label.strip())[1] for label in labels] == [
        "condition",
        "step",
    ]
    tab.keyboard.press("j")
    assert tab.locator("aside h2").first.inner_text() == "condition"


def test_code_is_whole_and_opens_in_an_editor(made: Any, opened: Any) -> None:
    tab = opened(made("loops")[1])
    tab.locator(".row.node:has(.op[title='scan'])").first.click()
    line = loops.__code__.co_firstlineno + 1
    assert tab.locator(".path a").get_attribute("href") == f"vscode://file/{Path(__file__).as_posix()}:{line}"
    shown = tab.locator(".code div").all_inner_texts()
    numbers = [int(re.match(r"\d+", text)[0]) for text in shown]
    assert numbers == list(range(line - 3, line + 4)), "blank lines are lines"
    tops = tab.evaluate("[...document.querySelectorAll('.code i')].map(one => one.getBoundingClientRect().top)")
    assert all(after - before > 10 for before, after in pairwise(tops)), "no number stands on another"
    assert tab.evaluate("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.code'))")


def deep(x: torch.Tensor) -> torch.Tensor:
    for _ in range(1):
        for _ in range(1):
            for _ in range(1):
                x.add_(torch.nn.functional.softplus(x).reciprocal().square().tanh().clone().detach().sigmoid())
    return x


@pytest.mark.parametrize("width", [400, 1440])
def test_a_long_word_begins_in_its_line(width: int, opened: Any) -> None:
    """Behind any indentation: no number stands beside an empty line whose code begins below."""
    tab = opened(inspect.show(deep, torch.ones(2), machine=MACHINE), viewport={"width": width, "height": 900})
    tab.locator(".row.node:has(.op[title*='reciprocal'])").first.click()
    begins = """() => [...document.querySelectorAll(".code div")].map(one => {
        const walker = document.createTreeWalker(one, NodeFilter.SHOW_TEXT);
        walker.nextNode();  // the number
        for (let text; (text = walker.nextNode());) {
            const at = text.data.search(/\\S/);
            if (at < 0) continue;
            const range = document.createRange();
            range.setStart(text, at), range.setEnd(text, at + 1);
            return range.getBoundingClientRect().top - one.querySelector("i").getBoundingClientRect().top;
        }
        return 0;
    })"""
    offsets = tab.evaluate(begins)
    assert len(offsets) == 7 and max(map(abs, offsets)) < 6
    assert tab.evaluate("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.code'))")
    text = tab.locator(".code div.on").inner_text()
    assert text.endswith(
        "x.add_(torch.nn.functional.softplus(x).reciprocal().square().tanh().clone().detach().sigmoid())"
    )


def test_chart_says_what_it_draws_and_has_colours_without_modules(made: Any, opened: Any) -> None:
    tab = opened(made("loops")[1])
    steps(tab).last.click()
    assert "the program that runs" in tab.locator(".tabs").inner_text()
    assert "scan" in tab.locator(".u-legend").inner_text()


def test_chart_colours_modules_that_are_over_at_the_peak(made: Any, opened: Any) -> None:
    legend = opened(made("gradient")[1]).locator(".u-legend").inner_text()
    assert all(name in legend for name in ("tokens", "blocks.0", "blocks.1", "head"))


def test_columns_stand_under_their_names(made: Any, opened: Any) -> None:
    tab = opened(made("module")[1])
    edges = """row => ["type", "line"].map(name => {
        const cell = document.querySelector(`${row} .${name}`);
        return cell.getBoundingClientRect().left + parseFloat(getComputedStyle(cell).paddingLeft);
    })"""
    assert tab.evaluate(edges, ".row.head") == tab.evaluate(edges, ".row.node")


def test_two_runs_stand_beside_each_other(opened: Any) -> None:
    """Steps of the second are marked against those of the first, values are followed from one to the other, and
    costs stand side by side.
    """
    x = torch.ones(3)
    before, after = chain(lambda x: x.sin() * 2, x), chain(lambda x: (x.sin() * 3).cos(), x)
    tab = opened(inspect.compare(before, after, names=("before", "after"), machine=MACHINE))
    assert tab.locator("h1").inner_text() == "before beside after"
    assert tab.locator("nav h2").all_inner_texts() == ["1. before", "2. after"]
    table = [row.split("\t") for row in tab.locator(".beside tr").all_inner_texts()]
    assert ["equations", "2", "3", "1.50"] in table and ["cos", "0", "1", "+1"] in table
    assert tab.locator(".row.changed, .row.added, .row.ghost").count() == 0
    for position in (2, 3):
        steps(tab).nth(position).click()
        assert tab.locator(".row.changed").count() == tab.locator(".row.added").count() == 1
    assert "run 2" in tab.locator(".tabs").inner_text()
    tab.locator(".row.node", has_text="sin").first.locator("var").first.click()
    assert all("made by sin" in text for text in tab.locator(".life li").all_inner_texts())
    tab.keyboard.press("g")
    assert steps(tab).last.get_attribute("aria-current") == "true", "the peak of the run that is shown"


PERFETTO = """<script>addEventListener("message", event => {
    if (event.data === "PING") event.source.postMessage("PONG", "*");
    else globalThis.given = event.data.perfetto;
})</script>"""


def test_a_measured_call_opens_in_perfetto(opened: Any) -> None:
    """The profile is handed to Perfetto's page, for which another stands in, and saved as a file."""
    tab = opened(inspect.show(torch.sin, torch.ones(2), machine=MACHINE, measured=True))
    assert re.search(r"a call\s+[\d.]+ (µs|ms)", tab.locator("aside").inner_text())
    tab.context.route(
        "https://ui.perfetto.dev/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html")
    )
    with tab.expect_popup() as popup:
        tab.get_by_role("button", name="open in Perfetto").click()
    popup.value.wait_for_function("globalThis.given")
    given = popup.value.evaluate("[given.title, new TextDecoder().decode(given.buffer)]")
    with tab.expect_download() as download:
        tab.get_by_role("link", name="download").click()
    saved = Path(download.value.path()).read_text()
    assert given == ["sin", saved] and any(event["name"] == "aten::sin" for event in json.loads(saved)["traceEvents"])


def device_event(category: str, name: str, start: float, duration: float, stream: int) -> dict[str, Any]:
    """An event as Kineto writes those that CUPTI records."""
    args = {"device": 0, "context": 1, "stream": stream, "correlation": 7}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def test_a_measured_call_says_what_its_device_did(opened: Any) -> None:
    """A profile of a GPU, of which two kernels run at once: launches and annotations are no work of the device."""
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 0.0, "dur": 90.0}
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "GPU 0"}},
        *(launch, device_event("gpu_user_annotation", "step", 0.0, 100.0, 7)),
        *(device_event("kernel", "sgemm", start, 10.0, 7) for start in (10.0, 30.0)),
        *(device_event("kernel", "add", 35.0, 10.0, 20), device_event("gpu_memcpy", "Memcpy HtoD", 60.0, 1.0, 7)),
        {"ph": "s", "id": 7, "pid": 1, "tid": 1, "ts": 0.0, "cat": "ac2g", "name": "ac2g"},
    ]
    x = torch.ones(2)
    found = inspect.Measured(chain(torch.sin, x), 1e-4, 3, json.dumps({"traceEvents": events}))
    assert [(one.name, one.count, round(one.seconds * 1e6)) for one in found.kernels] == [
        *(("sgemm", 2, 20), ("add", 1, 10), ("Memcpy HtoD", 1, 1)),
    ]
    assert "4 kernels and copies keep the device busy for 26.0 µs" in repr(found)
    assert [line.split() for line in str(found).splitlines()[1:3]] == [
        ["on", "the", "device", "times", "time"],
        ["sgemm", "2", "20.0", "µs"],
    ]
    assert re.search(
        r"its device\s+26.0 µs busy, in 4 kernels",
        opened(inspect.page.page_of_runs(found)).locator("aside").inner_text(),
    )
    other = inspect.measure(torch.cos, x)
    assert other.kernels == () and "device" not in repr(other)
    table = opened(inspect.compare(found, other, machine=MACHINE)).locator(".beside").first.inner_text()
    assert re.search(r"its device\s+26.0 µs\s+\S\s*", table)


@pytest.mark.parametrize("width", [400, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screenshot(scheme: str, width: int, opened: Any, request: pytest.FixtureRequest) -> None:
    """The page as it was looked at, in a grid of shades, so that another font makes no difference."""
    found = chain(*module())
    data = encode([Run("module", found, memories_of(found), MACHINE)])
    for step in data["steps"]:
        step["ms"] = 1.0
    tab = opened(page_of("module", data), viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab.keyboard.press("j")
    picture = Image.open(io.BytesIO(tab.screenshot())).convert("L").resize((width // 40, 36), Image.Resampling.BOX)
    pixels = picture.tobytes()
    rows = [pixels[at : at + picture.width].hex(" ") for at in range(0, len(pixels), picture.width)]
    path = ROOT / "tests" / "golden" / "inspector" / f"{scheme}_{width}.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(rows) + "\n")
    wanted = bytes.fromhex(path.read_text())
    assert len(wanted) == len(pixels)
    mean = sum(abs(a - b) for a, b in zip(pixels, wanted, strict=True)) / len(pixels)
    assert mean < 6, f"looks other than {path.name} (of 255 shades, by {mean:.1f}): `make golden` if that is meant"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(scheme: str, made: Any, opened: Any) -> None:
    tab = opened(made("three")[1], color_scheme=scheme)
    color = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert tab.locator("html").get_attribute("data-theme") == scheme
    assert (max(tab.evaluate(color)) < 80) == (scheme == "dark")
    tab.keyboard.press("t")
    assert (max(tab.evaluate(color)) < 80) != (scheme == "dark")


def test_print_has_all_rows_and_black_on_white(made: Any, opened: Any) -> None:
    _, page = made("gradient")
    tab = opened(page, color_scheme="dark")
    tab.keyboard.press("]")
    tab.keyboard.press("e")
    wanted = tab.evaluate("inspector.flat(1).nodes.length")
    assert tab.locator(".row.node").count() < wanted
    tab.emulate_media(media="print")
    tab.wait_for_function(f"document.querySelectorAll('.row.node').length === {wanted}")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert len(tab.pdf()) > 10_000


def test_50000_equations_are_a_few_rows_at_a_time(opened: Any) -> None:
    """The trace is made long in the data: to capture so many equations takes a minute."""
    found = chain(lambda x: x.sin(), torch.ones(2))
    data = encode([Run("long", found, memories_of(found))])
    for step in data["steps"]:
        body = data["bodies"][step["body"]]
        first = body[3][0]
        body[3] = [[first[0], [position], *first[2:]] for position in range(50_000)]
        body[4] = [50_000]
        step["modules"] = [0] * 50_000
    data["steps"][1]["own"] |= {"matches": list(range(50_000)), "status": "s" * 49_999 + "c", "whys": {"49999": "all"}}
    data["memories"][0] |= {"length": 50_000}
    tab = opened(page_of("long", data))
    assert tab.locator(".row").count() < 100
    tab.keyboard.press("]")
    tab.keyboard.press("n")
    assert "v50000" in tab.locator(".row.selected").inner_text() and tab.locator(".row").count() < 100
    tab.locator(".row.selected var").first.click()
    assert tab.locator(".life li").count() == 2
    tab.keyboard.press("/")
    tab.keyboard.type("v49998")
    tab.wait_for_function("document.querySelector('[data-testid=hits]')?.textContent === '1'")
    tab.keyboard.press("Enter")
    tab.locator(".row.selected", has_text="v49998").wait_for()
    for key in "jjkkecmm":
        tab.keyboard.press(key)
    for part in (0.9, 0.1, 0.5):
        tab.evaluate(
            f"document.querySelector('.rows').scrollTop = {part} * document.querySelector('.all').clientHeight"
        )
        tab.wait_for_function("document.querySelectorAll('.row.node').length > 10")
        assert tab.locator(".row").count() < 100


def test_notebooks_get_the_page_in_a_frame(made: Any, opened: Any) -> None:
    _, page = made("three")
    tab = opened(page)
    tab.set_content(page._repr_html_())
    frame = tab.frame_locator("iframe")
    frame.locator(".row.node").first.wait_for()
    assert "sin" in frame.locator(".row.node").first.inner_text()


def distributed() -> tuple[Any, ...]:
    """A sharded MLP. The group is never asked: nothing is run."""
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(3, 4)

        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, params, (x,)).square().sum()

        sharded = tfn.fsdp(loss, dist.init_device_mesh("cpu", (2,)))
        args = tfn.grad(sharded), sharded.prepare(params_of(model)), x
        return chain(*args), inspect.show(*args)
    finally:
        dist.destroy_process_group()


def test_communication_is_on_the_timeline(opened: Any) -> None:
    found, page = distributed()
    tab = opened(page)
    sent = [leaf for leaf in found.steps[-1].flat.leaves if inspect.is_collective(leaf.equation.op.name)]
    assert len(sent) > 3 and {leaf.module for leaf in found.steps[-1].flat.leaves} <= {"", "0", "1", "2"}
    assert tab.locator(".memory .sends").count() == 0, "what was captured sends nothing"
    steps(tab).last.click()
    assert f"{len(sent)} collectives send" in tab.locator(".memory .sends").inner_text()


def test_program_is_shown_as_the_python_that_runs(made: Any, opened: Any) -> None:
    found, page = made("module")
    tab = opened(page)
    assert tab.locator(".row.head button").count() == 0
    steps(tab).nth(2).click()
    tab.locator(".row.head button", has_text="Python").click()
    program = found.steps[2].program
    assert program is not None
    lines = program.text.rstrip().splitlines()
    assert tab.locator(".row.python .code-line").all_inner_texts() == lines
    tab.keyboard.press("s")
    tab.locator(".row.node").first.wait_for()
