"""A reader of bytecode: one straight walk with a symbolic stack gives a function's expressions.

Each instruction has a rule, and so has each callable that is known by its name. An instruction
without a rule pops and pushes as `dis.stack_effect` says, and its result is unknown (None): a new
Python costs precision and nothing else. Locals have all sources assigned to them.
"""

from __future__ import annotations

import dis
import itertools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from thunder_fn.capture.instructions import instructions
from thunder_fn.capture.outside.expressions import (
    Reading,
    Source,
    Span,
    is_moving,
    is_of_python,
    is_settled,
    parts_of,
    shared,
)
from thunder_fn.capture.outside.lists import Lists, is_taken, parts_through

_NEW_NULL = sys.version_info >= (3, 13)  # the NULL beside a callee is pushed after it
_NEW_LOOP = sys.version_info >= (3, 12)  # and comprehensions have no frame of their own
_NO_CONTENT = frozenset(("const", "code", "before", "counted", "augmented", "mutated", "joined"))
_OPERATOR: Source = ("call", ("const", None), ())  # the result of a method such as `__or__`
_ONLY_POP = (
    *("POP_TOP", "POP_JUMP", "RETURN_VALUE", "STORE_", "JUMP", "END_FOR"),
    *("LIST_APPEND", "SET_ADD", "MAP_ADD", "LIST_EXTEND", "SET_UPDATE", "DICT_"),
)
_LEAVES = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_")
_MAY_STAY = ("JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP")


@lru_cache(maxsize=4096)
def reading(code: types.CodeType) -> Reading:
    """Read a code object."""
    reader = _Reader(code)
    steps = list(instructions(code))
    for one, after in itertools.zip_longest(steps, steps[1:]):
        reader.is_dropped = after is not None and after.opname == "POP_TOP"
        reader.step(one)
    known: dict[Source, Any] = {}
    uses = {
        shared(source, known): reader.lines[source]
        for source, count in reader.uses.items()
        if count > 0
    }
    reader.fill_comprehensions()
    assigned, filled = (_sources(one, known) for one in (reader.assigned, reader.filled))
    comprehensions = {
        inner: shared(source, known) for inner, source in reader.comprehensions.items()
    }
    given = code.co_argcount + code.co_kwonlyargcount
    fixed = frozenset((*code.co_varnames[:given], "__class__")) - assigned.keys() - filled.keys()
    settled = {source: line for source, line in uses.items() if is_settled(source)}
    others = {source: line for source, line in uses.items() if source not in settled}
    moving = {source: line for source, line in others.items() if is_moving(source, fixed)}
    keys = {
        name: tuple(shared(source, known) for source in reader.assigned.get(name, ()))
        for name in reader.keys
        if None not in reader.assigned.get(name, ())
    }
    tagged = _tagged(others)
    passing = tagged & reader.cleared
    constants = tuple((shared(called, known), at) for called, at in reader.constants)
    sure, vague = ({shared(one, known) for one in found} for found in _items(reader))
    kept = frozenset(code.co_varnames) - reader.unbound - {*code.co_cellvars}
    return Reading(
        *(settled, others, moving, assigned, comprehensions, keys, tagged, passing, constants),
        *(filled, kept, frozenset(sure), frozenset(vague)),
    )


def _tagged(sources: Iterable[Source]) -> frozenset[str]:
    """The locals that are asked for an attribute which tensors do not have by themselves."""
    return frozenset(
        of[1]
        for kind, of, *rest in filter(None, sources)
        if kind == "attr" and of[0] == "local" and is_of_python(rest[0])
    )


def _sources(given: dict[str, set[Source]], known: dict[Source, Any]) -> dict[str, set[Source]]:
    """The sources of locals that may be more than plain data."""
    return {
        name: {
            shared(source, known)
            for source in sources
            if source is not None and source[0] != "const"
        }
        for name, sources in given.items()
    }


def _items(reader: _Reader) -> tuple[set[Source], set[Source]]:
    """The items whose keys are all known at the end of a frame, and those whose keys come from a
    list that is changed in other ways. Attributes are found by the objects that have them.
    """
    assigned, filled = reader.assigned, reader.filled
    known, sure, vague = reader.lists.known(assigned, filled), set[Source](), set[Source]()
    for source in reader.uses:
        if source is None or source[0] not in ("in", "item", "attr"):
            continue
        of = source[1 if source[0] == "attr" else 2]
        if known.is_known(of):
            sure.add(source)
        elif any(map(is_taken, parts_through(of, assigned, filled))):
            vague.add(source)
    return sure, vague


