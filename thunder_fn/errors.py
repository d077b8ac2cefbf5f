"""The exceptions and warnings of thunder_fn.

An error says what happened, in which equation, at which user line, and what to write instead. Each
is a subclass of `ThunderError`, and of what PyTorch raises in the same case, so that code which
catches that goes on to. Each has a page with an example. The last line of a traceback has the
command that prints it, which needs no checkout.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeGuard, TypeVar

from thunder_fn.arguments import misfit
from thunder_fn.lines import calling_frame

if TYPE_CHECKING:
    from thunder_fn.ir.trace import Source


LINK = "Docs: "


class Located(str):
    """A text that `located` laid out, and its parts."""

    parts: tuple[str, str | None, Source | str | None, str | None]


class ThunderError(Exception):
    """Base class of all errors of thunder_fn.

    Its text names a line of the user's: the origin of what went wrong if it is known, else that
    of the equation that an interpreter was at, else the call of this package.
    """

    _equation: str | None = None
    _source: str | None = None
    _fix: str | None = None
    _is_located: bool = True
    is_eager: bool = False
    """A trace cannot hold what the call needs, and eager PyTorch can."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """The error with a note that names its page: tracebacks show it, `str(error)` is the
        message alone.
        """
        try:
            error = super().__new__(cls, *args, **kwargs)
        except TypeError:  # of MemoryError, whose own is for its own instances alone
            error = Exception.__new__(cls, *args, **kwargs)
        error.add_note(f"{LINK}{link_to(page_of(cls))}")
        return error

    def __init__(
        self,
        *args: object,
        equation: str | None = None,
        source: Source | str | None = None,
        fix: str | None = None,
    ) -> None:
        """Keep the parts of the text: see `located`, whose text may be given in their place."""
        if args and isinstance(args[0], Located):
            (what, equation, source, fix), args = args[0].parts, args[1:]
            args = (what, *args)
        super().__init__(*args)
        self._equation, self._fix = equation, fix
        self._source = None if source is None else str(source)
        self._is_located = source is not None
        if source is None and (frame := calling_frame()) is not None:
            code = frame.f_code
            self._source = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"

    @property
    def is_refusal(self) -> bool:
        """True: the function has not run. False where the user's own code raised."""
        return True

    @property
    def what(self) -> str:
        """The message without the places and the fix."""
        return super().__str__()

    def locate(self, source: Source | None) -> None:
        """Take a line of the user's for the origin of an error that names none."""
        if source is not None and not self._is_located:
            self._source, self._is_located = str(source), True

    def __str__(self) -> str:
        return located(self.what, equation=self._equation, source=self._source, fix=self._fix)

    def without_call(self) -> str:
        """The text, without a line that only says where this package was called."""
        if self._is_located:
            return str(self)
        return located(self.what, equation=self._equation, fix=self._fix)


class TraceTypeError(ThunderError, TypeError, ValueError, RuntimeError):
    """The types of values or equations disagree. Look at the two types that the message names."""


class InvalidTrace(ThunderError, ValueError):
    """A trace breaks a rule of its grammar (see `thunder_fn.ir.trace`). The interpreter that built
    it has a bug. Or a custom op was
    defined anew with another schema after the trace or its program was made.
    """


class MissingRule(ThunderError, NotImplementedError):
    """An interpreter has no rule for an op. Decompose the op, or register a rule for it."""


class CaptureError(ThunderError):
    """A function could not be turned into a trace."""


class UnsupportedInput(CaptureError, TypeError, ValueError, RuntimeError):
    """An argument is neither a tensor nor a value that can be baked in. Convert it, or close
    over it.
    """


class UnsupportedOutput(CaptureError, TypeError, ValueError, RuntimeError):
    """A traced function returned a value that a program cannot return."""


class DataDependentBranch(CaptureError, TypeError, RuntimeError):
    """Python asked for the truth of a traced tensor. Use `torch.where` or `cond`."""


