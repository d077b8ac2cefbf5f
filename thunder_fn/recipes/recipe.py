"""Recipes: the needs of a model, to be traced and run well, in one value that works for many
models.

    class Mine(Recipe):
        def __init__(self, fast: bool = False):
            self.fast = fast

        def validate(self, model):
            if not isinstance(model, MyModel):
                raise ValueError("this recipe is for MyModel")

        def setup_executors(self):
            return ("inductor",) if self.fast else ()

A recipe answers questions and changes nothing. Recipes add up: ``a + b`` answers with the parts of
a and then those of b. Order among transforms and executors follows from their traits
(`thunder_fn.jitted.transforms`).

`a + b` is a flat tuple of parts, which makes addition associative. Recipes are frozen after
`__init__`, so one object serves many models.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final, get_args

import torch

from thunder_fn.capture.replaced.lookasides import Lookaside, same_function
from thunder_fn.errors import RecipeError, UnknownOption, kind_of, misspelled
from thunder_fn.executors import Executor, inductor
from thunder_fn.executors.registry import resolve_executors
from thunder_fn.jitted import Options
from thunder_fn.jitted.options import ELSEWHERE, Config as Config, unknown
from thunder_fn.jitted.transforms import Transform, as_transform, in_order
from thunder_fn.recipes.captured import GRAPHS
from thunder_fn.recipes.explaining import explain, name_of
from thunder_fn.recipes.questions import Frontend as Frontend, answer, check_names, sequence

Model = Callable[..., Any]
ADDED = ("transforms", "executors", "operators", "lookasides", "frontend")
"""Arguments of `with_` and `compile` beside options of `jit`."""
_ELSEWHERE = {
    **ELSEWHERE,
    "fullgraph": "Leave it out: `tfn.jit` raises if a function is not one graph.",
}


class _MadeOnce(ABCMeta):
    """Instances do not change once their `__init__` is done. Of ABCMeta, so that a recipe may be
    abstract or generic.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Recipe and (args or kwargs):
            given = next(iter(kwargs), None)
            what = "Recipe takes no arguments" + (f", given {given!r}" if given else "")
            fix = (
                "Write a class: `class Mine(Recipe)` with the methods that answer, such as"
                " `executors`, and options in its `__init__`."
            )
            raise RecipeError(what, fix=fix)
        made = super().__call__(*args, **kwargs)
        object.__setattr__(made, "_is_made", True)
        return made


class Recipe(metaclass=_MadeOnce):
    """The needs of a model. Override the questions that have an answer; attributes set in
    `__init__` configure them.

    Laws: addition is associative, and `Recipe()` is neutral. A recipe is equal to one of its class
        with equal attributes.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> class InInductor(Recipe):
        ...     def executors(self):
        ...         return ["inductor"]
        >>> Recipe() + Recipe() == Recipe()
        True
    """

    name: ClassVar[str] = ""
    """The name for `compile(model, recipe="...")` and `recipes.list()`."""
    models: ClassVar[tuple[str, ...]] = ()
    """Classes that `recipe="auto"` chooses it for, as "package.Class", or "package.*";
    subclasses are meant too.
    """
    frontend: Frontend | None = None
    """The way from a model to traces: "direct" capture, as one trace, or "dynamo", which breaks
    graphs where it must.

    None leaves it open: direct, and dynamo for what turns out to be no single trace.
    """

    def validate(self, model: Model) -> None:
        """Raise, with the reason, if the recipe is not for this model."""

    def setup_operators(self) -> Sequence[Executor]:
        """Executors with operators of the recipe's own. They are asked before all others."""
        return ()

    def setup_lookasides(self) -> Sequence[Lookaside]:
        """Functions that are diverted while the model is traced."""
        return ()

    def setup_transforms(self) -> Sequence[Transform | Callable[..., Any]]:
        """Transforms of the trace, or of the model."""
        return ()

    def setup_executors(self) -> Sequence[Executor | str]:
        """Executors, in order of priority where traits do not say otherwise."""
        return ()

    def setup_config(self) -> Config:
        """Options of `jit`."""
        return {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_names(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_unmade()
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self._check_unmade()
        object.__delattr__(self, name)

    def _check_unmade(self) -> None:
        if getattr(self, "_is_made", False):
            raise RecipeError(
                f"{self!r} does not change once it is made, since it may serve many models\n"
                "Make another one, or add to it with `+` and `with_`."
            )

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), tuple(sorted(vars(self)))))

    def __repr__(self) -> str:
        own = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        options = ", ".join(f"{name}={value!r}" for name, value in own.items())
        return f"{type(self).__name__}({options})"

    def __add__(self, other: Any) -> Recipe:
        if not isinstance(other, Recipe):
            return NotImplemented
        parts = (*parts_of(self), *parts_of(other))
        return (parts[0] if len(parts) == 1 else Combined(parts)) if parts else Recipe()

    def with_(
        self,
        *,
        transforms: Sequence[Transform | Callable[..., Any]] | Transform | Callable[..., Any] = (),
        executors: Sequence[Executor | str] | Executor | str = (),
        operators: Sequence[Executor] | Executor = (),
        lookasides: Sequence[Lookaside] | Lookaside = (),
        frontend: Frontend | None = None,
        **config: Any,
    ) -> Recipe:
        """Add to this recipe without a class of its own. `config` and `frontend` given here
        overrule the recipe's.

        Raises:
            UnknownOption: there is no such option; names the nearest one.
        """
        for name in config:
            if name not in Config.__annotations__:
                if name in _ELSEWHERE:
                    raise misspelled("compile", name, _ELSEWHERE[name])
                raise UnknownOption(
                    unknown("compile", "option", name, (*ADDED, *Config.__annotations__))
                )
        given = map(_several, (transforms, executors, operators, lookasides))
        return self + Addition(*given, frontend, tuple(config.items()))

    @final
    def assemble(self, model: Model) -> Assembly:
        """Validate and order all answers. Override the questions, not this method.

        Raises:
            TraitError: transforms or executors contradict each other; names both.
            RecipeError: two recipes want different frontends or options, or one returns what it
                should not.
            UnknownOption: `setup_config` has a flag that there is not.
        """
        return assemble(self, model)

    @final
    def explain(self, model: Model) -> str:
        """Explain the steps of `compile` with the model, in order and with reasons, as text."""
        return explain(self.assemble(model))


