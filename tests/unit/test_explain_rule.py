"""explain_rule and the tables of attempts behind it."""

from __future__ import annotations

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.errors import CaptureError
from thunder_fn.inspect import RuleRow, explain_rule, rule_order

x = torch.rand(4, 3)


def rows(op: object, *args: object) -> dict[str, RuleRow]:
    return {row.transform: row for row in explain_rule(op, *args).rows}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "transform", "found_by"),
    [
        (torch.sin, "vjp", "autograd's formula"),
        (torch.sin, "jvp", "forward AD"),
        (torch.sin, "vmap", "the op on the whole batch"),
        (lambda x: x.clone().uniform_(), "vmap", "a fill of the whole batch"),
        (lambda x: torch.cdist(x, x + 1), "jvp", "two vjps"),
        (lambda x: torch.ops.aten.copy.default(x * 0, x), "vjp", "autograd's formula for the in-place op"),
        (lambda x: torch.ops.aten.native_layer_norm_backward(x, x, [3], x[:, :1], x[:, :1], None, None, [True] * 3),
         "jvp", "statistics computed anew"),
        (lambda x: torch.take(x, torch.tensor([1, 2])), "vmap", "decomposition"),
        (torch.bernoulli, "vmap", "functorch's rule"),
    ],
)  # fmt: skip
def test_the_attempt_that_has_the_rule(op: object, transform: str, found_by: str) -> None:
    found = {row.found_by for row in explain_rule(op, x).rows if row.transform == transform}  # type: ignore[arg-type]
    assert found_by in found


def test_every_attempt_before_it_says_why_it_has_none() -> None:
    row = rows(torch.ops.aten._cdist_forward.default, x, x + 1, 2.0, None)["jvp"]
    assert row.found_by == "two vjps"
    assert [name for name, _ in row.declined] == list(rule_order()["jvp"][:-1])
    assert dict(row.declined)["forward AD"].startswith("NotImplementedError: Trying to use forward AD with _cdist")


def test_the_order_is_the_one_in_which_rules_are_looked_for() -> None:
    for row in explain_rule(lambda x: torch.softmax(x, 0).sort().values.cumsum(0), x).rows:
        order = rule_order()[row.transform]
        tried = [name for name, _ in row.declined]
        assert list(order[: len(tried) + 1]) == [*tried, row.found_by]


def test_a_refusal_is_a_row() -> None:
    row = rows(lambda x: torch.masked_select(x, x > 0.5), x)["vmap"]
    assert row.found_by.startswith("refused: vmap: aten.masked_select") or row.found_by in rule_order()["vmap"]


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(CaptureError, match="expected an op or a function, given a str"):
        explain_rule("sin")  # type: ignore[arg-type]


def test_it_is_reached_from_the_package() -> None:
    assert tfn.inspect.explain_rule is explain_rule