class DataDependentValue(CaptureError, TypeError, RuntimeError):
    """Python asked for values of a traced tensor that must be known while tracing, such as
    `complex(x)`. Keep them in a tensor.
    """


class DataDependentShape(CaptureError, TypeError, RuntimeError):
    """The shape of a result depends on the values of its inputs. Use an op with a static shape,
    such as `torch.where`.
    """


class EscapedTracer(CaptureError, RuntimeError):
    """A tracer outlived the function that was being traced. Return it from the function instead
    of storing it.
    """


class UnsupportedCall(CaptureError, NotImplementedError):
    """The traced function called something that cannot be part of a trace. The message says what
    to call instead.
    """


class AliasedMutation(CaptureError, ValueError, RuntimeError):
    """The function changes a tensor in place whose memory is also reached through another
    argument or closure.
    """


class TracedFunctionError(CaptureError):
    """The user's function raised while it was traced. It is an instance of the original
    exception's type too.
    """

    message: str = ""

    @property
    def is_refusal(self) -> bool:
        """False: what the function did until it raised, it has done."""
        return False

    def __str__(self) -> str:
        return self.message or self.what


class LookasideError(CaptureError, TypeError):
    """A lookaside was given something other than a function."""


class GradError(ThunderError, RuntimeError):
    """Base class of misuse of the derivatives."""


class NonScalarLoss(GradError, TypeError):
    """`grad` needs a function that returns one real number. Reduce the result, or use `vjp` or
    `jacrev`.
    """


class ArgnumError(GradError, ValueError):
    """An argnum points at no argument."""


class NotDifferentiable(GradError, TypeError, ValueError):
    """An integer or boolean input was to be differentiated. Cast it to a floating dtype, or
    leave it out of argnums.
    """


class CotangentError(GradError, TypeError):
    """A cotangent's structure, shape or dtype differs from the output that it belongs to."""


class TangentError(GradError, TypeError):
    """A tangent's structure, shape or dtype differs from the primal that it belongs to."""


class VmapError(ThunderError, ValueError, RuntimeError):
    """The in_dims or out_dims of vmap do not fit, sizes differ, or random numbers need a choice
    of `randomness`.
    """


class AutocastError(ThunderError, ValueError, RuntimeError):
    """The dtype of autocast is not a floating dtype, or its policy returned an invalid answer."""


class CheckpointError(ThunderError, ValueError, RuntimeError):
    """The checkpoint policy is not a policy, or it returned an invalid decision."""


class CustomRuleError(ThunderError, TypeError, RuntimeError):
    """A custom rule is missing, or returned something that does not fit its function."""


class RewriteError(ThunderError, TypeError):
    """Rewrites do not fit, a scheme is unknown, or parameters were prepared by another
    transform.
    """


class DistributedError(ThunderError, RuntimeError):
    """A collective failed: a rank died, or did not take part in time."""


class JitError(ThunderError):
    """Base class of misuse of jit."""


class TraitError(JitError, ValueError):
    """Traits of transforms or executors contradict each other: leave one of them out."""


class RecipeError(ThunderError, ValueError):
    """A recipe is changed after it was made, says two things at once, or returns what it should
    not.
    """


class OptimizerError(ThunderError, TypeError, ValueError):
    """An optimizer has no such option, or it was given something else than parameters, gradients
    and its state.
    """


class UnknownOption(JitError, TypeError):
    """A function was given an unknown option. One of JAX or PyTorch may have another name here."""


class UnhashableStatic(JitError, TypeError):
    """A static argument has no hash. Make it a tuple or a frozen dataclass."""


class DonatedTensorError(JitError, RuntimeError):
    """A donated tensor was used after it was given away, or was passed twice."""


class ExecutorError(ThunderError, TypeError):
    """An executor was given an unknown op, a rule that does not fit its op, or a name that is
    taken.
    """