class Combined(Recipe):
    """Recipes one after the other. Made by `+`."""

    def __init__(self, parts: tuple[Recipe, ...]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


class Addition(Recipe):
    """An inline addition to a recipe. Made by `with_`."""

    def __init__(
        self,
        transforms: tuple[Any, ...],
        executors: tuple[Any, ...],
        operators: tuple[Any, ...],
        lookasides: tuple[Any, ...],
        frontend: Frontend | None,
        config: tuple[tuple[str, Any], ...],
    ) -> None:
        self.transforms = transforms
        self.executors = executors
        self.operators = operators
        self.lookasides = lookasides
        self.frontend, self.config = frontend, config

    def setup_operators(self) -> Sequence[Executor]:
        """Return the given ones."""
        return self.operators

    def setup_lookasides(self) -> Sequence[Lookaside]:
        """Return the given ones."""
        return self.lookasides

    def setup_transforms(self) -> Sequence[Any]:
        """Return the given ones."""
        return self.transforms

    def setup_executors(self) -> Sequence[Any]:
        """Return the given ones."""
        return self.executors

    def setup_config(self) -> Config:
        """Return the given options."""
        return dict(self.config)  # type: ignore[return-value]

    def __repr__(self) -> str:
        fields = {
            key: value for key, value in vars(self).items() if isinstance(value, tuple) and value
        }
        texts = [
            f"{key}=[{', '.join(map(_short, value))}]"
            for key, value in fields.items()
            if key != "config"
        ]
        texts += [f"frontend={self.frontend!r}"] if self.frontend else []
        return f"with_({', '.join([*texts, *(f'{key}={value!r}' for key, value in self.config)])})"


def _several(given: Any) -> tuple[Any, ...]:
    """One thing, a sequence of them, or None."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)


def _short(value: Any) -> str:
    """A transform, executor or lookaside by name."""
    named = getattr(value, "name", None) or getattr(getattr(value, "fn", value), "__name__", None)
    return named if isinstance(named, str) else repr(value)


def parts_of(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipes that a sum is made of; none where nothing is said."""
    if isinstance(recipe, Combined):
        return recipe.parts
    says_nothing = type(recipe) is Recipe or (isinstance(recipe, Addition) and not _said(recipe))
    return () if says_nothing else (recipe,)


def _said(addition: Addition) -> bool:
    return any(value for name, value in vars(addition).items() if not name.startswith("_"))


# ---- the final step ----


@dataclass(frozen=True, slots=True)
class Assembly:
    """The work of `compile`: transforms of the model, then the frontend, then jit with these
    options.

    `origins` says which recipe each part is from.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> found = tfn.recipes.Default().assemble(torch.nn.Linear(2, 2))
        >>> type(found).__name__
        'Assembly'
    """

    transforms: tuple[Transform, ...]
    executors: tuple[Executor, ...]
    lookasides: tuple[Lookaside, ...]
    frontend: Frontend | None
    config: tuple[tuple[str, Any], ...]
    recipes: tuple[Recipe, ...]
    origins: Mapping[Any, str]

    @property
    def on_model(self) -> tuple[Transform, ...]:
        """Transforms of the model."""
        return tuple(one for one in self.transforms if one.on == "model")

    @property
    def on_compiled(self) -> tuple[Transform, ...]:
        """Transforms of what `compile` returns."""
        return tuple(one for one in self.transforms if one.on == "compiled")

    @property
    def options(self) -> dict[str, Any]:
        """The options for `jit`."""
        on_trace = tuple(one for one in self.transforms if one.on == "trace")
        return {
            "executors": self.executors,
            "transforms": on_trace,
            "lookasides": self.lookasides,
            **dict(self.config),
        }


@functools.cache
def _tiered() -> Executor:
    """Inductor, which lets PyTorch's ops run until another process has compiled the program."""
    made = inductor(tiered=True)
    made.again = _tiered
    return made


def machine_executors() -> tuple[Executor, ...]:
    """The fastest executors that run here. They come after those that recipes ask for."""
    compilers = (_tiered(),) if shutil.which(os.environ.get("CXX", "g++")) else ()
    return (*compilers, GRAPHS) if torch.cuda.is_available() else compilers


def assemble(recipe: Recipe, model: Model) -> Assembly:
    """Ask every part, and put the answers in order."""
    parts, origins = parts_of(recipe), dict[Any, str]()
    for part in parts:
        said: Any = part.validate(model)
        if said is False:
            fix = "Let it raise an error that says why."
            raise RecipeError(f"{part!r}: validate returned False for {kind_of(model)}", fix=fix)

    def asked(question: str, read: Callable[[Sequence[Any]], Sequence[Any]] = tuple) -> list[Any]:
        found = list[Any]()
        for part in parts:
            said = read(sequence(part, question))
            origins.update((id(one), repr(part)) for one in said)
            found += said
        return found

    transforms = asked("setup_transforms", lambda given: [as_transform(one) for one in given])
    read = lambda given: resolve_executors(tuple(given), "recipe") if given else ()
    executors = [*asked("setup_operators", read), *asked("setup_executors", read)]
    executors += [
        one for one in machine_executors() if one.name not in {other.name for other in executors}
    ]
    assembly = Assembly(
        in_order(transforms),
        in_order(resolve_executors(executors), "executor"),
        _lookasides(parts),
        _frontend(parts),
        tuple(_config(parts).items()),
        parts,
        origins,
    )
    options = Options().changed(assembly.options)
    dataclasses.replace(options, transforms=assembly.transforms).check_transforms()
    return assembly


def _lookasides(parts: Sequence[Recipe]) -> tuple[Lookaside, ...]:
    said: dict[Any, list[tuple[Recipe, Lookaside]]] = {}
    for part in parts:
        for one in sequence(part, "setup_lookasides"):
            if not isinstance(one, Lookaside):
                raise RecipeError(
                    f"{part!r}: setup_lookasides returns `Lookaside`s, not {kind_of(one)}"
                )
            said.setdefault(one.fn, []).append((part, one))
    return tuple(
        _settled(
            given,
            lambda one: f"diverts {name_of(one.fn)} to {name_of(one.replace_with)}",
            fix="Say which one: `(a + b).with_(lookasides=[...])`.",
            key=lambda one: same_function(one.replace_with),
        )
        for given in said.values()
    )


def _frontend(parts: Sequence[Recipe]) -> Frontend | None:
    said = [(part, part.frontend) for part in parts if part.frontend is not None]
    for part, frontend in said:
        if frontend not in get_args(Frontend):
            raise RecipeError(f"{part!r}: the frontend is 'direct' or 'dynamo', not {frontend!r}")
    fix = "Say which one: `(a + b).with_(frontend=...)`."
    return (
        _settled(said, lambda frontend: f"wants the frontend {frontend!r}", fix) if said else None
    )


def _config(parts: Sequence[Recipe]) -> dict[str, Any]:
    said: dict[str, list[tuple[Recipe, Any]]] = {}
    known = Config.__annotations__
    for part in parts:
        options: Any = answer(part, "setup_config") or {}
        if not isinstance(options, Mapping):
            raise RecipeError(
                f"{part!r}: setup_config returns a dict of options, not {kind_of(options)}"
            )
        for name, value in options.items():
            if name not in known:
                raise UnknownOption(
                    f"{part!r}: setup_config has {name!r}; a recipe may set {', '.join(known)}"
                )
            said.setdefault(name, []).append((part, value))
    return {
        name: _settled(
            values,
            lambda value, name=name: f"sets {name}={value!r}",
            fix=f"Say which one: `(a + b).with_({name}=...)`.",
        )
        for name, values in said.items()
    }


def _settled(
    said: Sequence[tuple[Recipe, Any]],
    describe: Callable[[Any], str],
    fix: str,
    key: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Reconcile what several recipes say of one thing: all the same by its key, or the last one
    said with `with_`.
    """
    last = max((i for i, (part, _) in enumerate(said) if isinstance(part, Addition)), default=0)
    (first, value), *others = said[last:]
    for other, differs in others:
        if key(differs) != key(value):
            raise RecipeError(
                f"{first!r} {describe(value)}, {other!r} {describe(differs)}", fix=fix
            )
    return value
