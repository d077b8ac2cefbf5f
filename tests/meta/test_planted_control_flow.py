"""Wrong rules of loops, planted one at a time: the table of control flow must notice each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.laws import test_control_flow_table as table
from thunder_fn.executors import loops as executor_loops, lower
from thunder_fn.executors.reuse import find_aliases
from thunder_fn.structured import loop, scan, scan_split, while_loop, while_parts, while_split
from thunder_fn.testing.laws import forget

pytestmark = table.pytestmark


def no_fixpoint(step: Any, init: Any) -> Any:
    return init


def swapped_residuals(original: Callable[..., Any]) -> Callable[..., Any]:
    """Two residuals of one type change places."""

    def place(*args: Any) -> Any:
        placed = original(*args)
        types = {}
        places = list(placed.places)
        for index, residual in enumerate(placed.places):
            key = residual.kind
            if key == "extra" and key in types and residual != places[types[key]]:
                other = types[key]
                places[index], places[other] = places[other], places[index]
                break
            types.setdefault(key, index)
        return dataclasses.replace(placed, places=tuple(places))

    return place


def same_direction(of: Any, **changes: Any) -> Any:
    """The backward runs forwards."""
    return of if set(changes) == {"reverse"} else dataclasses.replace(of, **changes)


def mixed_xs(builder: Any, value: Any, source: int, destination: int) -> Any:
    """vmap's xs are taken in the reverse order."""
    from thunder_fn import ops
    from thunder_fn.interpreters.vmap import move_dim
    from thunder_fn.trace import Literal

    moved = move_dim(builder, value, source, destination)
    flip = ops.leaf(torch.ops.aten.flip.default)
    return builder.add(flip, (moved, (Literal(destination),)), (moved.type,))[0]


def unmasked(builder: Any, mask: Any, value: Any, other: Any) -> Any:
    """Examples that are done go on."""
    return value


CHAINED = "while_loop chained"
BUGS: dict[str, tuple[Any, str, Callable[[Any], Any], str, str]] = {
    "fixpoint of activity dropped": (loop, "carry_fixpoint", lambda _: no_fixpoint, "scan", "jvp"),
    "fixpoint of cotangents dropped": (scan_split, "carry_fixpoint", lambda _: no_fixpoint, "scan", "grad"),
    "fixpoint of batching dropped": (scan, "carry_fixpoint", lambda _: no_fixpoint, "scan", "vmap"),
    "fixpoint of while dropped, forwards": (while_parts, "carry_fixpoint", lambda _: no_fixpoint, CHAINED, "jvp"),
    "fixpoint of while dropped, backwards": (while_split, "carry_fixpoint", lambda _: no_fixpoint, CHAINED, "grad"),
    "residuals swapped": (scan_split, "_place_residuals", swapped_residuals, "scan", "grad"),
    "backward runs forwards": (scan_split, "replace", lambda _: same_direction, "scan", "grad"),
    "xs reversed under vmap": (scan, "move_dim", lambda _: mixed_xs, "scan", "vmap"),
    "updates not masked": (while_loop, "where", lambda _: unmasked, "while_loop", "vmap"),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def chained(carry: tuple[Any, ...], x: Any) -> Any:
    a, b, c = carry
    return (a * x, a + b, b * b), (c * a, x)


def chained_scan(x: Any, scanned: Any) -> Any:
    """x reaches the ys through three carries, one step later each."""
    ones = torch.ones(3, dtype=torch.float64)
    (_, _, c), (y, z) = scanned((x, ones, ones), torch.stack([ones * 2, x, ones * 3, x * 2]))
    return c + (y * z).sum(0)


def python_scan(init: Any, xs: Any) -> Any:
    carry, ys = init, []
    for x in xs.unbind(0):
        carry, y = chained(carry, x)
        ys.append(y)
    return carry, tuple(map(torch.stack, zip(*ys, strict=True)))


def while_body(n: Any, a: Any, b: Any) -> tuple[Any, Any, Any]:
    return n + 1, a * 2, b * a


def while_op(x: Any) -> Any:
    ones = torch.ones(3, dtype=torch.float64)
    return tfn.while_loop(lambda n, a, b: n < 3, while_body, (torch.tensor(0), x, ones))[2]


def while_python(x: Any) -> Any:
    carry = (0, x, torch.ones(3, dtype=torch.float64))
    for _ in range(3):
        carry = while_body(*carry)
    return carry[2]


ROWS = {
    "scan": table.Row(
        lambda x: chained_scan(x, lambda init, xs: tfn.scan(chained, init, xs)), lambda x: chained_scan(x, python_scan)
    ),
    "while_loop": table.ROWS["while_loop"],
    "while_loop chained": table.Row(while_op, while_python),
}


def cell(row: str, column: str) -> None:
    have = table.COLUMNS[column](tfn, ROWS[row].op)
    want = table.COLUMNS[column](torch.func, ROWS[row].python)
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, plant, row, column = BUGS[bug]
    cell(row, column)
    forget()
    monkeypatch.setattr(module, name, plant(getattr(module, name)))
    with pytest.raises(Exception):  # noqa: B017  a wrong value, or a trace that cannot be built
        cell(row, column)


# ---- the torch executor's loops ----


def every_carry(body: Any, num_consts: int, num_carry: int) -> tuple[int, ...]:
    return tuple(range(num_consts, num_consts + num_carry))


def carries_without_their_views(body: Any, num_consts: int, num_carry: int) -> tuple[int, ...]:
    """Looks at what is made anew, and not at who else sees it."""
    whole = find_aliases(body).whole
    return tuple(num_consts + i for i, atom in enumerate(body.outputs[:num_carry]) if whole[atom.index])


@pytest.mark.parametrize("bug", [every_carry, carries_without_their_views])
def test_a_step_in_memory_that_others_see_is_noticed(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    xs = torch.linspace(-1, 1, 24).reshape(4, 2, 3)

    def step(c: Any, x: Any) -> Any:
        new = c * 2 + x
        return new, new[:, 1:]

    trace = tfn.trace(lambda h, xs: tfn.scan(step, h, xs), xs[0], xs)
    agree = lambda: all(map(torch.equal, lower(trace)(xs[0], xs), tfn.evaluate(trace, (xs[0], xs))))
    assert agree()
    monkeypatch.setattr(executor_loops, "private_carries", bug)
    assert not agree()