class VerificationError(ThunderError, ArithmeticError):
    """A program's result differs from that of its trace by more than its executors' labels
    allow.
    """


class CheckFailed(ThunderError, RuntimeError):
    """A check of `check_errors` failed in a call, and the error that it found was thrown."""


class PortableError(ThunderError, ValueError):
    """A program cannot be written as data or exported, or a file is not a program that can be
    loaded.
    """


class MissingExtra(ThunderError, ImportError):
    """An optional package is not installed. The message names the extra that brings it."""


class InspectError(ThunderError, ValueError):
    """The inspector was asked for something unknown. The message names the known values."""


class GraphBreakWarning(UserWarning):
    """A model or function is no single trace: it decides on values while it runs, say. Say which
    frontend is meant.
    """


class HostRandomWarning(UserWarning):
    """A program has numbers of Python's or NumPy's random generator as constants. Draw them with
    PyTorch, or pass them.
    """


class CacheWarning(UserWarning):
    """Compiled code on disk is left alone, since somebody else may have written it."""


class RegionWarning(UserWarning):
    """An executor could not compile a region or record a program, which runs on the torch executor
    instead; or an executor that was asked for takes nothing of a program.
    """


class OutsideWarning(UserWarning):
    """A program has a value from outside as a constant, since no guard can look at it. Pass it,
    or write `constant`.
    """


class HooksWarning(UserWarning):
    """A jitted module has a submodule whose hooks no trace has, so it runs as the module does."""


P = ParamSpec("P")
R = TypeVar("R")


OF_F = ("fun", "func", "fn", "function")
"""Keywords for the transformed function in JAX and PyTorch."""


class spelled:
    """A decorator that says of keywords which a function has elsewhere, in JAX or PyTorch, how they
    are written here.

    Args:
        elsewhere: for each keyword the fix. A single word is the keyword's name here.

    The keyword of the function that is transformed is known without being listed: where it is `f`
    here, it is `fun` in JAX and `func` in torch.func. A slip of the pen is taken for the nearest
    keyword. `too_many` is the fix for a call with too many positional arguments. An error that says
    nothing of this package names the argument that is not of its annotated type, if one is.
    """

    def __init__(self, too_many: str = "", /, **elsewhere: str) -> None:
        self.too_many, self.elsewhere = too_many, elsewhere

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        code = inspect.unwrap(function).__code__
        first = (
            code.co_posonlyargcount
        )  # another keyword for `f` is one of the user's where f has none
        takes_f = "f" in code.co_varnames[first : min(2, code.co_argcount)]
        known = (dict.fromkeys(OF_F, "f") if takes_f else {}) | self.elsewhere
        error, kind, own = misspelled, type, function.__qualname__
        taken = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        takes_any, meant = bool(code.co_flags & inspect.CO_VARKEYWORDS), nearest
        most = sys.maxsize if code.co_flags & inspect.CO_VARARGS else code.co_argcount
        excess, positional = self._excess, code.co_varnames[: code.co_argcount]
        options = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
        raw, ours, told = Exception, ThunderError, not_of_its_type

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > most:
                raise excess(positional, options, args, own)
            for name in kwargs:
                if name in taken:
                    continue
                near = name if name in known or takes_any else meant(name, (*taken, *known))
                if near in known or near in taken:
                    of = kind(args[0]).__name__ if own.endswith("__init__") else own
                    raise error(of, name, known.get(near, near))
            try:
                return function(*args, **kwargs)
            except raw as raised:
                named = None if isinstance(raised, ours) else told(function, args, kwargs)
                if named is None:
                    raise
                raise named from raised

        # of the function's own module, where doctest looks for it
        made = types.FunctionType(
            call.__code__, function.__globals__, call.__name__, None, call.__closure__
        )
        return functools.update_wrapper(made, function)  # type: ignore[return-value]

    def _excess(
        self, names: Sequence[str], options: Sequence[str], args: Sequence[Any], own: str
    ) -> UnknownOption:
        """The error for too many positional arguments."""
        if own.endswith("__init__"):
            own, names, args = type(args[0]).__name__, names[1:], args[1:]
        fix = self.too_many or (
            f"Write options by name: {', '.join(options)}." if options else None
        )
        takes = f"takes {counted(len(names), 'positional argument')} ({', '.join(names)})"
        return UnknownOption(f"{own}: {takes}, given {len(args)}", fix=fix)