def _is_known(place: tuple[Any, ...]) -> bool:
    """Test for a place whose holder is known."""
    return place[0] in ("global", "cell") or place[1] is not None


class _Reader:
    """The symbolic stack, and the findings so far."""

    def __init__(self, code: types.CodeType) -> None:
        self.code, self.line = code, code.co_firstlineno
        self.span: Span = None, None, None, None
        self.constants: list[tuple[Source, Span]] = []
        self.uses: Counter[Source] = Counter()
        self.lines: dict[Source, int] = {}
        self.assigned: dict[str, set[Source]] = {}
        self.comprehensions: dict[types.CodeType, Source] = {}
        self.keys: set[str] = set()
        self.cleared: set[str] = set()
        self.lists = Lists(code)
        self.filled: dict[str, set[Source]] = {}
        self.unbound: set[str] = set()
        self.stack: list[Source] = []
        self.at: dict[int, list[Source]] = {}
        """The stack at the targets of jumps, by offset."""
        self.is_dead = False
        self.is_dropped = False
        """Set where the next instruction drops the result of a call."""

    def step(self, one: dis.Instruction) -> None:
        """Read an instruction by its rule."""
        if (at := one.positions) is not None and at.lineno is not None:
            self.line = at.lineno
            self.span = at.lineno, at.col_offset, at.end_lineno, at.end_col_offset
        if one.is_jump_target or self.is_dead:
            self._merge(one.offset)
        _INSTRUCTIONS.get(one.opname, _by_its_effect)(self, one)
        if one.opname.startswith(_LEAVES):
            self.is_dead = one.opname not in _MAY_STAY

    def _merge(self, offset: int) -> None:
        """Merge at a target of jumps: a place of the stack may hold either of two values."""
        other = self.at.get(offset)
        if self.is_dead or other is None or len(other) != len(self.stack):
            self.stack = list(other if other is not None else [] if self.is_dead else self.stack)
        else:
            self.stack = [_either(a, b) for a, b in zip(other, self.stack, strict=True)]
        self.is_dead = False

    def jump(self, offset: int, stack: list[Source]) -> None:
        """Record the stack at the target of a jump, which several jumps may have."""
        other = self.at.setdefault(offset, stack)
        if other is not stack and len(other) == len(stack):
            self.at[offset] = [_either(a, b) for a, b in zip(other, stack, strict=True)]

    def draw(self, of: Source) -> None:
        """Note that an item is drawn from an iterator, and whether the code has branched before."""
        if of is not None and not self.is_dead:
            self.use(("drawn", of, bool(self.at)))

    # ---- the stack ----

    def pop(self, count: int) -> list[Source]:
        """Pop values, the lowest first; what was never seen pushed is unknown."""
        if count <= 0:
            return []
        found = self.stack[-count:]
        del self.stack[-count:]
        return [None] * (count - len(found)) + found

    def pop_one(self) -> Source:
        return self.stack.pop() if self.stack else None

    def push(self, source: Source) -> None:
        """Push a loaded value, whose load is a use."""
        self.stack.append(source)
        if source is not None and source[0] not in ("const", "local"):
            self.use(source)

    def push_any(self, sources: list[Source], kind: str = "any") -> None:
        """Push one of these values, or a container that is built of them."""
        known = tuple(source for source in sources if source is not None)
        parts = tuple(sources) if kind == "built" else known
        self.stack.append((kind, parts) if known else None)

    # ---- findings ----

    def use(self, source: Source) -> None:
        self.uses[source] += 1
        self.lines.setdefault(source, self.line)

    def end(self, *sources: Source) -> None:
        """End a value: its further use is not known, or takes all of it."""
        for source in sources:
            if source is not None and source[0] not in _NO_CONTENT:
                self.use(("whole", source))

    def assign(self, name: str, value: Source) -> None:
        self.assigned.setdefault(name, set()).add(value)

    def fill(self, of: Source, item: Source) -> None:
        """Record that an item is put into a list; only locals are understood."""
        name = self.lists.understand(of)
        if name is not None:
            self.filled.setdefault(name, set()).add(("built", (item,)))

    def fill_comprehensions(self) -> None:
        """Record the items of comprehensions that are inlined, for all lists that are empty at
        first.
        """
        items: Source = ("built", tuple(self.lists.appended))
        for name, sources in self.assigned.items() if self.lists.appended else ():
            if ("built", ()) in sources:
                self.filled.setdefault(name, set()).add(items)

    def written(self, value: Source, place: Source) -> None:
        """Record a write. The old value of `holder.count += 1` counts for nothing else."""
        assert place is not None
        is_own = value is not None and value[:2] == ("inplace", place)
        if value is not None and is_own and self.uses[place] > 0:
            self.uses[place] -= 1
            self.use(("augmented", place, value[2]))
        else:
            self.end(value)
            self.use(("before" if _is_known(place) else "counted", place))

    def deleted(self, place: Source) -> None:
        """Record that a place is emptied, which fails if it is empty already."""
        assert place is not None
        if _is_known(place):
            self.use(place)
        self.use(("before" if _is_known(place) else "counted", place))

    def item(self, of: Source, key: Source) -> Source:
        """The item at a key, whose variable is known to be one."""
        if key is not None and key[0] == "local":
            self.keys.add(key[1])
        return None if of is None else ("item", of, key)

    def attribute(self, of: Source, key: Source) -> Source:
        """The attribute by a key, whose variable is known to be one."""
        self.item(None, key)
        return None if of is None else ("attr", of, key)

    def place(self, name: str) -> Source:
        """A variable that functions share, or a local that those inside may close over."""
        return ("cell" if name in self.code.co_freevars else "local", name)

    def shown(self, source: Source) -> None:
        """Read a value whose text becomes a part of a string."""
        if source is not None and source[0] not in _NO_CONTENT:
            self.use(("shown", source))

    def first(self) -> Source:
        """The first argument of the function, which is `self` in a method."""
        return ("local", self.code.co_varnames[0]) if self.code.co_argcount else None

    def kinds(self, classes: Source, of: Source) -> None:
        """Read a question for the class of a value."""
        if classes is not None:
            self.use(("kinds", classes, of))

    def call(self, called: Source, arguments: list[Source], *, is_spread: bool = False) -> None:
        """Read a call by the rule of a builtin or method; any other callable is `_any_call`."""
        call = _Call(called, arguments, is_spread)
        match called:
            case ("code", code):
                self.end(*call.known)
                if call.known:
                    self.comprehensions[code] = call.known[0]
                self.stack.append(("call", called, ()))
                return
            case ("global", name):
                rule = _BUILTINS.get(name)
            case ("attr", _, ("const", name)):
                rule = _METHODS.get(name)
            case _:
                rule = None
        if rule is None or not rule(self, call):
            _any_call(self, call)


