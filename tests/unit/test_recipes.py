"""Recipes: values that add up; order from traits; compile."""

from __future__ import annotations

import abc
import asyncio
import copy
import functools
import importlib.metadata
import pickle
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import func, nn
from torch.autograd import forward_ad
from torch.nn.attention.bias import causal_lower_right
from torch.utils._pytree import register_pytree_node

import thunder_fn as tfn
from tests.messages import message_of
from tests.unit.capturing import same
from thunder_fn import Lookaside, Recipe, Transform, recipes, torch_internals as internals
from thunder_fn.errors import JitError, RecipeError, TraitError, UnknownOption
from thunder_fn.executors import FusionExecutor
from thunder_fn.jitted import RetraceWarning, last_traces
from thunder_fn.jitted.transforms import in_order
from thunder_fn.recipes import command
from thunder_fn.recipes.recipe import Combined, parts_of

X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about what is asked for, and run on PyTorch's ops."""
    monkeypatch.setattr(recipes.recipe, "machine_executors", lambda: ())


def named(name: str, **traits: Any) -> Transform:
    return Transform(lambda trace: trace, name=name, **traits)


def names(transforms: Sequence[Any]) -> list[str]:
    return [one.name for one in transforms]


class Only(Recipe):
    """For linear layers, with a transform of its own."""

    def __init__(self, transforms: Sequence[Transform] = (), executors: Sequence[Any] = ()) -> None:
        self.transforms, self.executors = tuple(transforms), tuple(executors)

    def validate(self, model: Any) -> None:
        if not isinstance(model, nn.Linear):
            raise ValueError("The model must be a Linear")

    def setup_transforms(self) -> Sequence[Transform]:
        return self.transforms

    def setup_executors(self) -> Sequence[Any]:
        return self.executors


# ---- traits ----


def test_order_follows_from_traits() -> None:
    a, b, c = named("a", after=("c",)), named("b"), named("c", before=("b",))
    for given_ in ((a, b, c), (b, c, a), (c, b, a)):
        order = names(in_order(given_))
        assert order.index("c") < order.index("a") and order.index("c") < order.index("b")
    assert names(in_order((b, named("d"), a))) == ["b", "d", "a"]


