"""Draws programs: every statement is run in eager PyTorch when it is drawn, and stays if that works."""

from __future__ import annotations

import random
import re
import textwrap
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.fuzz import grammar
from tests.fuzz.differential import TooSlow, time_limit
from tests.fuzz.oracles import FUNC, GRAPH

HOLE = re.compile(r"\{(\w)\}")
LARGE = 1e4
EXPRESSIONS = (
    (grammar.UNARY, 5),
    (grammar.BINARY, 6),
    (grammar.REDUCTIONS, 4),
    (grammar.SHAPES, 6),
    (grammar.SHARED, 2),
    (grammar.PRODUCTS, 3),
    (grammar.NOT_FLOAT, 2),
    (grammar.SIZED, 1),
    (grammar.SUMS, 1),
    (grammar.RANDOM, 1),
    (grammar.NUMBERS, 1),
    (grammar.FUNCTION_CALLS, 1),
    (grammar.MODULE_CALLS, 2),
    (grammar.KEYWORDS, 2),
    (grammar.BITS, 1),
)


KINDS = ["grad"] * 3 + ["vmap"] * 4 + ["vjp", "jvp", "scan"] * 2
KINDS += ["value_and_grad", "jacrev", "jacfwd", "hessian", "checkpoint", "jit", "cond", "switch", "map", "while_loop"]
KINDS += ["linearize", "vmap2", "vmapout", "cond2", "pairs", "checkpoint of torch", "grad of torch", "backward"]
KINDS += ["dict scan", "dict cond", "dict while", "twice", "step", "step of two", "vmap of function"]
KINDS += ["fori_loop", "associative_scan", "grad2", "vmapgrad", "gradvmap"]
"""What a nested function is handed to; `grad2` has two arguments, `vmapgrad` and `gradvmap` are one around the other."""

LAYOUTS = [".t()", ".transpose(0, -1)", "[::2]", "[..., ::2]", "[1:]", ".expand(2, *SHAPE)", ".t().contiguous().t()"]
LAYOUTS += [".as_strided((2, 3), (1, 1))", ".as_strided((3, 3), (1, 2))", "[..., 1:]", ".flip(0)", ".narrow(0, 1, 1)"]
LAYOUTS += [".unsqueeze(-1).expand(*SHAPE, 2)", ".to(memory_format=torch.channels_last)"]
ALIASES = ["", ".t()", "[0]", "[1:]", ".view(-1)", ".detach()", ".transpose(0, -1)", "[::2]", ".expand(2, *OF.shape)"]
ALIASES += ["[..., 1:]", ".diagonal()", ".T", "[:2]", ".squeeze()", ".unsqueeze(0)"]
SHAPES = ["3", "3, 3", "2, 3", "n, 3", "n", "3, n", "2, 3, 3", "", "1", "1, 3", "3, 1", "3, 3", "4, 3"]
BY_CALL = [
    ".t()",
    ".detach().requires_grad_()",
    ".detach()",
    "[:2]",
    ".transpose(0, -1)",
    ".flip(0)",
    ".detach().float()",
]
BY_CALL += [".unsqueeze(0)", ".expand(2, -1, -1)[0]", ".clone(memory_format=torch.contiguous_format)"]
"""Statements about an argument that run in calls with an odd n only."""
BETWEEN = ["closed[0].add_(0.5)", "closed[0].eval()", "closed[-1].mul_(2)", "closed[0].requires_grad_(False)"]
BETWEEN += ["closed[0].train(not closed[0].training)", "closed[0].t_()", "closed[-1].requires_grad_()"]
INTS = ["torch.tensor([2, 0, 1], dtype=torch.int32)", "torch.tensor([3, 1, 2], dtype=torch.uint8)"]
INTS += ["torch.tensor([0, 2, 1])", "torch.tensor([[0, 1, 1], [2, 0, 1]])", "torch.arange(n)", "torch.tensor(1)"]
COMPLEX = ["", "", ".conj()", ".mT.conj()", ".imag", ".conj().imag"]
QUESTIONS = ["if {t}.shape[0] > 2:", "if {t}.dim() == 2:", "if {t}.numel() % 2:", "if {t}.is_contiguous():"]
QUESTIONS += ["if {t}.shape[-1] >= {t}.shape[0]:", "if {t}.stride(-1) == 1:", "if torch.is_grad_enabled():"]
QUESTIONS += ["if {t}.requires_grad:"]
MODES = ["torch.no_grad()"] * 4 + ["torch.enable_grad()", "torch.set_grad_enabled(False)"]
OPTIONS = ["{}"] * 4 + ["{'cache': 'symbolic values'}", "{'dynamic': False}", "{'cache': 'no caching'}"]
OPTIONS += ["{'numerics': 'bitwise'}"]