def not_of_its_type(function: Callable[..., Any], args: Any, kwargs: Any) -> TraceTypeError | None:
    """The error for a call that failed by an argument which is not of its annotated type."""
    found = misfit(function, args, kwargs)
    return None if found is None else TraceTypeError(found[0], fix=found[1])


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of the names that differs little; empty where none does."""
    return next(iter(difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.7)), "")


def misspelled(function: str, name: str, fix: str) -> UnknownOption:
    """The error for a keyword that is another one here."""
    is_name = fix.isidentifier()
    what = f"{function}: unknown option {name!r}" + (
        f", which is called `{fix}` here" if is_name else ""
    )
    return UnknownOption(what, fix=f"Write `{fix}=` for it." if is_name else fix)


def page_of(kind: type[BaseException]) -> str:
    """Name the page about a class of this module, or about the nearest base of a subclass made
    elsewhere.
    """
    return next(base.__name__ for base in kind.__mro__ if base.__module__ == __name__)


def link_to(page: str) -> str:
    """The command that prints a page, and its address where the package's metadata has one."""
    command = f"python -m thunder_fn explain {page}"
    return command if site() is None else f"{command}, or {site()}/errors/{page}.html"


@functools.cache
def site() -> str | None:
    """The address of the documentation in the metadata of the installed package: its URL named
    Documentation.
    """
    try:
        urls: list[str] = importlib.metadata.metadata("thunder_fn").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    labelled = (url.partition(", ") for url in urls)
    return next(
        (address.rstrip("/") for label, _, address in labelled if label == "Documentation"), None
    )


def has_note(error: BaseException) -> bool:
    """Test whether an exception already says where it comes from; the link to its page does not
    count.
    """
    return any(not note.startswith(LINK) for note in getattr(error, "__notes__", ()))


_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def escaped(text: str) -> str:
    r"""The text in one line, which any file and terminal takes: `\n` for a line break, and so on.

    Example:
        >>> escaped("a\nb")
        'a\\nb'
    """
    return _UNPRINTABLE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode()


def located(
    what: str,
    *,
    equation: str | None = None,
    source: Source | str | None = None,
    fix: str | None = None,
) -> Located:
    """Lay out an error text: what happened, the equation, the user's line, what to write
    instead.
    """
    lines = [what]
    if equation is not None:
        lines.append(f"in equation:  {equation}")
    if source is not None:
        lines.append(f"from:         {escaped(str(source))}")
    if fix is not None:
        lines.append(fix)
    text = Located("\n".join(lines))
    text.parts = what, equation, source, fix
    return text


def with_article(noun: object) -> str:
    """A noun as one says it: "a list", "an int", and of types "an f32[2]", "a u8[]"."""
    text = str(noun)
    is_vowel = text[:1] in "aeioAEIO" or (text[:1] == "f" and text[1:2].isdigit())
    return f"an {text}" if is_vowel else f"a {text}"


def counted(number: int, noun: str) -> str:
    """A number of things: "1 input", "2 inputs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def callable_name(function: Any) -> str:
    """Name a function, a class or a callable object, in one line."""
    return escaped(str(getattr(function, "__name__", type(function).__name__)))


def kind_of(value: object) -> str:
    """Name the kind of a value: "an int", "a list", "None"."""
    return "None" if value is None else with_article(escaped(type(value).__name__))


def is_int(value: object, least: int | None = None) -> TypeGuard[int]:
    """Test for an int that is no bool, and not less than `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return least is None or value >= least