@given(st.permutations(range(6)), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_in_order_is_a_stable_permutation(order: list[int], pairs: set[tuple[int, int]]) -> None:
    """Traits along some total order never contradict; the result has them all and is a fixpoint."""
    after = {i: tuple(str(low) for low, high in pairs if high == i and low < high) for i in range(6)}
    transforms = [named(str(i), after=after[i]) for i in order]
    placed = in_order(transforms)
    assert sorted(names(placed)) == sorted(names(transforms)) and in_order(placed) == placed
    for position, one in enumerate(placed):
        assert not set(one.after) & set(names(placed[position:]))
    if not any(after.values()):
        assert list(placed) == transforms


def test_contradictions_name_both() -> None:
    with pytest.raises(TraitError) as caught:
        in_order((named("quantize", after=("fsdp",)), named("other"), named("fsdp", after=("quantize",))))
    assert message_of(caught.value) == (
        "the transforms 'quantize' and 'fsdp' each want to come after the other\n"
        "  quantize: after fsdp, as quantize says\n"
        "  fsdp: after quantize, as fsdp says\n"
        "Leave one of them out, or change the traits of one that is yours."
    )
    with pytest.raises(TraitError) as caught:
        tfn.jit(torch.sin, transforms=[named("int8", conflicts=("nf4",)), named("nf4")])
    assert message_of(caught.value) == (
        "the transforms 'int8' and 'nf4' conflict: int8 says that it cannot be used with it\nLeave one of them out."
    )


def test_what_changes_the_model_comes_before_what_changes_the_trace() -> None:
    of_model, of_trace = named("of_model", on="model"), named("of_trace")
    assert in_order([of_trace, of_model]) == (of_model, of_trace)
    with pytest.raises(TraitError) as caught:
        tfn.compile(nn.ReLU(), transforms=[of_trace, named("late", on="model", after=("of_trace",))])
    assert message_of(caught.value) == (
        "the transforms 'of_trace' and 'late' each want to come after the other\n"
        "  of_trace: after late, which changes the model before it is traced\n"
        "  late: after of_trace, as late says\n"
        "Leave one of them out, or change the traits of one that is yours."
    )


@pytest.mark.parametrize("trait", ("after", "before", "conflicts"))
def test_a_transform_is_not_related_to_itself(trait: str) -> None:
    with pytest.raises(TraitError) as caught:
        named("alone", **{trait: ("alone",)})
    assert message_of(caught.value) == f"Transform 'alone': {trait} names itself"


def test_idempotent_transforms_are_applied_once() -> None:
    tidy, again = named("tidy", idempotent=True), named("again")
    assert names(in_order((tidy, again, tidy, again))) == ["tidy", "again", "again"]
    other = Transform(tfn.simplify, name="tidy", idempotent=True)
    assert names(in_order((tidy, other, Transform(tfn.simplify, name="tidy", idempotent=True)))) == ["tidy", "tidy"]
    assert names(in_order((tidy, named("tidy", idempotent=True)))) == ["tidy"]  # the same, made anew
    assert len(in_order((tidy, named("tidy", idempotent=True, after=("again",))))) == 2


def test_executors_have_traits_too() -> None:
    first, second = (FusionExecutor(name, fuse=lambda region: region.python_callable()) for name in ("first", "second"))
    first.after = ("second",)
    assert names(tfn.jit(torch.sin, executors=[first, second]).options.executors) == ["second", "first"]
    second.conflicts = ("first",)
    with pytest.raises(TraitError, match="the executors 'second' and 'first' conflict"):
        tfn.jit(torch.sin, executors=[first, second])


def test_transform_is_checked() -> None:
    with pytest.raises(TraitError, match="after is a sequence of names, given 'b'"):
        named("a", after="b")
    with pytest.raises(TraitError, match="idempotent is True or False, given 'no'"):
        named("a", idempotent="no")
    with pytest.raises(TraitError, match="a Transform's name is what the traits of others call it, given ''"):
        named("")
    with pytest.raises(TraitError, match=r"Transform 'a': expected a function, given an int: 3"):
        Transform(3, name="a")  # type: ignore[arg-type]
    with pytest.raises(JitError, match="'rough' is precision-changing, and numerics='bitwise'"):
        tfn.jit(torch.sin, transforms=[named("rough", numerics="precision-changing")], numerics="bitwise")
    with pytest.raises(JitError, match="'whole' transforms models, not traces"):
        tfn.jit(torch.sin, transforms=[named("whole", on="model")])


def test_a_transform_is_applied() -> None:
    f = tfn.jit(lambda x: x * 1 + 0, transforms=[Transform(tfn.simplify, name="simplify")])
    assert same(f(X), X) and len(last_traces(f)[1].equations) < len(last_traces(f)[0].equations)


# ---- recipes are values ----


def test_the_base_says_nothing() -> None:
    recipe = Recipe()
    answers = (recipe.setup_operators(), recipe.setup_lookasides(), recipe.setup_transforms(), recipe.setup_executors())
    assert answers == ((), (), (), ()) and recipe.setup_config() == {} and recipe.validate(nn.ReLU()) is None
    assert Recipe() == Recipe() and hash(Recipe()) == hash(Recipe())


def test_frozen_once_made() -> None:
    recipe = Only()
    with pytest.raises(RecipeError) as caught:
        recipe.transforms = ()
    assert message_of(caught.value) == (
        "Only(transforms=(), executors=()) does not change once it is made, since it may serve many models\n"
        "Make another one, or add to it with `+` and `with_`."
    )

    @dataclass(frozen=True)
    class Configured(Recipe):
        fast: bool = False

        def setup_config(self) -> Any:
            return {"cache": "same input"} if self.fast else {}

    assert Configured(fast=True) == Configured(fast=True) != Configured()
    assert tfn.compile(nn.ReLU(), Configured(fast=True))(X).shape == X.shape


def test_one_recipe_serves_many_models() -> None:
    recipe = Only([named("a")])
    for size in (2, 4):
        layer = nn.Linear(3, size)
        assert same(tfn.compile(layer, recipe)(X), layer(X))
    with pytest.raises(ValueError, match="The model must be a Linear"):
        tfn.compile(nn.ReLU(), recipe)


def test_addition() -> None:
    a, b, c = Only([named("a")]), Only([named("b")]), Recipe().with_(transforms=[named("c")])
    assert (a + b) + c == a + (b + c) and isinstance(a + b, Combined)
    assert a + Recipe() == Recipe() + a == a and parts_of(a + b + c) == (a, b, c)
    layer = nn.Linear(3, 3)
    assert names((a + b + c).assemble(layer).transforms) == ["a", "b", "c"]
    first, last = named("first", before=("second",)), named("second")
    for recipe in (Only([first]) + Only([last]), Only([last]) + Only([first])):
        assert names(recipe.assemble(layer).transforms) == ["first", "second"]
    assert names(tfn.recipes.entry.chosen(layer, [a, b]).assemble(layer).transforms) == ["a", "b"]


def test_contradicting_recipes() -> None:
    class Direct(Recipe):
        frontend = "direct"

        def setup_config(self) -> Any:
            return {"cache": "same input"}

    class Dynamo(Recipe):
        frontend = "dynamo"

        def setup_config(self) -> Any:
            return {"cache": "no caching"}

    both = Direct() + Dynamo()
    with pytest.raises(
        RecipeError, match=r"Direct\(\) wants the frontend 'direct', Dynamo\(\) wants the frontend 'dynamo'"
    ):
        both.assemble(torch.sin)
    with pytest.raises(RecipeError) as caught:
        both.with_(frontend="direct").assemble(torch.sin)
    assert both.with_(frontend="dynamo", cache="no caching").assemble(torch.sin).frontend == "dynamo"
    assert message_of(caught.value) == (
        "Direct() sets cache='same input', Dynamo() sets cache='no caching'\nSay which one: `(a + b).with_(cache=...)`."
    )
    single = Direct().with_(cache="constant values")
    assert dict(single.assemble(torch.sin).config) == {"cache": "constant values"}


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Diverts(Recipe):
    """With a lookaside that is made anew each time it is asked."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def setup_lookasides(self) -> Any:
        factor = self.factor
        return [Lookaside(twice, lambda x: x * factor)]


def test_contradicting_lookasides() -> None:
    with pytest.raises(RecipeError) as caught:
        tfn.compile(lambda x: twice(x), [Diverts(3), Diverts(4)])
    name = "tests.unit.test_recipes.Diverts.setup_lookasides.<locals>.<lambda>"
    assert message_of(caught.value) == (
        f"Diverts(factor=3) diverts tests.unit.test_recipes.twice to {name}, "
        f"Diverts(factor=4) diverts tests.unit.test_recipes.twice to {name}\n"
        "Say which one: `(a + b).with_(lookasides=[...])`."
    )
    assert same(tfn.compile(lambda x: twice(x), [Diverts(3), Diverts(3)])(X), X * 3)
    last = (Diverts(3) + Diverts(4)).with_(lookasides=[Lookaside(twice, lambda x: x * 5)])
    assert same(tfn.compile(lambda x: twice(x), last)(X), X * 5)
    with pytest.raises(RecipeError, match="setup_lookasides returns `Lookaside`s, not a builtin_function_or_method"):
        tfn.compile(twice, Recipe().with_(lookasides=[torch.sin]))  # type: ignore[list-item]


def test_recipes_may_be_abstract() -> None:
    class Abstract(Recipe, abc.ABC):
        @abc.abstractmethod
        def setup_config(self) -> Any: ...

    class Whole(Abstract):
        def setup_config(self) -> Any:
            return {"cache": "same input"}

    with pytest.raises(TypeError, match="abstract"):
        Abstract()
    assert dict(Whole().assemble(torch.sin).config) == {"cache": "same input"}


def test_a_model_that_a_transform_lost() -> None:
    for lost, what in ((None, "None"), (3, "an int")):
        with pytest.raises(RecipeError) as caught:
            tfn.compile(nn.ReLU(), transforms=[Transform(lambda model, lost=lost: lost, name="loses", on="model")])
        assert message_of(caught.value) == (
            f"the transform 'loses' of the model returned {what}, not a module or function\n"
            "Return the model, also where it is changed in place."
        )


def test_a_validation_that_returns_false() -> None:
    class Silent(Recipe):
        def validate(self, model: Any) -> Any:
            return False

    with pytest.raises(RecipeError) as caught:
        tfn.compile(nn.ReLU(), Silent())
    assert (
        message_of(caught.value) == "Silent(): validate returned False for a ReLU\nLet it raise an error that says why."
    )


def test_answers_are_checked() -> None:
    class Wrong(Recipe):
        def setup_transforms(self) -> Any:
            return named("alone")

    class Flags(Recipe):
        def setup_config(self) -> Any:
            return {"nv_enable_linear": True}

    with pytest.raises(RecipeError) as caught:
        tfn.compile(torch.sin, Wrong())
    assert message_of(caught.value) == (
        "Wrong(): setup_transforms returns a sequence, not a Transform\nReturn `()` for nothing."
    )
    with pytest.raises(UnknownOption) as caught:
        tfn.compile(torch.sin, Flags())
    assert message_of(caught.value) == (
        "Flags(): setup_config has 'nv_enable_linear'; a recipe may set cache, numerics, verify, dynamic, "
        "static_argnums, static_argnames, donate_argnums"
    )
    with pytest.raises(UnknownOption) as caught:
        tfn.compile(torch.sin, chache=1)
    options = (
        "executors, operators, lookasides, frontend, cache, numerics, verify, dynamic, "
        "static_argnums, static_argnames, donate_argnums"
    )
    text = f"compile: unknown option 'chache'; did you mean 'cache'?\nThere are transforms, {options}."
    assert message_of(caught.value) == text
    with pytest.raises(UnknownOption, match=r"^compile: unknown option 'colour'\nfrom: .*\nThere are transforms"):
        tfn.compile(torch.sin, colour="red")
    with pytest.raises(UnknownOption, match=r"^compile: unknown option 'mode'\nfrom: .*\nWrite `executors="):
        tfn.compile(torch.sin, mode="max-autotune")


def test_none_is_nothing() -> None:
    """None counts as nothing, as in the seed's classes."""

    class Nothing(Recipe):
        def __init__(self) -> None:
            super().__init__()

        def setup_lookasides(self) -> Any:
            return None

        setup_operators = setup_transforms = setup_executors = setup_config = setup_lookasides

    assert same(tfn.compile(nn.ReLU(), Nothing())(X), X.relu())


def test_the_final_step_is_not_overridden() -> None:
    for name in ("assemble", "explain", "setup"):
        with pytest.raises(RecipeError) as caught:
            type("Mine", (Recipe,), {name: lambda self, model: None})
        assert message_of(caught.value) == (
            f"Mine: `{name}` is not to be overridden\n"
            "Override `validate` and the `setup_` methods, whose answers it puts together."
        )


def test_questions_are_methods_by_their_names() -> None:
    with pytest.raises(RecipeError, match=r"there is no question `setup_transform`; did you mean `setup_transforms`?"):
        type("Mine", (Recipe,), {"setup_transform": lambda self: ()})
    for question in ("setup_executors", "setup_config"):
        with pytest.raises(RecipeError) as caught:
            tfn.compile(nn.ReLU(), type("Mine", (Recipe,), {question: ["torch"]})())
        assert message_of(caught.value) == (
            f"Mine(): {question} is a method that returns what is asked for, not a list\n"
            f"Write `def {question}(self): return ...`."
        )


def test_explain() -> None:
    ex = FusionExecutor("slow", fuse=lambda region: region.python_callable())
    recipe = Only([named("late", after=("early",)), named("early", numerics="reassociating")], [ex])
    recipe += Recipe().with_(lookasides=[Lookaside(torch.sin, torch.cos)], cache="no caching")
    text = recipe.explain(nn.Linear(3, 3))
    assert "  1. early (on the trace, reassociating), from Only(transforms=" in text
    assert text.splitlines()[4].endswith("; after early, as late says")
    assert "lookaside  sin -> cos" in text.replace("torch._VariableFunctionsClass.", "").replace("builtins.", "")
    assert text.splitlines()[-1] == "option     cache='no caching'"
    exact = Only([], [FusionExecutor("rough", fuse=lambda region: region.python_callable(), numerics="reassociating")])
    text = exact.with_(numerics="bitwise").explain(nn.Linear(3, 3))
    assert "executors  none\n  without rough, which is reassociating, as numerics='bitwise'" in text


# ---- compile ----


def test_the_machine_s_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor in the background where there is a compiler; after what is asked for; none after torch; none twice."""
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "python")
    own = FusionExecutor("own", fuse=lambda region: region.python_callable())
    assert names(Recipe().assemble(torch.sin).executors) == ["inductor"]
    assert names(Recipe().with_(executors=own).assemble(torch.sin).executors) == ["own", "inductor"]
    assert names(Recipe().with_(executors="torch").assemble(torch.sin).executors) == ["torch"]
    mine = tfn.executors.inductor()
    assert Recipe().with_(executors=mine).assemble(torch.sin).executors == (mine,)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert Recipe().assemble(torch.sin).executors == () and same(tfn.compile(torch.sin)(X), torch.sin(X))


def test_compile_functions_and_modules() -> None:
    assert same(tfn.compile(torch.sin)(X), torch.sin(X))
    layer = nn.Linear(3, 3)
    compiled = tfn.compile(layer)
    assert isinstance(compiled, nn.Linear) and same(compiled(X), layer(X))
    assert same(tfn.compile(layer, recipe=["default", Only()])(X), layer(X))
    assert same(tfn.compile(layer, "auto")(X), layer(X))


def test_operators_come_first_and_lookasides_are_used() -> None:
    taken: list[str] = []

    def executor(name: str) -> FusionExecutor:
        def fuse(region: Any) -> Any:
            taken.append(name)
            return region.python_callable()

        made = FusionExecutor(name, fuse=fuse, min_size=1)
        made.register_supported(torch.cos)
        return made

    class Both(Recipe):
        def setup_operators(self) -> Any:
            return (executor("operators"),)

        def setup_executors(self) -> Any:
            return (executor("executors"),)

        def setup_lookasides(self) -> Any:
            return (Lookaside(torch.sin, torch.cos),)

    assert same(tfn.compile(lambda x: x.add(1).cos() + torch.sin(x), Both())(X), (X + 1).cos() + X.cos())
    assert set(taken) == {"operators"}


def test_results_of_any_kind() -> None:
    others = ("ok", 1.5, float("inf"), 1j, True, None, ..., torch.float32, torch.device("cpu"), torch.channels_last)
    assert tfn.compile(lambda x: (x.sin(), *others))(X)[1:] == others


def test_a_wrong_recipe_is_an_error() -> None:
    with pytest.raises(RecipeError) as caught:
        tfn.compile(nn.ReLU(), "hf-lama")
    assert message_of(caught.value).startswith(
        "there is no recipe 'hf-lama'; did you mean 'hf-llama'?\nThere are ddp, default, "
    )
    with pytest.raises(RecipeError, match="make an instance of it"):
        tfn.compile(nn.ReLU(), Only)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="expected a module, given the class ReLU; make an instance of it"):
        tfn.compile(nn.ReLU)
    with pytest.raises(RecipeError, match="expected a module or function, given an int: 3"):
        tfn.compile(3)  # type: ignore[arg-type]


def test_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes.registry, "_recipes", dict(recipes.registry._recipes))

    class Net(nn.Sequential):
        pass

    class ForNet(Recipe):
        name, models = "for-net", (f"{Net.__module__.partition('.')[0]}.Net",)

    recipes.register(ForNet)
    assert "for-net" in recipes.list() and recipes.get("for-net") is ForNet
    assert recipes.for_model(Net()) is ForNet and recipes.for_model(nn.ReLU()) is None
    assert recipes.for_model(tfn.jit(Net())) is ForNet
    with pytest.raises(RecipeError, match="Recipe has no `name`"):
        recipes.register(Recipe)
    for wrong in (Net, Recipe()):
        with pytest.raises(RecipeError, match="register: expected a class derived from `Recipe`, given "):
            recipes.register(wrong)  # type: ignore[type-var]
    with pytest.raises(RecipeError, match="a recipe's name is a str, given an int: 3"):
        recipes.get(3)  # type: ignore[arg-type]

    @recipes.register
    class Asks(Recipe):
        name = "asks"

        def __init__(self, many: int) -> None:
            self.many = many

    with pytest.raises(RecipeError) as caught:
        tfn.compile(nn.ReLU(), "asks")
    assert message_of(caught.value) == (
        "compile: the recipe 'asks' cannot be made without arguments: missing a required argument: 'many'\n"
        f"Give the recipe itself, `{Asks.__name__}(...)`."
    )


# ---- Dynamo ----


class Breaks(nn.Module):
    """A graph break in the middle, which direct capture refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if x.sum() > 100:
            return x
        return x * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it where it resumes
def test_dynamo_breaks_graphs() -> None:
    torch.manual_seed(0)
    module, seen = Breaks(), []
    with pytest.raises(tfn.errors.DataDependentBranch):
        tfn.compile(module, frontend="direct")(X)
    compiled = tfn.compile(module, frontend="dynamo", transforms=[lambda trace: seen.append(trace) or trace])
    assert isinstance(compiled, Breaks) and list(compiled.state_dict()) == list(module.state_dict())
    assert same(compiled(X), module(X)) and len(seen) == 2
    assert same(copy.deepcopy(compiled)(X), module(X))
    found = torch.autograd.grad(compiled(X).sum(), module.linear.weight)[0]
    torch.testing.assert_close(found, torch.autograd.grad(module(X).sum(), module.linear.weight)[0])


def test_a_part_that_cannot_be_traced_runs_as_it_is() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = (x + 1 if x.sum() > -100 else x).clone()
        before = y._version
        y.add_(1)
        return y * (y._version - before)

    compiled = tfn.compile(f)
    with pytest.warns(tfn.errors.GraphBreakWarning) as caught:
        assert same(compiled(X), f(X)) and same(compiled(X), f(X))
    said = [str(one.message).splitlines()[0] for one in caught if one.category is tfn.errors.GraphBreakWarning]
    assert said == [
        "f is no single trace, and goes through Dynamo, in parts:",
        "a part of a compiled function runs as it is, by PyTorch:",
    ]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Numbers of eight bits: a part of Dynamo's with a quantized tensor in it cannot be traced."""
    return x.sin() + torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8).dequantize()


