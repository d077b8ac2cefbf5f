"""The bytecode of a function as expressions: its loads from outside of the frame, and their uses.

    def f(x):
        return x * cfg.lr + box["w"]

    reading(f.__code__).uses
    # ("global", "cfg"), ("attr", ("global", "cfg"), ("const", "lr")),
    # ("item", ("global", "box"), ("const", "w")), ...

One straight walk with a symbolic stack reads a code object. An unknown instruction pops and pushes
as `dis.stack_effect` says, and its result is unknown (None): a new Python costs precision and
nothing else. Locals have all sources assigned to them.
"""

from __future__ import annotations

import dis
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

Source: TypeAlias = tuple[Any, ...] | None
"""An expression, by kind; None where it is not understood.

    ("global", name), ("cell", name), ("local", name), ("const", value), ("code", code)
    ("attr", of, key)            of.key, and getattr
    ("item", of, key)            of[key], of.get(key), key in of
    ("each", of)                 any item of it, as a loop gets it
    ("any", sources)             one of several
    ("call", target, arguments)  the result of a call
    ("whole", of)                all that a container holds counts
    ("import", name, level, is_whole)  a module; its first package unless `is_whole`
    ("given", target, of)        an argument of a call
    ("before", place)            it is written here: the value that it had before counts
    ("counted", place)           it is written or deleted here, and its old value counts for nothing
    ("mutated", of)              it is changed in place, if it can be
    ("unless", target, source)   it counts unless the target is `constant`
    ("kinds", classes, of)       it is asked whether it is of one of these classes
"""

_NEW_NULL = sys.version_info >= (3, 13)  # the NULL beside a callee is pushed after it
_NEW_LOOP = sys.version_info >= (3, 12)
_PASS_ON = frozenset(
    [
        "enumerate",
        "zip",
        "reversed",
        "sorted",
        "list",
        "tuple",
        "iter",
        "set",
        "frozenset",
        "map",
        "filter",
        "next",
        "dict",
    ]
)
_VIEWS = frozenset(("items", "values", "keys", "copy"))
_KINDS = frozenset(("isinstance", "issubclass", "type", "id", "callable"))
"""Builtins that look at no content."""
_NO_CONTENT = frozenset(("const", "code", "before", "counted", "mutated"))
_OPERATOR: Source = ("call", ("const", None), ())  # the result of a method such as `__or__`
_ONLY_POP = (
    "POP_JUMP",
    "STORE_",
    "JUMP",
    "LIST_APPEND",
    "SET_ADD",
    "MAP_ADD",
    "LIST_EXTEND",
    "SET_UPDATE",
    "DICT_",
)
_NOTHING = frozenset(
    (
        "PRECALL",
        "KW_NAMES",
        "NOP",
        "RESUME",
        "CACHE",
        "EXTENDED_ARG",
        "MAKE_CELL",
        "COPY_FREE_VARS",
        "NOT_TAKEN",
    )
)
_BUILD = frozenset(("BUILD_LIST", "BUILD_TUPLE", "BUILD_SET"))


@dataclass(slots=True)
class Reading:
    """A code object: its expressions and their lines, the sources of locals and comprehensions, and
    the locals that are keys.

    `settled` are the expressions that depend on globals alone, and `open` all others. Those in
    `moving` may give other values at the end of a frame.
    """

    settled: dict[Source, int] = field(default_factory=dict[Source, int])
    open: dict[Source, int] = field(default_factory=dict[Source, int])
    moving: dict[Source, int] = field(default_factory=dict[Source, int])
    assigned: dict[str, set[Source]] = field(default_factory=dict[str, set[Source]])
    comprehensions: dict[types.CodeType, Source] = field(
        default_factory=dict[types.CodeType, Source]
    )
    keys: set[str] = field(default_factory=set[str])
    known: dict[Any, dict[Source, int]] = field(default_factory=dict[Any, dict[Source, int]])

    def live(self, names: frozenset[str], *, gives: bool, is_moving: bool) -> dict[Source, int]:
        """The open expressions that lead to more than plain data and tensors.

        Args:
            names: the locals whose values do.
            gives: some callee has returned such a value.
            is_moving: only those in `moving`.
        """
        key = names, gives, is_moving
        if key not in self.known:
            found, before = set(names), -1
            while before != len(found):
                before = len(found)
                found.update(
                    name
                    for name, sources in self.assigned.items()
                    if name not in found
                    and any(_is_live(source, found, gives) for source in sources)
                )
            of = self.moving if is_moving else self.open
            self.known[key] = {
                source: line
                for source, line in of.items()
                if _is_live(
                    source if source is None or source[0] != "call" else source[1], found, gives
                )
            }
        return self.known[key]