def _either(a: Source, b: Source) -> Source:
    return a if a == b else ("any", (a, b))


# ---- rules of instructions ----

Instruction: TypeAlias = Callable[[_Reader, dis.Instruction], None]
_INSTRUCTIONS: dict[str, Instruction] = {}


def _instruction(*names: str) -> Callable[[Instruction], Instruction]:
    """Register the rule of instructions that are alike."""

    def register(rule: Instruction) -> Instruction:
        _INSTRUCTIONS.update(dict.fromkeys(names, rule))
        return rule

    return register


def _by_its_effect(r: _Reader, one: dis.Instruction) -> None:
    """Skip an instruction without a rule, by its effect on the stack."""
    jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
    effect = dis.stack_effect(one.opcode, one.arg, jump=False)
    if jumps:
        after = dis.stack_effect(one.opcode, one.arg, jump=True)
        r.jump(one.argval, [*r.stack, *[None] * after] if after >= 0 else r.stack[:after])
    if one.opname.startswith(("POP_JUMP", "TO_BOOL")):
        r.lists.understand(r.stack[-1] if r.stack else None)
    if one.opname.startswith(_ONLY_POP):
        r.end(*r.pop(-effect))
    elif effect < 0:
        r.end(*r.pop(1 - effect))
        r.stack.append(_OPERATOR if one.opname in ("BINARY_OP", "COMPARE_OP") else None)
    elif effect == 0 and r.stack and not jumps:
        r.end(r.pop_one())
        r.stack.append(None)
    else:
        r.stack += [None] * effect


@_instruction("PRECALL", "KW_NAMES", "NOP", "RESUME", "CACHE", "EXTENDED_ARG", "MAKE_CELL")
@_instruction("COPY_FREE_VARS", "NOT_TAKEN", "CONVERT_VALUE")
def _nothing(r: _Reader, one: dis.Instruction) -> None:
    """Read an instruction that leaves the stack as it is."""