def dual(x: torch.Tensor) -> torch.Tensor:
    """The tangent by a level of forward mode."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(rounded(forward_ad.make_dual(x, x + 1))).tangent * 2


def under(scope: Any) -> Any:
    """Round in a scope, and compute after it."""

    def f(x: torch.Tensor) -> torch.Tensor:
        with scope():
            y = x @ x.T + rounded(x @ x.T)
        return (y @ x).sin() @ x.T

    return f


LEAVES_SCOPES = {
    "grad": lambda x: func.grad(lambda x: rounded(x).sum())(x) * x,
    "grad of grad": lambda x: func.grad(lambda x: func.grad(lambda x: rounded(x * x).sum())(x).sum())(x) * x,
    "jvp": lambda x: func.jvp(rounded, (x,), (x + 1,))[1] * x,
    "jvp of jvp": lambda x: func.jvp(lambda x: func.jvp(rounded, (x * x,), (x,))[1], (x,), (x + 1,))[1] * x,
    "jvp of grad": lambda x: func.jvp(func.grad(lambda x: rounded(x * x).sum()), (x,), (x + 1,))[1] * x,
    "vmap": lambda x: torch.vmap(rounded)(x) * x,
    "vmap of grad": lambda x: torch.vmap(func.grad(lambda x: rounded(x).sum()))(x) * x,
    "jacfwd": lambda x: func.jacfwd(rounded)(x) * 2,
    "dual level": dual,
    "no_grad": under(torch.no_grad),
    "autocast": under(lambda: torch.autocast("cpu")),
    "autocast of another dtype": under(lambda: torch.autocast("cpu", dtype=torch.float16)),
    "autocast without its cache": under(lambda: torch.autocast("cpu", cache_enabled=False)),
    "autocast off": under(lambda: torch.autocast("cpu", enabled=False)),
    "forward mode off": under(lambda: forward_ad._set_fwd_grad_enabled(False)),
    "inference mode": under(torch.inference_mode),
}
"""Functions that open a scope by calls of their own in Dynamo's graph. What closes it comes after the refusal."""