@lru_cache(maxsize=4096)
def reading(code: types.CodeType) -> Reading:
    """Read a code object."""
    reader = _Reader(code)
    for one in dis.get_instructions(code):
        reader.step(one)
    known: dict[Source, Node] = {}
    uses = {
        _node(source, known): reader.lines[source]
        for source, count in reader.uses.items()
        if count > 0
    }
    assigned = {
        name: {
            _node(source, known)
            for source in sources
            if source is not None and source[0] != "const"
        }
        for name, sources in reader.assigned.items()
    }
    comprehensions = {
        inner: _node(source, known) for inner, source in reader.comprehensions.items()
    }
    given = code.co_argcount + code.co_kwonlyargcount
    fixed = frozenset(code.co_varnames[:given]) - assigned.keys()
    settled = {source: line for source, line in uses.items() if _is_settled(source)}
    others = {source: line for source, line in uses.items() if source not in settled}
    moving = {source: line for source, line in others.items() if _is_moving(source, fixed)}
    return Reading(settled, others, moving, assigned, comprehensions, reader.keys)


class Node(tuple[Any, ...]):
    """An expression of a code object, which is there once: it is compared by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def _node(source: Any, known: dict[Any, Node]) -> Any:
    if not isinstance(source, tuple) or source[:1] == ("const",):
        return (
            source
            if not isinstance(source, tuple)
            else known.setdefault((source[0], type(source[1]), source[1]), Node(source))
        )
    if source not in known:
        is_source = bool(source) and isinstance(source[0], str)
        parts = [_node(part, known) if isinstance(part, tuple) else part for part in source]
        known[source] = Node(parts) if is_source else tuple(parts)  # type: ignore[assignment]
    return known[source]


class _Reader:
    """The symbolic stack, and the findings so far."""

    def __init__(self, code: types.CodeType) -> None:
        self.code, self.line = code, code.co_firstlineno
        self.uses: Counter[Source] = Counter()
        self.lines: dict[Source, int] = {}
        self.assigned: dict[str, set[Source]] = {}
        self.comprehensions: dict[types.CodeType, Source] = {}
        self.keys: set[str] = set()
        self.stack: list[Source] = []
        self.at: dict[int, list[Source]] = {}
        """The stack at the targets of jumps, by offset."""
        self.is_dead = False

    # ---- the stack ----

    def pop(self, count: int = 1) -> list[Source]:
        if count <= 0:
            return []
        found = self.stack[-count:]
        del self.stack[-count:]
        return [None] * (count - len(found)) + found

    def use(self, source: Source) -> None:
        self.uses[source] += 1
        self.lines.setdefault(source, self.line)

    def push(self, source: Source) -> None:
        """Push a loaded value."""
        self.stack.append(source)
        if source is not None and source[0] not in ("const", "local"):
            self.use(source)

    def end(self, *sources: Source) -> None:
        """End a value: its further use is not known, or takes all of it."""
        for source in sources:
            if source is not None and source[0] not in _NO_CONTENT:
                self.use(("whole", source))

    def merge(self, offset: int) -> None:
        """Merge at a target of jumps: a place of the stack may hold either of two values."""
        other = self.at.get(offset)
        if self.is_dead or other is None or len(other) != len(self.stack):
            self.stack = list(other if other is not None else [] if self.is_dead else self.stack)
        else:
            self.stack = [_either(a, b) for a, b in zip(other, self.stack, strict=True)]
        self.is_dead = False

    # ---- instructions ----

    def step(self, one: dis.Instruction) -> None:  # noqa: C901 - a branch for each kind of instruction
        if one.positions is not None and one.positions.lineno is not None:
            self.line = one.positions.lineno
        if one.is_jump_target or self.is_dead:
            self.merge(one.offset)
        op, arg, number = one.opname, one.argval, one.arg or 0
        if op in _NOTHING:
            return
        if op.startswith(("LOAD_", "STORE_")) and self.moved(op, arg, number):
            return
        match op:
            case "BINARY_SUBSCR":
                of, key = self.pop(2)
                self.push(self.item(of, key))
            case "CONTAINS_OP":
                key, of = self.pop(2)
                self.push(self.item(of, key))
                self.stack[-1] = None
            case "GET_ITER":
                self.end(*self.stack[-1:])
            case "FOR_ITER":
                self.at.setdefault(arg, [*self.stack, None] if _NEW_LOOP else self.stack[:-1])
                self.push(
                    ("each", self.stack[-1]) if self.stack and self.stack[-1] is not None else None
                )
            case "UNPACK_SEQUENCE":
                (of,) = self.pop()
                self.end(of)
                for _ in range(number):
                    self.push(None if of is None else ("each", of))
            case "UNPACK_EX":
                (of,) = self.pop()
                self.end(of)
                for _ in range((number & 255) + (number >> 8) + 1):
                    self.push(None if of is None else ("each", of))
            case "MAKE_FUNCTION":
                (of,) = self.pop()
                self.pop(0 if _NEW_NULL else number.bit_count())
                self.stack.append(("code", of[1]) if of is not None and of[0] == "const" else None)
            case "CALL" | "CALL_KW":
                self.pop(op == "CALL_KW")
                arguments, callee = (
                    self.pop(number),
                    [source for source in self.pop(2) if source is not None],
                )
                self.call(callee[0] if callee else None, [*callee[1:], *arguments])
            case "CALL_FUNCTION_EX":
                arguments = self.pop(1 + (number & 1))
                callee = [source for source in self.pop(2) if source is not None]
                self.call(callee[0] if callee else None, arguments, is_spread=True)
            case "BINARY_OP" if one.argrepr.endswith("="):
                left, right = self.pop(2)
                self.end(right)
                if left is not None and left[0] == "local":
                    self.use(("mutated", left))
                self.stack.append(None if left is None else ("inplace", left))
            case "SET_FUNCTION_ATTRIBUTE":
                del self.stack[-2:-1]
            case "BUILD_MAP" | "BUILD_CONST_KEY_MAP":
                items = [
                    source
                    for source in self.pop(2 * number if op == "BUILD_MAP" else number + 1)
                    if source
                ]
                self.stack.append(("any", tuple(items)) if items else None)
            case "BEFORE_WITH":
                (of,) = self.pop()
                self.stack.append(None)
                entering = None if of is None else ("attr", of, ("const", "__enter__"))
                if entering is not None:
                    self.use(entering)
                self.call(entering, [])
            case "IS_OP":
                self.pop(2)
                self.stack.append(None)
            case "IMPORT_NAME":
                level, names = self.pop(2)
                is_from = names is not None and names[1] is not None
                self.push(None if level is None else ("import", arg, level[1], is_from))
            case "IMPORT_FROM":
                of = self.stack[-1] if self.stack else None
                self.push(None if of is None else ("attr", of, ("const", arg)))
            case "COPY":
                self.stack.append(self.stack[-number] if len(self.stack) >= number else None)
            case "SWAP":
                if len(self.stack) >= number:
                    self.stack[-number], self.stack[-1] = self.stack[-1], self.stack[-number]
            case "MATCH_CLASS":
                subject, classes, names = self.pop(3)
                self.kinds(classes, subject)
                if subject is not None and names is not None and names[0] == "const":
                    for name in (*names[1], "__match_args__"):
                        self.use(("attr", subject, ("const", name)))
                self.end(subject)
                self.stack.append(None if subject is None else ("fields", subject))
            case _ if op in _BUILD:
                items = [source for source in self.pop(number) if source is not None]
                self.stack.append(("any", tuple(items)) if items else None)
            case _:
                self.other(one)
        if op in ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE") or op.startswith(
            "JUMP_"
        ):
            self.is_dead = op not in ("JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP")

    def moved(self, op: str, arg: Any, number: int) -> bool:  # noqa: C901 - a branch for each kind of instruction
        """Read loads and stores; False for instructions that are not known."""
        match op:
            case "LOAD_GLOBAL" | "LOAD_NAME":
                has_null = op == "LOAD_GLOBAL" and number & 1
                if has_null and not _NEW_NULL:
                    self.stack.append(None)
                self.push(("global", arg))
                if has_null and _NEW_NULL:
                    self.stack.append(None)
            case "LOAD_CLOSURE":
                self.stack.append(None)
            case "LOAD_DEREF" | "LOAD_CLASSDEREF" | "LOAD_FROM_DICT_OR_DEREF":
                self.push(("cell" if arg in self.code.co_freevars else "local", arg))
            case "LOAD_FAST" | "LOAD_FAST_CHECK" | "LOAD_FAST_AND_CLEAR" | "LOAD_FAST_BORROW":
                self.push(("local", arg))
            case "LOAD_FAST_LOAD_FAST" | "LOAD_FAST_BORROW_LOAD_FAST_BORROW":
                for name in arg:
                    self.push(("local", name))
            case "LOAD_CONST":
                self.stack.append(("const", arg))
            case "LOAD_ATTR" | "LOAD_METHOD":
                (of,) = self.pop()
                self.push(None if of is None else ("attr", of, ("const", arg)))
                if op == "LOAD_METHOD" or (_NEW_LOOP and number & 1):
                    self.stack.append(None)
            case "STORE_FAST":
                self.assigned.setdefault(arg, set()).add(self.pop()[0])
            case "STORE_FAST_LOAD_FAST":
                self.assigned.setdefault(arg[0], set()).add(self.pop()[0])
                self.push(("local", arg[1]))
            case "STORE_FAST_STORE_FAST":
                for name in arg:
                    self.assigned.setdefault(name, set()).add(self.pop()[0])
            case "STORE_DEREF" if arg not in self.code.co_freevars:
                self.assigned.setdefault(arg, set()).add(self.pop()[0])
            case "STORE_DEREF" | "STORE_GLOBAL":
                self.written(self.pop()[0], ("global" if op == "STORE_GLOBAL" else "cell", arg))
            case "STORE_ATTR":
                value, of = self.pop(2)
                self.written(value, ("attr", of, ("const", arg)))
            case "STORE_SUBSCR":
                value, of, key = self.pop(3)
                self.written(value, ("item", of, key))
            case "STORE_SLICE":
                value, of, *_ = self.pop(4)
                self.written(value, ("item", of, None))
            case "DELETE_SUBSCR":
                of, key = self.pop(2)
                self.use(("counted", ("item", of, key)))
            case "DELETE_ATTR":
                self.use(("counted", ("attr", *self.pop(1), ("const", arg))))
            case "DELETE_GLOBAL":
                self.use(("counted", ("global", arg)))
            case _:
                return False
        return True

    def written(self, value: Source, place: Source) -> None:
        """`holder.count += 1` is no read, since nothing else looks at the old value."""
        assert place is not None
        if value == ("inplace", place) and self.uses[place] > 0:
            self.uses[place] -= 1
            self.use(("counted", place))
        else:
            self.end(value)
            is_known = place[0] in ("global", "cell") or place[1] is not None
            self.use(("before" if is_known else "counted", place))

    def first_local(self) -> Source:
        return ("local", self.code.co_varnames[0]) if self.code.co_argcount else None

    def item(self, of: Source, key: Source) -> Source:
        if key is not None and key[0] == "local":
            self.keys.add(key[1])
        return None if of is None else ("item", of, key)

    def kinds(self, classes: Source, of: Source) -> None:
        """Read a question for the class of a value."""
        if classes is not None:
            self.use(("kinds", classes, of))

    def call(self, target: Source, arguments: list[Source], *, is_spread: bool = False) -> None:  # noqa: C901 - a branch for each kind of instruction
        """Read a call: builtins that read, those that hand their arguments on, and all others."""
        name = target[1] if target is not None and target[0] == "global" else None
        known = [source for source in arguments if source is not None]
        method = (
            target[2][1]
            if target is not None and target[0] == "attr" and target[2] is not None
            else None
        )
        if target is not None and target[0] == "code":
            if known:
                self.comprehensions[target[1]] = known[0]
            self.stack.append(("call", target, ()))
            return
        if name in ("getattr", "hasattr") and len(arguments) >= 2 and not is_spread:
            self.item(None, arguments[1])
            self.push(None if arguments[0] is None else ("attr", arguments[0], arguments[1]))
        elif method == "__getattribute__" and arguments and not is_spread:
            of = arguments[0] if len(arguments) > 1 else self.first_local()  # `super()` has it
            self.item(None, arguments[-1])
            self.push(None if of is None else ("attr", of, arguments[-1]))
        elif name == "vars" and known:
            self.push(("attr", known[0], ("const", "__dict__")))
        elif method in ("get", "getenv") and not is_spread:
            assert target is not None
            self.push(self.item(target[1], arguments[0] if arguments else None))
        elif name == "setattr" and len(arguments) >= 3 and arguments[0] is not None:
            self.item(None, arguments[1])
            self.written(arguments[2], ("attr", arguments[0], arguments[1]))
            self.stack.append(None)
        elif name in _KINDS:
            for source in known:
                if source[0] not in _NO_CONTENT:
                    self.use(("attr", source, ("const", "__class__")))
            if name == "callable" and known:
                self.use(("attr", known[0], ("const", "__call__")))
            elif name in ("isinstance", "issubclass") and len(arguments) == 2:
                self.kinds(arguments[1], arguments[0])
            self.stack.append(None)
        elif "constant" in (name, method):
            for source in {
                part: None for one in known for part in _parts(one) if self.uses[part] > 0
            }:
                self.uses[source] -= 1
                self.use(("unless", target, source))
            for source in known:
                self.use(("unless", target, ("whole", source)))
                self.use(("unless", target, ("given", target, source)))
            self.stack.append(("call", target, ()))
        else:
            self.end(*known)
            if name in _PASS_ON and known:
                self.stack.append(("any", tuple(known)))
                return
            for source in known:
                if source[0] not in _NO_CONTENT:
                    self.use(("given", target, source))
            if method in _VIEWS and not known:
                assert target is not None
                self.stack.append(target[1])
            else:
                self.stack.append(None if target is None else ("call", target, tuple(arguments)))
                if target is not None:
                    self.use(self.stack[-1])

    def other(self, one: dis.Instruction) -> None:
        """Skip an unknown instruction, by its effect on the stack."""
        jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
        effect = dis.stack_effect(one.opcode, one.arg, jump=False)
        if jumps:
            after = dis.stack_effect(one.opcode, one.arg, jump=True)
            self.at.setdefault(
                one.argval, [*self.stack, *[None] * after] if after >= 0 else self.stack[:after]
            )
        if one.opname in ("POP_TOP", "RETURN_VALUE") or one.opname.startswith(_ONLY_POP):
            if effect < 0:
                self.end(*self.pop(-effect))
        elif effect < 0:
            self.end(*self.pop(1 - effect))
            self.stack.append(_OPERATOR if one.opname in ("BINARY_OP", "COMPARE_OP") else None)
        elif effect == 0 and self.stack and not jumps:
            self.end(*self.pop())
            self.stack.append(None)
        else:
            self.stack += [None] * effect


def _either(a: Source, b: Source) -> Source:
    if a == b or a is None or b is None:
        return b if a is None else a
    return "any", (a, b)


def _is_moving(source: Any, fixed: frozenset[str]) -> bool:
    """Test whether an expression may give another value at the end of a frame: it depends on calls,
    or on bound locals.
    """
    if not isinstance(source, tuple) or not source or source[0] == "const":
        return False
    if source[0] == "local":
        return source[1] not in fixed
    return source[0] in ("call", "import") or any(_is_moving(part, fixed) for part in source)


def _is_settled(source: Any) -> bool:
    """Test whether an expression depends on globals and constants alone."""
    if not isinstance(source, tuple) or not source or source[0] == "const":
        return True
    return source[0] not in ("local", "cell", "call", "before", "counted", "import") and all(
        map(_is_settled, source)
    )


def _is_live(source: Any, names: set[str], gives: bool) -> bool:
    """Test whether an expression may lead to more than plain data and tensors, where of all
    locals these do.
    """
    match source:
        case None | ("const" | "code", *_):
            return False
        case ("global" | "cell" | "import", *_):
            return True
        case ("local", name):
            return name in names
        case ("any", parts):
            return any(_is_live(part, names, gives) for part in parts)
        case ("call", target, arguments):  # a question has fixed arguments, or none
            is_fixed = all(one is not None and one[0] == "const" for one in arguments)
            return gives or (is_fixed and _is_live(target, names, gives))
        case ("counted", (_, None, *_)):
            return True
        case (
            "before"
            | "counted"
            | "mutated"
            | "attr"
            | "item"
            | "each"
            | "whole"
            | "fields"
            | "inplace"
            | "kinds",
            of,
            *_,
        ):
            return _is_live(of, names, gives)
        case _:  # "given" and "unless"
            return _is_live(source[2], names, gives)


def _parts(source: Source) -> Iterator[Source]:
    """An expression and those in it, outermost first."""
    if source is None or source[0] in ("const", "local"):
        return
    yield source
    for part in source[1:]:
        if isinstance(part, tuple) and part and isinstance(part[0], str):
            yield from _parts(part)


@lru_cache(maxsize=4096)
def text(source: Source) -> str:
    """An expression as a user would write it."""
    match source:
        case ("global" | "cell" | "local" | "import", name, *_):
            return str(name)
        case ("const", value):
            return repr(value)
        case ("attr", of, ("const", name)):
            return f"{text(of)}.{name}"
        case ("item", of, key):
            return f"{text(of)}[{text(key)}]"
        case ("call", target, _):
            return f"{text(target)}(...)"
        case ("whole" | "each" | "fields", of):
            return text(of)
        case ("given", _, of):
            return text(of)
        case _:
            return "..."