class Draw:
    """One program being drawn: lines of text, and what their names stand for."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0
        self.env: dict[str, Any] = {"__name__": "drawn_program", "torch": torch, "nn": nn, "F": F, "T": FUNC}
        self.n = 3
        self.focus = self.random.choice(
            (
                "",
                "",
                "writes",
                "nested",
                "nested",
                "flow",
                "layout",
                "random",
                "views",
                "views",
                "people",
                "people",
                "people",
            )
        )
        self.random_ops = self.random.random() < (0.8 if self.focus == "random" else 0.1)
        self.backward = self.random.random() < 0.5
        self.coarse = self.random.random() < 0.15
        self.packs = False

    # ---- names and literals ----

    def fresh(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def names(self, env: dict[str, Any], wanted: str) -> list[str]:
        found: list[str] = []
        for name, value in env.items():
            if not isinstance(value, torch.Tensor) or not re.fullmatch(r"[avcx]\d+", name):
                continue
            kind = (
                "z"
                if value.is_complex()
                else "f"
                if value.is_floating_point()
                else "b"
                if value.dtype == torch.bool
                else "i"
            )
            if wanted in (kind, "t"):
                found.append(name)
        return found

    def fill(self, template: str, env: dict[str, Any]) -> str | None:
        draw, failed = self.random, False

        def one(match: re.Match[str]) -> str:
            nonlocal failed
            hole = match[1]
            if hole == "g" and draw.random() < 0.3:
                hole = "p"
            match hole:
                case "f" | "g" | "i" | "b" | "z" | "t":
                    names = self.names(env, "f" if hole == "g" else hole)
                    if not names and hole == "b" and (others := self.names(env, "f")):
                        return f"({draw.choice(others)}>0)"
                    if not names and hole == "i":
                        return draw.choice(
                            ("torch.tensor([0,1,1])", "torch.tensor([[0,1,2],[2,0,1]])", "torch.tensor([1])")
                        )
                    if not names:
                        failed = True
                        return ""
                    at = -1 - min(int(draw.expovariate(0.35)), len(names) - 1)
                    return names[at]
                case "p":
                    numbers = [
                        k
                        for k, v in env.items()
                        if isinstance(v, (int, float, bool)) and re.fullmatch(r"[ax]\d+|n\d+", k)
                    ]
                    return (
                        draw.choice(numbers)
                        if numbers and draw.random() < 0.3
                        else draw.choice(grammar.NUMBER_LITERALS)
                    )
                case "n":
                    return str(draw.choice((1, 2, 3, 0, -1)))
                case "d":
                    return str(draw.choice((0, -1, 1, 0, -1, -2, 2)))
                case "m":
                    modules = [name for name in env if re.fullmatch(r"m\d+", name)]
                    failed = failed or not modules
                    return draw.choice(modules) if modules else ""
                case _:
                    return draw.choice(grammar.INDICES)

        text = HOLE.sub(one, template).replace("~", " ")
        return None if failed else text

    # ---- running what was drawn ----

    def runs(self, text: str, env: dict[str, Any]) -> bool:
        """Run a statement in the names so far; whether it works and its numbers are moderate."""
        before = set(env)
        try:
            exec(text, env)
        except Exception:  # noqa: BLE001
            for name in set(env) - before:
                del env[name]
            return False
        for name in [name for name in env if name not in before]:
            value = env[name]
            if isinstance(value, torch.Tensor) and not self.is_moderate(value):
                del env[name]
                return False
        return True

    def is_moderate(self, value: torch.Tensor) -> bool:
        if value.numel() > 200 or value.dim() > 5:
            return False
        if (value.is_floating_point() or value.is_complex()) and value.numel():
            largest = float(value.detach().abs().max())
            return largest < LARGE or self.random.random() < 0.05
        return True

    # ---- statements ----

    def block(self, env: dict[str, Any], statements: int, depth: int) -> list[str]:
        lines: list[str] = []
        tries = 0
        while statements > 0 and tries < 40:
            tries += 1
            found = self.statement(env, depth)
            if found:
                lines += found
                statements -= 1
        return lines

    def statement(self, env: dict[str, Any], depth: int) -> list[str] | None:
        kind = self.random.random()
        flow = 0.25 if self.focus == "flow" else 0.08
        nested = (0.35 if self.focus == "nested" else 0.06) if depth < 3 else 0.0
        writes = 0.4 if self.focus in ("writes", "views") else 0.12
        if self.focus == "people" and self.random.random() < 0.5:
            return self.several_lines(env)
        if kind < writes:
            table = grammar.RARE_WRITES if self.random.random() < 0.03 else grammar.WRITES
            table = grammar.WRITES_BY_VIEW if self.random.random() < (0.6 if self.focus == "views" else 0.1) else table
            table = grammar.CONTAINERS if self.packs and self.random.random() < 0.15 else table
            table = grammar.VIEWS_OF_VIEWS if self.random.random() < 0.12 else table
            return self.simple(self.random.choice(table), env)
        if kind < writes + flow:
            return self.flow(env, depth) if self.random.random() < 0.6 else self.several_lines(env)
        if kind < writes + flow + nested:
            return self.nested(env, depth)
        return self.assignment(env)

    def simple(self, template: str, env: dict[str, Any]) -> list[str] | None:
        if not self.random_ops and re.search(
            r"uniform|normal|bernoulli|expon|random|cauchy|geometric|dropout", template
        ):
            return None
        text = self.fill(template, env)
        return [text] if text and self.runs(text, env) else None

    def expression(self, env: dict[str, Any]) -> str | None:
        tables, weights = zip(*EXPRESSIONS, strict=True)
        table = self.random.choices(tables, weights)[0]
        table = grammar.SHARED if self.focus == "views" and self.random.random() < 0.4 else table
        if table is grammar.RANDOM and not self.random_ops:
            return None
        return self.fill(self.random.choice(table), env)

    def assignment(self, env: dict[str, Any]) -> list[str] | None:
        text = self.expression(env)
        if text is None:
            return None
        again = [name for name in env if re.fullmatch(r"v\d+", name)]
        name = self.random.choice(again) if again and self.random.random() < 0.08 else self.fresh()
        if re.match(r"(len|int|float|max|sum|tuple|-)?\(?\w+\)?\.(shape|dim|numel|ndim|size)\b", text):
            name = self.fresh("n")
        line = f"{name} = {text}"
        return [line] if self.runs(line, env) else None

    def flow(self, env: dict[str, Any], depth: int) -> list[str] | None:
        """A block of Python around statements."""
        which = self.random.choice(("if", "if", "for", "with", "with", "comprehension", "while"))
        tensors = self.names(env, "f")
        if not tensors:
            return None
        t, v = self.random.choice(tensors), self.fresh()
        if which == "comprehension":
            body = self.fill(self.random.choice(grammar.UNARY + grammar.BINARY).replace("{f}", "r", 1), env)
            if body is None:
                return None
            rows = self.random.choice(
                (f"for r in {t}", f"for r in {t}.unbind(-1)", f"for r in {t}.split(1)", f"for k, r in enumerate({t})")
            )
            line = self.random.choice((f"{v} = torch.stack([{body} {rows}])", f"{v} = sum({body} {rows})"))
            return [line] if self.runs(line, env) else None
        if which == "for":
            inner = self.fill(
                self.random.choice(grammar.BINARY + grammar.UNARY).replace("{f}", v, 1), {**env, v: env[t]}
            )
            if inner is None:
                return None
            over = self.random.choice(
                (f"range({t}.shape[0])", "range(2)", f"range({t}.dim())", f"range({t}.size(-1) - 1)")
            )
            lines = [f"{v} = {t}", f"for k in {over}:", f"    {v} = {inner}"]
            return lines if self.runs("\n".join(lines), env) else None
        if which == "while":
            lines = [
                f"{v} = {t}",
                f"while {v}.numel() > {self.random.choice((2, 3, 4))}:",
                f"    {v} = {v}{self.random.choice(('[1:]', '[..., 1:]', '.sum(0)', '[0]', '[:-1].cumsum(0)'))}",
            ]
            return lines if self.runs_shortly("\n".join(lines), env) else None
        modes = [*MODES, "torch.inference_mode()"] if self.random.random() < 0.2 else MODES
        modes = [*modes, "torch.autocast('cpu', dtype=torch.bfloat16)"] if self.coarse else modes
        asks = which == "if"
        head = self.random.choice(QUESTIONS).replace("{t}", t) if asks else f"with {self.random.choice(modes)}:"
        names = set(env)
        body = self.block_text(env, self.random.randint(1, 2), depth + 1, head)
        if body is None:
            return None
        if which == "if":  # what a branch binds has to be bound
            bound = sorted(name for name in set(env) - names if re.fullmatch(r"[vn]\d+", name))
            other = [f"    {name} = {t} * 1" for name in bound if name[0] == "v"] + [
                f"    {name} = 1" for name in bound if name[0] == "n"
            ]
            body += ["else:", *(other or ["    pass"])]
        return body

    def several_lines(self, env: dict[str, Any]) -> list[str] | None:
        """Statements as people write them."""
        text = self.fill(self.random.choice(grammar.BLOCKS), env)
        if text is None:
            return None
        text = text.replace("OPTIM", self.random.choice(grammar.OPTIMIZERS))
        for name, prefix in (("NEW", "v"), ("TWO", "v"), ("FN", "f"), ("OBJ", "o"), ("GEN", "o")):
            text = re.sub(rf"\b{name}\b", self.fresh(prefix), text)
        return text.split("\n") if self.runs_either_way(text, env) else None

    def runs_shortly(self, text: str, env: dict[str, Any]) -> bool:
        bounded = text.replace("while ", "_left = 20\nwhile (_left := _left - 1) and ")
        done = self.runs(bounded, env)
        return done and env.pop("_left", 0) > 0

    def block_text(self, env: dict[str, Any], statements: int, depth: int, head: str) -> list[str] | None:
        """Draw the body inside its head's context, so that what it does is right there."""
        inside = head[5:-1] if head.startswith("with") else None
        if inside:
            with eval(inside, dict(env)):
                lines = self.block(env, statements, depth)
        else:
            lines = self.block(env, statements, depth)
        return [head, *("    " + line for line in lines)] if lines else None

    # ---- functions inside ----

    def function(
        self, env: dict[str, Any], samples: list[Any], depth: int, scalar: bool = False, results: int = 1
    ) -> tuple[str, list[str]] | None:
        """A nested function of the given samples: its name and its lines."""
        name = self.fresh("f")
        params = [self.fresh("x") for _ in samples]
        inner = dict(env) | dict(zip(params, samples, strict=True))
        body = self.block(inner, self.random.randint(1, 3), depth + 1)
        own = [k for k, v in inner.items() if (k not in env or k in params) and isinstance(v, torch.Tensor)]
        floats = [k for k in own if inner[k].is_floating_point() or (not scalar and inner[k].is_complex())]
        if not floats:
            return None
        used = self.random.choice(floats[-2:])
        if scalar:
            result = self.random.choice(
                (f"{used}.sum()", f"{used}.square().sum()", f"({used} * {params[0]}.sum()).sum()", f"{used}.mean()")
            )
        else:
            more = [self.random.choice(floats) for _ in range(results - 1)]
            result = ", ".join([used, *more]) if more else used
        lines = [f"def {name}({', '.join(params)}):", *("    " + line for line in body), f"    return {result}"]
        return (name, lines) if self.runs("\n".join(lines), env) else None

    def nested(self, env: dict[str, Any], depth: int) -> list[str] | None:
        """A transform or a structured op of a nested function."""
        return self.twofold(env, depth) if self.random.random() < 0.4 else self.single(env, depth)

    def twofold(self, env: dict[str, Any], depth: int) -> list[str] | None:
        """A call of a nested function that is a transform of a transform."""
        kind = self.random.choice([kind for kind in grammar.NESTED if kind != "coarse" or self.coarse])
        least = 0 if kind in ("value", "scalar") else 1
        floats = [name for name in self.names(env, "f") if env[name].dim() >= least and env[name].numel()]
        if not floats:
            return None
        x, y = self.random.choice(floats), self.random.choice(floats)
        value = env[x].detach()
        sample = value if not least else value.select(-1 if kind == "last" else 0, 0)
        made = self.function(env, [sample.float() if kind == "coarse" else sample], depth, kind == "scalar")
        if made is None:
            return None
        call = self.random.choice(grammar.NESTED[kind]).replace("FN", made[0])
        line = f"{self.fresh()} = {call.replace('XX', x).replace('YY', y)}"
        return [*made[1], line] if self.runs_either_way(line, env) else None

    def runs_either_way(self, line: str, env: dict[str, Any]) -> bool:
        """Test whether a statement runs by torch.func or by autograd."""
        if self.runs(line, env):
            return True
        env["T"] = GRAPH
        done = self.runs(line, env)
        env["T"] = FUNC
        return done

    def single(self, env: dict[str, Any], depth: int) -> list[str] | None:
        floats = [name for name in self.names(env, "f") if env[name].dtype != torch.bfloat16]
        if not floats:
            return None
        draw, x = self.random, self.random.choice(floats)
        value, v = env[x].detach(), self.fresh()
        whose = "torch.func" if draw.random() < 0.12 else "T"
        shaped = [name for name in floats if env[name].shape == value.shape]
        y = draw.choice(shaped)
        kind = draw.choice(KINDS)
        if whose == "torch.func" and kind not in (
            "grad",
            "vjp",
            "jvp",
            "jacrev",
            "jacfwd",
            "hessian",
            "vmap",
            "vmapgrad",
        ):
            whose = "T"
        if kind in ("jacrev", "jacfwd", "hessian") and (value.numel() > 9 or depth > 1):
            return None
        if kind in (
            "vmap",
            "vmap2",
            "vmapout",
            "pairs",
            "map",
            "scan",
            "vmapgrad",
            "associative_scan",
            "dict scan",
            "vmap of function",
        ) and (not value.dim() or not value.shape[0]):
            return None
        row = value[0] if value.dim() and value.shape[0] else value
        slots: dict[str, tuple[list[Any], bool, int]] = {
            "grad": ([value], True, 1),
            "grad2": ([value, env[y].detach()], True, 1),
            "value_and_grad": ([value], True, 1),
            "vjp": ([value], False, draw.choice((1, 1, 2))),
            "jvp": ([value], False, draw.choice((1, 1, 2))),
            "jacrev": ([value], False, 1),
            "jacfwd": ([value], False, 1),
            "hessian": ([value], True, 1),
            "vmap": ([row], False, draw.choice((1, 1, 2))),
            "vmapgrad": ([row], True, 1),
            "gradvmap": ([value], True, 1),
            "checkpoint": ([value], False, 1),
            "jit": ([value], False, 1),
            "cond": ([value], False, 1),
            "switch": ([value], False, 1),
            "scan": ([row, row], False, 1),
            "map": ([row], False, 1),
            "while_loop": ([value], False, 1),
            "fori_loop": ([torch.tensor(1), value], False, 1),
            "associative_scan": ([row, row], False, 1),
            "linearize": ([value], False, 1),
            "vmap2": ([row, env[y].detach()], False, 1),
            "vmapout": ([row], False, 1),
            "cond2": ([value, env[y].detach()], False, 1),
            "pairs": ([row, row], False, 1),
            "checkpoint of torch": ([value], False, 1),
            "grad of torch": ([value], True, 1),
            "backward": ([value], True, 1),
            "dict scan": ([row, row], False, 1),
            "dict cond": ([value], False, 1),
            "dict while": ([value], True, 1),
            "twice": ([value], False, 1),
            "step": ([value], True, 1),
            "step of two": ([value], True, 1),
            "vmap of function": ([row], False, 1),
        }
        samples, scalar, results = slots[kind]
        made = self.function(env, samples, depth, scalar, results)
        if made is None:
            return None
        f, lines = made
        rest = "" if results == 1 else "[0]"
        in_dims = ""
        if kind == "vmap" and draw.random() < 0.4:
            in_dims = draw.choice(
                (
                    ", in_dims=0",
                    ", 0, -1",
                    ", in_dims=-1" if value.dim() > 1 and value.shape[0] == value.shape[-1] else "",
                    ", randomness='different'",
                )
            )
        asked = draw.choice((f"{x}.sum() > 0", f"{x}.shape[0] > 2", f"({x} > 0).any()", f"{x}.numel() == 0"))
        other = self.other_branch(f, env, value) if kind in ("cond", "switch") else ""
        carry, backwards = self.like_carry(draw), draw.choice(("", ", reverse=True"))
        turn = f"lambda k, u: (k + 1, {f}(u).sum() * 0.1 + u * 0.9)"
        part = draw.choice(("[0][1]", "[1]", "[0][0]"))
        tree = draw.choice(("0]['m'", "0]['k'][0", "1][0"))
        made = f"w := {x}.detach().clone().requires_grad_()"
        turns, combine = draw.choice((2, 3, f"{x}.dim()")), f"lambda p, q: p {draw.choice('*+')} q"
        call = {
            "grad": f"{whose}.grad({f})({x})",
            "grad2": draw.choice((f"T.grad({f}, argnums=1)({x}, {y})", f"T.grad({f}, (0, 1))({x}, {y})[1]")),
            "value_and_grad": f"sum(T.value_and_grad({f})({x}))",
            "vjp": f"{whose}.vjp({f}, {x})[1](torch.ones_like({f}({x})))[0]"
            if results == 1
            else f"{whose}.vjp({f}, {x})[1](tuple(torch.ones_like(u) for u in {f}({x})))[0]",
            "jvp": f"{whose}.jvp({f}, ({x},), ({y},))[1]{rest}",
            "jacrev": f"{whose}.jacrev({f})({x})",
            "jacfwd": f"{whose}.jacfwd({f})({x})",
            "hessian": f"{whose}.hessian({f})({x})",
            "vmap": f"{whose}.vmap({f}{in_dims})({x}){rest}",
            "vmapgrad": f"{whose}.vmap({whose}.grad({f}))({x})",
            "gradvmap": f"T.grad(lambda u: T.vmap({f})(u[None]).sum())({x})",
            "checkpoint": f"T.checkpoint({f})({x})",
            "jit": f"T.jit({f})({x})",
            "cond": f"T.cond({asked}, {f}, lambda u: {other}, ({x},))",
            "switch": f"T.switch(({x} > 0).sum() % 3, [{f}, lambda u: {other}, {f}], ({x},))",
            "scan": f"T.scan(lambda c, u: ({carry}, {f}(c, u)), {x}[0], {x}{backwards})[{draw.choice((0, 1, 1))}]",
            "map": f"T.map({f}, {x})",
            "while_loop": f"T.while_loop(lambda k, u: k < {draw.choice((0, 2, 3))}, {turn}, (torch.tensor(0), {x}))[1]",
            "fori_loop": f"T.fori_loop(0, {turns}, lambda k, u: {f}(k, u).sum() * 0.1 + u, {x})",
            "linearize": f"T.linearize({f}, {x})[1]({y})",
            "vmap2": draw.choice(
                (
                    f"T.vmap({f}, (0, None))({x}, {y})",
                    f"T.vmap(T.grad(lambda p, q: {f}(p, q).sum()), (0, None))({x}, {y})",
                )
            ),
            "vmapout": f"T.vmap({f}, out_dims={draw.choice((-1, 1))})({x})",
            "cond2": f"T.cond({asked}, {f}, lambda p, q: {f}(q, p) * 2, ({x}, {y}))",
            "pairs": f"T.scan(lambda c, u: ((c[0] + u, c[1] * 0.5), {f}(c[1], u)), ({x}[0], {x}[-1]), {x}){part}",
            "checkpoint of torch": f"torch.utils.checkpoint.checkpoint({f}, {x}, use_reentrant=False)",
            "grad of torch": f"torch.autograd.grad({f}({made}), w, allow_unused=True, materialize_grads=True)[0]",
            "backward": f"({f}({made}) + w.sum()).backward() or w.grad",
            "dict scan": f"T.scan(lambda c, u: ({{'m': c['m'] * 0.5 + u['q'], 'k': (c['k'][0] + 1,)}}, [{f}(c['m'], u['q'])]), "
            f"{{'m': {x}[0], 'k': ({x}.sum(),)}}, {{'q': {x}}}{backwards})[{tree}]",
            "dict cond": f"T.cond({asked}, lambda e: {{'r': [{f}(e['x'])]}}, lambda e: {{'r': [{f}(e['x']) * 2]}}, "
            f"({{'x': {x}}},))['r'][0]",
            "dict while": f"T.while_loop(lambda k, e: k < 2, lambda k, e: (k + 1, {{'x': e['x'] * 0.5 + {f}(e['x'])}}), "
            f"(torch.tensor(0), {{'x': {x}}}))[1]['x']",
            "twice": f"(g := T.jit({f}))({x}) * 2 + g({x})",
            "step": f"({made}, o := torch.optim.SGD([w], lr=0.1), ({f}(w) + w.sum()).backward(), o.step())[0].detach()",
            "step of two": f"({made}, o := torch.optim.Adam([w], lr=0.1), [(o.zero_grad(), ({f}(w) + w.sum()).backward(), "
            f"o.step()) for _ in range(2)])[0].detach()",
            "vmap of function": f"T.vmap(lambda u: Split.apply({f}(u), {f}(u))[0])({x})",
            "associative_scan": f"T.associative_scan({combine}, {x}, {draw.choice((0, 0, -1))}{backwards})",
        }[kind]
        line = f"{v} = {call}"
        runs = self.runs_either_way(line, env) if whose == "T" else self.runs(line, env)
        return [*lines, line] if runs else None

    def like_carry(self, draw: random.Random) -> str:
        return draw.choice(("c + u", "c * u", "(c + u).sin()", "c", "u", "c * 0.5 + u * u", "torch.maximum(c, u)"))

    def other_branch(self, f: str, env: dict[str, Any], value: torch.Tensor) -> str:
        """An expression of u with the type of f's result."""
        try:
            out = env[f](value)
        except Exception:  # noqa: BLE001
            return f"{f}(u) * 2"
        if isinstance(out, torch.Tensor) and out.shape == value.shape and out.dtype == value.dtype:
            return self.random.choice(("u * 2", "u.sin()", "u.clone()", "torch.zeros_like(u)", "u"))
        return f"{f}(u) * 2"

    # ---- arguments ----

    def arguments(self) -> tuple[list[str], list[str]]:
        """The lines of `inputs`, and the names of arguments."""
        draw, lines, names = self.random, list[str](), list[str]()
        dtypes = ["torch.float64"] * 8 + (
            ["torch.float32", "torch.bfloat16", "torch.float32"] * 2 if self.coarse else []
        )
        shapes = [*SHAPES, "0", "0, 3", "3, 0"] if draw.random() < 0.2 else SHAPES
        for _ in range(draw.randint(1, 3)):
            a = f"a{len(names)}"
            kind = draw.random()
            floats = [name for name in names if name in self.float_args]
            if kind < 0.06:
                lines.append(f"{a} = {draw.choice(INTS)}")
            elif kind < 0.09:
                lines.append(f"{a} = torch.tensor([True, False, True])")
            elif kind < 0.14:
                lines.append(f"{a} = {draw.choice(('n', '2', '0.5', 'True', '-1.5', 'n / 2', '3'))}")
            elif kind < 0.20:
                shape = draw.choice(("3", "3, 3", "2, 3"))
                made = f"torch.randn({shape}, dtype=torch.complex128){draw.choice(COMPLEX)}"
                lines.append(f"{a} = {made}{draw.choice(('', '', '.t()', '[..., ::2]', '[1:]', '.transpose(0, -1)'))}")
                if self.backward and draw.random() < 0.3:
                    lines[-1] += ".detach().requires_grad_()"
            elif floats and kind < (0.5 if self.focus == "layout" else 0.32):
                b = draw.choice(floats)
                lines.append(f"{a} = {b}{draw.choice(ALIASES)}".replace("OF", b))
                self.float_args.add(a)
            else:
                shape, dtype = draw.choice(shapes), draw.choice(dtypes)
                plain = 0.35 if self.focus == "layout" else 0.75
                layout = ""
                if draw.random() > plain:
                    layout = draw.choice(LAYOUTS)
                    if "SHAPE" in layout:
                        layout = layout.replace("*SHAPE", shape) if shape else ""
                lines.append(f"{a} = torch.randn({shape}{', ' if shape else '(), '}dtype={dtype}){layout}")
                if self.backward and draw.random() < 0.7:
                    lines[-1] += ".requires_grad_()" if draw.random() < 0.8 else ".requires_grad_() * 1"
                self.float_args.add(a)
                if draw.random() < 0.07:
                    lines.append(f"{a} = {a}{draw.choice(BY_CALL)} if n % 2 else {a}")
            names.append(a)
        return lines, names

    def program(self) -> str | None:
        """The whole text, None if nothing came of it."""
        draw = self.random
        self.float_args: set[str] = set()
        lines, names = self.arguments()
        self.packs = draw.random() < 0.08
        classes = "".join(grammar.FUNCTION_CLASSES.values()) + "".join(grammar.MODULES.values()) + grammar.RECORDS
        exec(compile(classes, "<classes>", "exec", dont_inherit=True), self.env)
        scope = {"torch": torch, "n": self.n}
        torch.manual_seed(3)
        for line in lines:
            try:
                exec(line, scope)
            except Exception:  # noqa: BLE001
                return None
        self.env |= {name: scope[name] for name in names}
        if self.packs:
            self.env["d"] = {name: scope[name] for name in names}
        closed: list[str] = []
        if draw.random() < 0.35:
            c = self.fresh("c")
            shape, more = draw.choice(("3", "3, 3", "2, 3", "()")), ["", "", ".t()"]
            more += [".requires_grad_()"] * self.backward + [".to(torch.float32)"] * self.coarse
            closed.append(f"{c} = torch.randn({shape}, dtype=torch.float64){draw.choice(more)}")
        if draw.random() < (0.5 if self.focus == "people" else 0.2):
            closed.append(f"{self.fresh('m')} = {draw.choice(list(grammar.MODULES))}()")
        for line in list(closed):
            if not self.runs(line, self.env):
                closed.remove(line)
        body = self.block(self.env, draw.randint(2, 6), 0)
        modules = [line.split(" ")[0] for line in closed if line.startswith("m")]
        for m in modules:
            floats = self.names(self.env, "f")
            line = f"{self.fresh()} = {m}({draw.choice(floats)})" if floats else ""
            if line and self.runs(line, self.env):
                body.append(line)
        if not body:
            return None
        values = [
            k
            for k, v in self.env.items()
            if re.fullmatch(r"[vn]\d+", k) and isinstance(v, (torch.Tensor, int, float, bool, tuple))
        ]
        results = (
            list(dict.fromkeys(draw.choice(values[-5:]) for _ in range(draw.choice((1, 2, 3, 4, 5, 6)))))
            if values
            else []
        )
        results += [name for name in names if draw.random() < 0.1] or ([] if results else [names[0]])
        shape = draw.random()
        whole = results[0] if len(results) == 1 and shape < 0.7 else "[" + ", ".join(results) + "]"
        if 0.84 < shape < 0.87 and len(results) > 1:
            whole = f"{{'u': [{results[0]}], 'w': ({', '.join(results[1:])}, {{'z': {results[-1]}}})}}"
        if 0.87 < shape < 0.9:
            whole = f"Pack({', '.join(results)})"
        if shape > 0.9:
            whole = "{" + ", ".join(f"{k!r}: {k}" for k in results) + "}"
        calls = draw.choice(([3, 3], [3, 3, 3], [3, 4], [3, 4, 5], [3, 3, 4], [3]))
        options = draw.choice(OPTIONS)
        text = "\n".join(body)
        via = "plain" if re.search(r"\bT\.", text) and draw.random() < 0.35 else "jit"
        mode = draw.choice(("",) * 12 + ("no_grad", "inference_mode"))
        used = lambda table: "".join(
            code for name, code in table.items() if re.search(rf"\b{name}\b", text + "".join(closed))
        )
        more = ""
        if draw.random() < (0.1 if "T." in text else 0.3):
            more += ', "poke": True'
        if closed and len(calls) > 1 and draw.random() < 0.25:
            more += f', "between": {draw.choice(BETWEEN)!r}'
        twice = self.backward and draw.random() < 0.15
        ends = "," if len(names) == 1 else ""
        unpacked = f"        {', '.join(names)}{ends} = {', '.join(f'd[{name!r}]' for name in names)}{ends}\n"
        unpacked = unpacked if self.packs else ""
        packed = "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"
        is_nested = not self.packs and draw.random() < 0.06
        if is_nested:
            packed = draw.choice((f"Pack({', '.join(names)})", f"[{', '.join(names)}]"))
            unpacked = f"        {', '.join(names)}{ends} = d\n"
            if draw.random() < 0.5:
                packed, unpacked = f"{{'x': ({packed}, 2)}}", f"        {', '.join(names)}{ends} = d['x'][0]\n"
        self.packs = self.packs or is_nested
        count = max(len(results) * whole.startswith("Pack"), len(names) * ("Pack" in packed))
        uses_records = re.search(r"\b(Slotted|Point|Two|collections|dataclasses|functools|itertools|operator)\b", text)
        return PROGRAM.format(
            options=options,
            calls=calls,
            via=via,
            backward=2 if twice else self.backward,
            mode=mode,
            more=more,
            args="d" if self.packs else ", ".join(names),
            given=f"{packed}," if self.packs else ", ".join(names) + ends,
            unpacked=unpacked,
            inputs=textwrap.indent("\n".join(lines), "    "),
            pack=PACK.format(count) if "Pack(" in whole + packed * self.packs else "",
            classes=used(grammar.FUNCTION_CLASSES) + used(grammar.MODULES) + grammar.RECORDS * bool(uses_records),
            closed=textwrap.indent("\n".join(closed) + "\n", "    ") if closed else "",
            names=", ".join(line.split(" ")[0] for line in closed),
            body=textwrap.indent(text, "        "),
            results=whole,
        )


PACK = 'Pack = __import__("collections").namedtuple("Pack", [f"p{{i}}" for i in range({0})], defaults=[0] * {0})'
"""A NamedTuple that has a place for each argument and for each result."""

PROGRAM = """\
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

{pack}
PLAN = {{"calls": {calls}, "via": "{via}", "options": {options}, "backward": {backward}, "grad_mode": "{mode}"{more}}}
{classes}

def inputs(n):
{inputs}
    return ({given})


def program(T):
{closed}
    def f({args}):
{unpacked}{body}
        return {results}

    return f, [{names}]
"""


def generate(seed: int) -> str | None:
    """The program of a seed, None if nothing came of it."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        try:
            with time_limit(20):  # loops of loops
                text = Draw(seed).program()
        except (
            IndexError,
            RuntimeError,
            TooSlow,
        ):  # a value that eager PyTorch refuses to look at, such as a view that is out of date
            text = None
        finally:
            torch.set_grad_enabled(True)
    return text