@pytest.mark.filterwarnings(
    "ignore::thunder_fn.errors.GraphBreakWarning", "ignore:There is a performance drop", "ignore:torch.quantize"
)
@pytest.mark.parametrize("what", LEAVES_SCOPES)
def test_a_part_that_cannot_be_traced_leaves_no_scope_open(what: str) -> None:
    f, x = LEAVES_SCOPES[what], X.clone().requires_grad_(what != "inference mode")
    expected, before = f(x), internals.flags()
    compiled = tfn.compile(f)
    for _ in range(2):
        found = compiled(x)
        assert type(found) is torch.Tensor and found.dtype == expected.dtype
        assert same(found, expected) and found.requires_grad == expected.requires_grad
        assert internals.flags() == before and not internals.inside_torch_func()
    if expected.requires_grad:
        assert same(*(torch.autograd.grad(one.sum(), x)[0] for one in (found, expected)))
    assert same(func.jvp(torch.sin, (X,), (X,))[1], X.cos() * X)  # no level is left
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0


class Row:
    """A node that looks at its parts as it is made."""

    def __init__(self, x: torch.Tensor) -> None:
        if x.dim() != 2:
            raise ValueError("no row")
        self.x = x


class Table(dict[str, torch.Tensor]):
    """A node that is made of one part, and may get others later."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x=x)


register_pytree_node(Row, lambda row: ([row.x], None), lambda parts, _: Row(*parts))
register_pytree_node(
    Table, lambda table: ([*table.values()], [*table]), lambda parts, keys: Table(**dict(zip(keys, parts, strict=True)))
)


class Sub(torch.Tensor):
    """A class of tensors that changes nothing."""


OF_ANOTHER_CLASS = {
    "constructor": lambda x: Sub(x * 2),
    "constructor, and back": lambda x: (Sub(x) + 1).as_subclass(torch.Tensor),
    "as_subclass": lambda x: (x * 2).as_subclass(Sub),
    "_make_subclass": lambda x: torch.Tensor._make_subclass(Sub, x * 2),
    "lazy layer": lambda x: nn.LazyLinear(2)(x) * 0,
    "bias of attention": lambda x: nn.functional.scaled_dot_product_attention(
        x[None], x[None], x[None], attn_mask=causal_lower_right(2, 2)
    ),
    "view of a dict": lambda x: {1: x * 2}.values(),
    "slice": lambda x: slice(x * 2),
    "exception": lambda x: ValueError(x * 2),
    "node that looks at its parts": lambda x: Row(x * 2),
    "nodes among results": lambda x: [x, {"row": Row(x * 2)}],
    "node with other parts": lambda x: (table := Table(x * 2)) and (table.update(y=x + 1), table)[1],
}


@pytest.mark.filterwarnings("ignore::thunder_fn.errors.GraphBreakWarning", "ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("what", OF_ANOTHER_CLASS)
def test_a_compiled_function_makes_what_no_program_can(what: str) -> None:
    f = OF_ANOTHER_CLASS[what]
    with pytest.raises((tfn.errors.UnsupportedCall, tfn.errors.UnsupportedOutput)):
        tfn.jit(f)(X)
    found, expected = tfn.compile(f)(X), f(X)
    assert type(found) is type(expected)
    parts = {"dict_values": list, "slice": lambda one: [one.stop], "ValueError": lambda one: one.args}
    parts |= {"Row": lambda one: [one.x], "Table": lambda one: one.values(), "list": lambda one: [one[1]["row"].x]}
    tensors = [parts.get(type(one).__name__, lambda one: [one])(one) for one in (found, expected)]
    assert all(map(same, *tensors))


def test_a_node_that_looks_at_its_parts_may_be_an_argument_of_a_compiled_function() -> None:
    f = lambda row: row.x * 2
    with pytest.raises(tfn.errors.UnsupportedOutput, match=r"Row cannot be put together again(.|\n)*test_recipes"):
        tfn.jit(f)(Row(X))
    with pytest.warns(tfn.errors.GraphBreakWarning):
        assert same(tfn.compile(f)(Row(X)), f(Row(X)))


class Counts(Breaks):
    """Changes a buffer and draws a number before it looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(nn.functional.dropout(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # of 2.11, of `super()`
def test_what_decides_on_values_goes_through_dynamo() -> None:
    """Dynamo takes over if no recipe wants a frontend: with a warning, once, and as if the first attempt had not
    been.
    """
    torch.manual_seed(0)
    module = Counts()
    compiled = tfn.compile(module)
    torch.manual_seed(1)
    with pytest.warns(tfn.errors.GraphBreakWarning) as caught:
        first = compiled(X)
    lines = str(caught[0].message).splitlines()
    assert lines[0] == "Counts is no single trace, and goes through Dynamo, in parts:"
    assert lines[2].endswith("in forward") and "test_recipes.py" in lines[2]
    assert lines[4] == (
        'Say `frontend="dynamo"` to have it so without this warning, or `frontend="direct"` to have this as an error.'
    )
    assert module.count == 1
    found = [first, compiled(X)]
    torch.manual_seed(1)
    assert all(map(same, found, [module(X), module(X)])) and module.count == 4


class Counting(nn.Module):
    """Reads what it counts itself, and grows to the largest batch that it has seen."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, self.calls, self.largest, self.seen = counts, 0, 0, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
            self.seen.append(x.shape[0])
        if x.shape[0] > self.largest:
            self.largest = x.shape[0]
        return x * self.calls + self.largest + len(self.seen)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("frontend", (None, "direct"))
@pytest.mark.parametrize("counts", (False, True))
def test_what_a_module_counts_itself(frontend: Any, counts: bool) -> None:
    eager = Counting(counts)
    module = copy.deepcopy(eager)
    compiled = tfn.compile(module, frontend=frontend)
    batches = [*[X] * 7, torch.cat([X, X]), X, X]
    expected = [eager(x) for x in batches]
    if counts:
        with pytest.warns(UserWarning) as caught:
            found = [compiled(x) for x in batches]
        (said,) = [one for one in caught if "Python 3.13.0" not in str(one.message)]  # which Dynamo warns of
        assert said.category is (RetraceWarning if frontend else tfn.errors.GraphBreakWarning)
        assert "Counting changes its attribute 'calls' in each call" in str(said.message)
    else:
        found = [compiled(x) for x in batches]
        assert tfn.cache_info(compiled).misses == 4  # each size twice: at first, largest is another one afterwards
    assert all(map(same, found, expected))
    assert (module.calls, module.seen, module.largest) == (eager.calls, eager.seen, eager.largest)


def breaks(x: torch.Tensor, n: int = 2) -> torch.Tensor:
    """Decides on values, after a random number."""
    x = nn.functional.dropout(x)
    return x if x.sum() > 100 else x * n


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_functions_go_through_dynamo_too() -> None:
    """With a warning, once; kinds of calls that have programs keep them; a copy begins anew."""
    compiled = tfn.compile(breaks)
    torch.manual_seed(1)
    with pytest.warns(tfn.errors.GraphBreakWarning) as caught:
        first = compiled(X)
    lines = str(caught[0].message).splitlines()
    assert (
        lines[0] == "breaks is no single trace, and goes through Dynamo, in parts:" and caught[0].filename == __file__
    )
    found = [first, compiled(X, 3), compiled(X + 100, n=3)]
    torch.manual_seed(1)
    assert all(map(same, found, [breaks(X), breaks(X, 3), breaks(X + 100, n=3)]))
    x = X.clone().requires_grad_()
    torch.manual_seed(1)
    known = torch.autograd.grad(breaks(x).sum(), x)[0]
    torch.manual_seed(1)
    assert same(torch.autograd.grad(compiled(x).sum(), x)[0], known)
    assert compiled.__name__ == "breaks" and type(pickle.loads(pickle.dumps(compiled))) is type(compiled)
    with pytest.raises(tfn.errors.DataDependentBranch):
        tfn.compile(breaks, frontend="direct")(X)
    with pytest.raises(tfn.errors.DataDependentBranch):
        tfn.compile(breaks, static_argnums=1)(X, 2)
    with pytest.raises(tfn.errors.DataDependentBranch):
        tfn.grad(lambda x: compiled(x).sum())(X)


def scaled(x: torch.Tensor, p: float) -> torch.Tensor:
    """Decides on values, and then on a float."""
    return x if x.sum() > 100 else nn.functional.dropout(x * p, p) + p


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_floats_that_change_are_floats_in_the_graphs_of_dynamo() -> None:
    """Dynamo passes them as tensors, whose numbers a trace would not know."""
    compiled = tfn.compile(scaled, frontend="dynamo", executors="torch")
    for p in (0.5, 0.1, 0.3, 0.7):
        torch.manual_seed(0)
        found = compiled(X, p)
        torch.manual_seed(0)
        assert torch.equal(found, scaled(X, p))


def test_options_of_jit_are_options_of_compile() -> None:
    marked = tfn.compile(lambda x: x * x.shape[0], dynamic={"x": {0: (2, 8)}})
    assert [marked(torch.ones(size)).sum().item() for size in (2, 3, 8)] == [4, 9, 64]
    assert tfn.cache_info(marked).misses == 1
    assert same(tfn.compile(torch.sin, verify=True)(X), X.sin())


def test_arguments_are_not_counted_in_graphs() -> None:
    for option in ({"donate_argnums": 0}, {"static_argnums": 0}, {"dynamic": {"x": True}}):
        with pytest.raises(RecipeError) as caught:
            tfn.compile(Breaks(), frontend="dynamo", **option)
        assert message_of(caught.value) == (
            "the frontend 'dynamo': static and donated arguments and marks in dynamic are of a function's arguments, "
            "not of its graphs'\nLeave them out: Dynamo finds out what is static."
        )
    with pytest.raises(tfn.errors.DataDependentBranch):
        tfn.compile(Breaks(), donate_argnums=0)(X.clone())


def test_many_models_of_one_class_through_dynamo() -> None:
    """Dynamo compiles one code object 8 times, and then runs it as it is: the limit is another for models that may be many."""
    diverted = Lookaside(torch.relu, torch.tanh)
    for _ in range(10):
        compiled = tfn.compile(nn.Linear(3, 3), frontend="dynamo", executors="torch")
        assert same(compiled(X), nn.Linear.forward(compiled, X))
        breaks = tfn.compile(OneBreak(), frontend="dynamo", executors="torch", lookasides=[diverted])
        assert same(breaks(X), X.tanh() + X.tanh())


def test_programs_of_one_code_object_through_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo would run the code as it is, without the lookaside. Models of equal options and sizes share programs."""
    monkeypatch.setattr(internals.parts, "PROGRAMS", 2)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    def compiled(factor: float) -> Any:
        diverted = [lookaside] if not factor else [Lookaside(torch.relu, lambda x: x * factor)]
        return tfn.compile(f, frontend="dynamo", executors="torch", lookasides=diverted)

    lookaside = Lookaside(torch.relu, torch.tanh)
    shared, other = [compiled(0.0) for _ in range(4)], compiled(2.0)
    assert all(same(each(X), X.tanh() + 1) for each in shared) and same(other(X), X * 2 + 1)
    for _ in range(2):
        with pytest.raises(RecipeError) as caught:
            compiled(3.0)(X)
        assert message_of(caught.value).startswith(
            "Dynamo has 2 programs of one code object, and a call of this function needs"
        )
        assert f"from:         {__file__}" in message_of(caught.value)
    assert same(shared[0](X), X.tanh() + 1) and same(other(X), X * 2 + 1)


class OneBreak(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return y + torch.relu(x)


class Rounded(torch.autograd.Function):
    """A step width in the context's attributes, a saved tensor of its own, and a result without gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = torch.round(x / width)
        ctx.width, signs = width, torch.sign(x)
        ctx.save_for_backward(x * 2)
        ctx.mark_non_differentiable(signs)
        return rounded, signs

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:
        return g * ctx.saved_tensors[0] / ctx.width, None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_autograd_functions_through_dynamo() -> None:
    """Their backward is the one that is written, as in eager; a graph of Dynamo's has it as a graph."""

    def f(x: torch.Tensor) -> torch.Tensor:
        rounded, signs = Rounded.apply(x, torch.tensor(0.1))
        return rounded * 3 + signs

    compiled = tfn.compile(f, frontend="dynamo", executors="torch")
    mine, its = (X.clone().requires_grad_() for _ in range(2))
    found, known = compiled(mine), f(its)
    assert same(found, known)
    found.sum().backward()
    known.sum().backward()
    assert mine.grad is not None and its.grad is not None and same(mine.grad, its.grad)


def test_the_backend_of_torch_compile() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["torch_dynamo_backends"].items()
    backend = importlib.metadata.EntryPoint(*entry, "torch_dynamo_backends").load()
    assert entry[0] == "thunder_fn" and backend is recipes.dynamo.thunder_fn
    f = torch.compile(lambda x: torch.sin(x) * 2, backend=backend, options={"cache": "constant values"})
    assert same(f(X), torch.sin(X) * 2)


# ---- the command ----


def small() -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU()), {"input": X}


def test_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([f"{__name__}:small", "--no-torch-compile", "--report", str(tmp_path), "--train"]) == 0
    text = capsys.readouterr().out
    assert "1 aten.addmm" not in text and "1 addmm.default" in text and (tmp_path / "report.txt").read_text() == text
    assert (tmp_path / "trace.py").read_text().startswith("def Sequential(v0, v1, v2):")
    assert "memory     64 B of parameters" in text and re.search(r"; then thunder_fn [\d.]+ (µs|ms), eager", text)
    assert "torch/nn" not in text, "no line of PyTorch is shown as the user's"


def number() -> int:
    return 3


def unnamed() -> tuple[nn.Module, dict[str, Any]]:
    return nn.Linear(3, 4), {"tokens": X}


def test_command_takes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a_model_to_compile.py"
    path.write_text("import torch\n\ndef small():\n    return torch.nn.ReLU(), {'input': torch.ones(2)}\n")
    assert command.main([f"{path}:small", "--no-torch-compile"]) == 0
    assert "ReLU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["nowhere.json"], 2, "'nowhere.json' names no function"),
        (["nowhere.py:f"], 2, "there is no file nowhere.py"),
        (["no_such_module:f"], 2, "there is no module no_such_module"),
        (["os:nothing"], 2, "os has no function 'nothing'"),
        ([f"{__name__}:number"], 2, f"{__name__}:number must return (model, kwargs), where kwargs is a dict"),
        ([f"{__name__}:small", "--recipe", "defalt"], 2, "there is no recipe 'defalt'; did you mean 'default'?"),
        ([f"{__name__}:unnamed"], 1, "Linear raised TypeError while it was traced: "),
    ],
)
def test_command_misused(argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(argv) == code
    assert capsys.readouterr().err.startswith(f"thunder_fn compile: {message}")


def test_command_finds_out_at_once_that_it_cannot_write(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main([f"{__name__}:small", "--report", __file__])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument --report: {__file__}: File exists\n")


PARTS = """
import warnings

import torch
import thunder_fn as tfn


def losses(wrap):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(x):
        x.requires_grad_()
        value = model(x)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        loss = (slope[:, 1] - bend[:, 0] + value[:, 0] * slope[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = wrap(step)
    return [run(torch.linspace(0, 1, 10, dtype=torch.float64).view(5, 2)).item() for _ in range(3)]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that the step is no single trace
    found = losses(tfn.compile)
torch.testing.assert_close(found, losses(lambda f: f))
assert not [one for one in torch._dynamo.utils.get_compilation_metrics() if "thunder_fn/" in one.co_filename]
"""


def test_dynamo_compiles_nothing_of_ours_between_parts() -> None:
    """Autograd calls a backward of ours while Dynamo watches: `requires_grad_` of an argument parts the step."""
    done = subprocess.run([sys.executable, "-c", PARTS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def finished(waiting: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, without an event loop: a test before may have left one running in this thread."""
    try:
        while True:
            waiting.send(None)
    except StopIteration as end:
        return end.value


async def waits(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return x.sin() * 2


async def gives(x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    for scale in (1, 2):
        await asyncio.sleep(0)
        yield x * scale


async def collected(x: torch.Tensor) -> list[torch.Tensor]:
    return [one async for one in gives(x)]


class Waits(nn.Module):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        return await waits(x) + 1


def runs(x: torch.Tensor) -> torch.Tensor:
    return finished(waits(x)) if x.sum() > 0 else x


WAITING: dict[str, tuple[Any, bool]] = {
    "function": (waits, True),
    "partial": (functools.partial(waits), True),
    "generator": (collected, True),
    "module": (Waits(), True),
    "inside of a part": (runs, False),
}


@pytest.mark.parametrize("name", WAITING)
def test_coroutines_run_as_they_are(name: str) -> None:
    """Dynamo fails where a graph in a coroutine ends."""
    f, is_awaited = WAITING[name]
    compiled = tfn.compile(f)
    for x in (torch.ones(2), torch.ones(3), -torch.ones(2)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = compiled(x)
        found = finished(found) if is_awaited else found
        expected = finished(f(x)) if is_awaited else f(x)
        assert all(map(same, found, expected)) and len(found) == len(expected)