@_instruction("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
def _load_global(r: _Reader, one: dis.Instruction) -> None:
    r.pop("_DICT_" in one.opname)
    has_null = one.opname == "LOAD_GLOBAL" and (one.arg or 0) & 1
    if has_null and not _NEW_NULL:
        r.stack.append(None)
    r.push(("global", one.argval))
    if has_null and _NEW_NULL:
        r.stack.append(None)


@_instruction("LOAD_CLOSURE")
def _load_closure(r: _Reader, one: dis.Instruction) -> None:
    r.stack.append(None)


@_instruction("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
def _load_deref(r: _Reader, one: dis.Instruction) -> None:
    r.pop("_DICT_" in one.opname)
    r.push(r.place(one.argval))


@_instruction("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_BORROW")
def _load_fast(r: _Reader, one: dis.Instruction) -> None:
    if one.opname == "LOAD_FAST_AND_CLEAR":
        r.cleared.add(one.argval)
        r.unbound.add(one.argval)
    r.push(("local", one.argval))
    r.lists.load(r.stack[-1])


@_instruction("DELETE_FAST")
def _delete_fast(r: _Reader, one: dis.Instruction) -> None:
    r.unbound.add(one.argval)


@_instruction("LIST_APPEND", "SET_ADD", "MAP_ADD")
def _append(r: _Reader, one: dis.Instruction) -> None:
    """Read an item of a comprehension."""
    r.lists.appended.update(r.stack[-2:] if one.opname == "MAP_ADD" else r.stack[-1:])
    _by_its_effect(r, one)


@_instruction("LOAD_CONST")
def _load_const(r: _Reader, one: dis.Instruction) -> None:
    r.stack.append(("const", one.argval))


@_instruction("LOAD_ATTR", "LOAD_METHOD")
def _load_attr(r: _Reader, one: dis.Instruction) -> None:
    r.push(r.attribute(r.pop_one(), ("const", one.argval)))
    if one.opname == "LOAD_METHOD" or (_NEW_LOOP and (one.arg or 0) & 1):
        r.stack.append(None)


@_instruction("LOAD_SUPER_ATTR")
def _load_attr_of_super(r: _Reader, one: dis.Instruction) -> None:
    _, cls, of = r.pop(3)
    r.push(("attr", ("super", cls, of), ("const", one.argval)))
    if (one.arg or 0) & 1:
        r.stack.append(None)


@_instruction("STORE_FAST")
def _store_fast(r: _Reader, one: dis.Instruction) -> None:
    value, name = r.pop_one(), one.argval
    if value == ("inplace", ("local", name), "+="):
        r.lists.understand(("local", name))
    r.assign(name, value)


@_instruction("STORE_DEREF")
def _store_deref(r: _Reader, one: dis.Instruction) -> None:
    if one.argval in r.code.co_freevars:
        r.written(r.pop_one(), ("cell", one.argval))
    else:
        r.assign(one.argval, r.pop_one())


@_instruction("STORE_GLOBAL")
def _store_global(r: _Reader, one: dis.Instruction) -> None:
    r.written(r.pop_one(), ("global", one.argval))


@_instruction("STORE_ATTR")
def _store_attr(r: _Reader, one: dis.Instruction) -> None:
    value, of = r.pop(2)
    r.written(value, ("attr", of, ("const", one.argval)))


@_instruction("STORE_SUBSCR")
def _store_item(r: _Reader, one: dis.Instruction) -> None:
    value, of, key = r.pop(3)
    r.written(value, ("item", of, key))


@_instruction("STORE_SLICE")
def _store_slice(r: _Reader, one: dis.Instruction) -> None:
    value, of, *_ = r.pop(4)
    r.written(value, ("item", of, None))


@_instruction("DELETE_SUBSCR")
def _delete_item(r: _Reader, one: dis.Instruction) -> None:
    of, key = r.pop(2)
    r.use(("counted", ("item", of, key)))


@_instruction("DELETE_ATTR")
def _delete_attr(r: _Reader, one: dis.Instruction) -> None:
    r.deleted(("attr", r.pop_one(), ("const", one.argval)))


@_instruction("DELETE_GLOBAL")
def _delete_global(r: _Reader, one: dis.Instruction) -> None:
    r.deleted(("global", one.argval))


@_instruction("DELETE_DEREF")
def _delete_deref(r: _Reader, one: dis.Instruction) -> None:
    if one.argval in r.code.co_freevars:
        r.deleted(("cell", one.argval))


@_instruction("BINARY_SUBSCR")
def _load_item(r: _Reader, one: dis.Instruction) -> None:
    of, key = r.pop(2)
    r.push(r.item(of, key))


@_instruction("CONTAINS_OP")
def _contains(r: _Reader, one: dis.Instruction) -> None:
    key, of = r.pop(2)
    item = r.item(of, key)
    if item is not None:
        r.use(("in", *item[1:]))
    r.draw(of)
    r.stack.append(None)


@_instruction("IS_OP")
def _is(r: _Reader, one: dis.Instruction) -> None:
    r.pop(2)
    r.stack.append(None)


@_instruction("BINARY_OP")
def _operator(r: _Reader, one: dis.Instruction) -> None:
    if one.argrepr == "%":
        r.shown(*r.stack[-1:])
    if not one.argrepr.endswith("="):
        parts = r.stack[-2:]
        _by_its_effect(r, one)
        if one.argrepr == "+" and any(map(_is_string, parts)):
            r.stack[-1] = ("joined", tuple(part if _is_string(part) else None for part in parts))
        elif any(map(_is_built, parts)):  # `[a] + b`, `[a] * 2`
            r.push_any([r.pop_one(), *parts])
        return
    left, right = r.pop(2)
    r.end(right)
    if one.argrepr == "+=" and left is not None and left[0] == "local":
        r.lists.understand(right)
        item: Source = None if right is None else ("each", right)
        r.filled.setdefault(left[1], set()).add(("built", (item,)))
    if left is not None and left[0] == "local":
        r.use(("mutated", left))
    r.stack.append(None if left is None else ("inplace", left, one.argrepr))


@_instruction("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC")
def _format(r: _Reader, one: dis.Instruction) -> None:
    if one.opname == "FORMAT_WITH_SPEC" or (one.opname == "FORMAT_VALUE" and (one.arg or 0) & 4):
        r.end(r.pop_one())
    r.shown(*r.stack[-1:])
    r.end(r.pop_one())
    r.stack.append(None)


@_instruction("BUILD_STRING")
def _join(r: _Reader, one: dis.Instruction) -> None:
    parts = r.pop(one.arg or 0)
    r.stack.append(("joined", tuple(part if _is_string(part) else None for part in parts)))


def _is_string(source: Source) -> bool:
    return source is not None and (
        source[0] == "joined" or (source[0] == "const" and isinstance(source[1], str))
    )


def _is_built(source: Source) -> bool:
    return source is not None and source[0] in ("built", "any")


@_instruction("LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE")
def _extend(r: _Reader, one: dis.Instruction) -> None:
    """Read `[*items]`, `{**items}` and the arguments of `f(*items, **items)`."""
    of, place = r.pop_one(), -(one.arg or 1)
    r.end(of)
    if len(r.stack) >= -place and (of, r.stack[place]) != (None, None):
        r.stack[place] = ("any", (r.stack[place], of))


@_instruction("GET_ITER")
def _begin_loop(r: _Reader, one: dis.Instruction) -> None:
    for of in r.stack[-1:]:
        r.lists.understand(of)
        r.end(of)


@_instruction("FOR_ITER")
def _next_item(r: _Reader, one: dis.Instruction) -> None:
    of = r.stack[-1] if r.stack else None
    r.draw(of)
    r.at.setdefault(one.argval, [*r.stack, None] if _NEW_LOOP else r.stack[:-1])
    r.push(None if of is None else ("each", of))


@_instruction("UNPACK_SEQUENCE", "UNPACK_EX")
def _unpack(r: _Reader, one: dis.Instruction) -> None:
    of, number = r.pop_one(), one.arg or 0
    count = number if one.opname == "UNPACK_SEQUENCE" else (number & 255) + (number >> 8) + 1
    r.end(of)
    for _ in range(count):
        r.push(None if of is None else ("each", of))


def _push_built(r: _Reader, items: list[Source]) -> None:
    """Push a new container; an empty one may be filled."""
    r.push_any(items, "built")
    if not items:
        r.stack[-1] = ("built", ())


@_instruction("BINARY_SLICE")
def _slice(r: _Reader, one: dis.Instruction) -> None:
    """Read `of[a:b]`, which has items of the container."""
    parts = r.pop(3)
    r.end(*parts)
    r.push_any(parts[:1])


@_instruction("BUILD_LIST", "BUILD_TUPLE", "BUILD_SET")
def _build(r: _Reader, one: dis.Instruction) -> None:
    _push_built(r, r.pop(one.arg or 0))


@_instruction("BUILD_MAP")
def _build_map(r: _Reader, one: dis.Instruction) -> None:
    _push_built(r, r.pop(2 * (one.arg or 0)))


@_instruction("BUILD_CONST_KEY_MAP")
def _build_map_of_names(r: _Reader, one: dis.Instruction) -> None:
    r.push_any(r.pop((one.arg or 0) + 1), "built")


@_instruction("MAKE_FUNCTION")
def _make_function(r: _Reader, one: dis.Instruction) -> None:
    of = r.pop_one()
    r.pop(0 if _NEW_NULL else (one.arg or 0).bit_count())
    r.stack.append(("code", of[1]) if of is not None and of[0] == "const" else None)


@_instruction("SET_FUNCTION_ATTRIBUTE")
def _set_function_attribute(r: _Reader, one: dis.Instruction) -> None:
    del r.stack[-2:-1]


@_instruction("CALL", "CALL_KW")
def _call(r: _Reader, one: dis.Instruction) -> None:
    r.pop(one.opname == "CALL_KW")
    arguments = r.pop(one.arg or 0)
    callee = [source for source in r.pop(2) if source is not None]
    r.call(callee[0] if callee else None, [*callee[1:], *arguments])


@_instruction("CALL_FUNCTION_EX")
def _call_spread(r: _Reader, one: dis.Instruction) -> None:
    arguments = r.pop(1 + ((one.arg or 0) & 1))
    callee = [source for source in r.pop(2) if source is not None]
    r.call(callee[0] if callee else None, arguments, is_spread=True)


@_instruction("BEFORE_WITH")
def _enter(r: _Reader, one: dis.Instruction) -> None:
    entering = r.attribute(r.pop_one(), ("const", "__enter__"))
    r.stack.append(None)
    if entering is not None:
        r.use(entering)
    r.call(entering, [])


@_instruction("IMPORT_NAME")
def _import(r: _Reader, one: dis.Instruction) -> None:
    level, names = r.pop(2)
    is_from = names is not None and names[1] is not None
    r.push(None if level is None else ("import", one.argval, level[1], is_from))


@_instruction("IMPORT_FROM")
def _import_from(r: _Reader, one: dis.Instruction) -> None:
    r.push(r.attribute(r.stack[-1] if r.stack else None, ("const", one.argval)))


@_instruction("COPY")
def _copy(r: _Reader, one: dis.Instruction) -> None:
    depth = one.arg or 0
    r.stack.append(r.stack[-depth] if len(r.stack) >= depth else None)
    r.lists.load(r.stack[-1])


@_instruction("SWAP")
def _swap(r: _Reader, one: dis.Instruction) -> None:
    depth = one.arg or 0
    if len(r.stack) >= depth:
        r.stack[-depth], r.stack[-1] = r.stack[-1], r.stack[-depth]


@_instruction("MATCH_CLASS")
def _match_class(r: _Reader, one: dis.Instruction) -> None:
    subject, classes, names = r.pop(3)
    r.kinds(classes, subject)
    if subject is not None and names is not None and names[0] == "const":
        by_place: Source = ("each", ("attr", subject, ("const", "__match_args__")))
        for name in (*(("const", name) for name in names[1]), *[by_place] * bool(one.arg)):
            r.use(("attr", subject, name))
    r.end(subject)
    r.stack.append(None if subject is None else ("fields", subject))


# ---- rules of callables ----


@dataclass(slots=True)
class _Call:
    """A call: what is called, its arguments, and whether some come from `*args` or `**kwargs`."""

    called: Source
    arguments: list[Source]
    is_spread: bool

    @property
    def known(self) -> list[Source]:
        return [source for source in self.arguments if source is not None]

    @property
    def owner(self) -> Source:
        """The object whose method is called."""
        assert self.called is not None
        return self.called[1]


Rule: TypeAlias = Callable[[_Reader, _Call], bool]
"""Read a call and push its result, or return False for a call of another kind."""
_BUILTINS: dict[str, Rule] = {}
_METHODS: dict[str, Rule] = {}


def _callee(*names: str, table: dict[str, Rule] = _BUILTINS) -> Callable[[Rule], Rule]:
    """Register the rule of builtins, or of methods, by their names."""

    def register(rule: Rule) -> Rule:
        table.update(dict.fromkeys(names, rule))
        return rule

    return register


def _any_call(r: _Reader, call: _Call) -> None:
    """Read a call of which nothing is known. What it reads of its arguments is asked later."""
    for source in call.known:
        if source is not None and source[0] not in _NO_CONTENT:
            r.use(("given", call.called, source))
    result = None if call.called is None else ("call", call.called, tuple(call.arguments))
    r.stack.append(result)
    if result is not None:
        r.use(result)


@_callee("__import__")
@_callee("import_module", table=_METHODS)
def _import_by_name(r: _Reader, call: _Call) -> bool:
    match call.arguments:
        case [("const", str() as name), *_]:
            _any_call(r, call)
            assert call.called is not None
            r.push_any([r.pop_one(), ("import", name, 0, call.called[0] == "attr")])
            r.use(r.stack[-1])
            return True
        case _:
            return False


@_callee("getattr", "hasattr")
def _getattr(r: _Reader, call: _Call) -> bool:
    if len(call.arguments) < 2 or call.is_spread:
        return False
    r.push(r.attribute(*call.arguments[:2]))
    return True


@_callee("setattr")
def _setattr(r: _Reader, call: _Call) -> bool:
    if len(call.arguments) < 3 or call.arguments[0] is None:
        return False
    of, key, value = call.arguments[:3]
    r.written(value, r.attribute(of, key))
    r.stack.append(None)
    return True


def _object_and_arguments(call: _Call, count: int) -> tuple[Source, list[Source]]:
    """The object of a method that is called of its class, of itself or of `super()`, and so many
    arguments after it; None for the object if the call is another one.
    """
    of, given = call.owner, call.arguments
    if len(given) == count + 1:
        of, *given = given
    elif of is not None and of[0] == "super":
        of = of[2]
    return (None, []) if call.is_spread or len(given) != count else (of, given)


@_callee("__setattr__", table=_METHODS)
def _setattr_of(r: _Reader, call: _Call) -> bool:
    """Read `object.__setattr__(x, name, value)`, `x.__setattr__(...)` or `super()`'s."""
    of, given = _object_and_arguments(call, 2)
    if of is None:
        return False
    key, value = given
    r.written(value, r.attribute(of, key))
    r.stack.append(None)
    return True


@_callee("delattr")
def _delattr(r: _Reader, call: _Call) -> bool:
    if len(call.arguments) < 2 or call.arguments[0] is None:
        return False
    r.deleted(r.attribute(*call.arguments[:2]))
    r.stack.append(None)
    return True


@_callee("__delattr__", table=_METHODS)
def _delattr_of(r: _Reader, call: _Call) -> bool:
    """Read `object.__delattr__(x, name)`, `x.__delattr__(name)` or `super()`'s."""
    of, given = _object_and_arguments(call, 1)
    if of is None:
        return False
    r.deleted(r.attribute(of, given[0]))
    r.stack.append(None)
    return True


@_callee("__set__", table=_METHODS)
def _set_of_slot(r: _Reader, call: _Call) -> bool:
    """Read `Class.slot.__set__(x, value)`."""
    match call.called, call.arguments:
        case ("attr", ("attr", _, key), _), [of, value] if of is not None:
            r.written(value, r.attribute(of, key))
        case _:
            pass
    return False


@_callee("super")
def _super(r: _Reader, call: _Call) -> bool:
    if len(call.arguments) not in (0, 2) or call.is_spread:
        return False
    cls, of = call.arguments or (("local", "__class__"), r.first())
    r.stack.append(("super", cls, of))
    return True


@_callee("dir")
@_callee("dir", "getmembers", "getmembers_static", table=_METHODS)
def _all_attributes(r: _Reader, call: _Call) -> bool:
    """Read a call that asks for the names of all attributes."""
    if not call.known:
        return False
    of = call.arguments[0]
    _any_call(r, call)
    found = r.attribute(of, None)
    r.push_any([r.pop_one(), found])
    if found is not None:
        r.use(found)
    return True


@_callee("get_type_hints", "getclosurevars")
@_callee("get_type_hints", "getclosurevars", table=_METHODS)
def _read_definition(r: _Reader, call: _Call) -> bool:
    """Read a call that looks at annotations, or at the cells of a function."""
    for of in call.known[:1]:
        r.end(r.attribute(of, ("const", "__annotations__")))
        cell = ("each", r.attribute(of, ("const", "__closure__")))
        r.end(r.attribute(cell, ("const", "cell_contents")))
    return False


@_callee("vars")
def _vars(r: _Reader, call: _Call) -> bool:
    if not call.known:
        return False
    r.push(("attr", call.known[0], ("const", "__dict__")))
    return True


@_callee("isinstance", "issubclass", "type", "id", "callable")
def _ask_kind(r: _Reader, call: _Call) -> bool:
    """Read a builtin that looks at no content."""
    assert call.called is not None
    name = call.called[1]
    for source in call.known:
        if source is not None and source[0] not in _NO_CONTENT:
            r.use(("attr", source, ("const", "__class__")))
    if name == "callable" and call.known:
        r.use(("attr", call.known[0], ("const", "__call__")))
    elif name in ("isinstance", "issubclass") and len(call.arguments) == 2:
        r.kinds(call.arguments[1], call.arguments[0])
    result = ("call", call.called, tuple(call.arguments)) if name == "id" else None
    is_class = name == "type" and len(call.arguments) == 1
    r.stack.append(r.attribute(call.arguments[0], ("const", "__class__")) if is_class else result)
    return True


@_callee("enumerate", "zip", "reversed", "sorted", "list", "tuple", "iter", "set", "frozenset")
@_callee("map", "filter", "next", "dict")
def _pass_on(r: _Reader, call: _Call) -> bool:
    """Read a builtin whose result has the items of its arguments."""
    if not call.known:
        return False
    assert call.called is not None
    r.end(*call.known)
    if call.called[1] in ("map", "filter") and call.arguments[0] is not None:
        for source in call.known:
            r.use(("given", call.arguments[0], ("each", source)))
    r.push_any(
        [*call.known, ("built", tuple(call.known))] if call.called[1] == "dict" else call.known
    )
    if call.called[1] == "next":
        r.draw(call.arguments[0])
    if call.called[1] == "map":  # and the results of the function
        r.stack[-1] = ("any", (None, *call.known))
    return True


@_callee("constant")
@_callee("constant", table=_METHODS)
def _constant(r: _Reader, call: _Call) -> bool:
    """Read `tfn.constant(value)`: what was read for the value counts unless it is ours."""
    r.constants.append((call.called, r.span))
    for source in {part: None for one in call.known for part in parts_of(one) if r.uses[part] > 0}:
        r.uses[source] -= 1
        r.use(("unless", call.called, source))
    for source in call.known:
        r.use(("unless", call.called, ("whole", source)))
        r.use(("unless", call.called, ("given", call.called, source)))
    r.stack.append(("call", call.called, ()))
    return True


@_callee("__next__", "send", "throw", "close", table=_METHODS)
def _resume(r: _Reader, call: _Call) -> bool:
    """Read a call that moves an iterator on."""
    r.draw(call.owner)
    return False


@_callee("append", "add", table=_METHODS)
def _fill(r: _Reader, call: _Call) -> bool:
    """Read a call that puts an item into a list."""
    if len(call.arguments) == 1 and not call.is_spread:
        r.fill(call.owner, call.arguments[0])
    return False


@_callee("pop", "popleft", table=_METHODS)
def _pop(r: _Reader, call: _Call) -> bool:
    """Read a call that takes an item away. Where nobody looks at it, it does not count."""
    is_fixed = all(one is not None and one[0] == "const" for one in call.arguments)
    is_place = all(one is not None and type(one[1]) is int for one in call.arguments)
    if is_fixed and is_place and not r.is_dropped and call.owner is not None:
        if (name := r.lists.understand(call.owner)) is not None:
            r.lists.popped.add(name)
        _any_call(r, call)
        r.push_any([r.pop_one(), ("each", call.owner)])
        r.use(("each", call.owner))
        return True
    if not r.is_dropped or call.is_spread or not is_fixed:
        return False
    r.uses[call.called] -= 1
    r.use(("dropped", call.owner, call.called))
    r.stack.append(None)
    return True


@_callee("get", "setdefault", "getenv", table=_METHODS)
def _get(r: _Reader, call: _Call) -> bool:
    if call.is_spread:
        return False
    found = r.item(call.owner, call.arguments[0] if call.arguments else None)
    _any_call(r, call)  # a class of the user's may have a method of this name
    r.push_any([r.pop_one(), found])
    if found is not None:
        r.use(found)
    return True


@_callee("__getattribute__", table=_METHODS)
def _getattribute(r: _Reader, call: _Call) -> bool:
    """Read `object.__getattribute__(x, key)`, `x.__getattribute__(key)` or `super()`'s."""
    if not call.arguments or call.is_spread:
        return False
    match call.owner, call.arguments:
        case _, [of, key, *_]:
            pass
        case ("super", _, of), [key]:
            pass
        case of, _:
            key = call.arguments[0]
    r.push(r.attribute(of, key))
    return True


@_callee("partial")
@_callee("partial", table=_METHODS)
def _partial(r: _Reader, call: _Call) -> bool:
    """Read `partial(f, a)`, which passes a to f."""
    for source in call.known[1:]:
        r.use(("given", call.arguments[0], source))
    return False


@_callee("items", "values", "keys", "copy", table=_METHODS)
def _view(r: _Reader, call: _Call) -> bool:
    if call.known:
        return False
    _any_call(r, call)
    r.push_any([r.pop_one(), call.owner])
    return True
