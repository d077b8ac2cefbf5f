"""Code for a region: the text of one Python function and the C++ kernels that it calls.

    def region(arg0_1, arg1_1):
        buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
        cpp_fused_0(arg0_1, arg1_1, buf0)
        return (buf0,)

Inductor writes a module that compiles its kernels one by one when it is imported. The needed parts
of it are cut out here: the function, the few names that it uses, and the sources of the kernels.
`native.py` compiles many of these at a time.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch

from thunder_fn.executors.torchinductor.outputs import Plan, RegionError, plan_outputs, returned
from thunder_fn.executors.torchinductor.products import (
    NAME,
    SOURCE,
    TYPES,
    Products,
    arguments_of,
    is_faster_here,
)
from thunder_fn.ir import facts, ops
from thunder_fn.ir.symbols import Symbol, compute, symbols_in, symbols_of
from thunder_fn.ir.trace import (
    Dim,
    Equation,
    Expr,
    Literal,
    NumberType,
    TensorType,
    Trace,
    Var,
    cut,
    static_shape,
)
from thunder_fn.torch_internals import Numbers, OpOverload, inductor as internals
from thunder_fn.torch_internals.inductor import WrapperCode

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A region to compile: a trace without constants, for inputs with these strides, on a number
    of threads.

    The compiled form of a region with symbols takes their values behind its inputs, see
    `extra_symbols`. It may write results over the inputs that are `donated`, by place.
    """

    region: Trace
    strides: tuple[tuple[Dim, ...], ...]
    threads: int
    donated: tuple[int, ...] = ()

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """The symbols in types and strides, by name."""
        found = {*symbols_in((self.region.inputs, self.strides)), *symbols_of(self.region)}
        return tuple(sorted((symbol for symbol in found if isinstance(symbol, Symbol)), key=str))

    @property
    def static_strides(self) -> tuple[Strides, ...]:
        """The strides of a region without symbols."""
        return cast("tuple[Strides, ...]", self.strides)

    @property
    def extra_symbols(self) -> tuple[Symbol, ...]:
        """The symbols that are not inputs of the region themselves."""
        given = {var.type.value for var in self.region.inputs if isinstance(var.type, NumberType)}
        return tuple(symbol for symbol in self.symbols if Expr(symbol) not in given)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A C++ function `kernel` and the types of its parameters. One that many regions call has a
    module of its own.
    """

    types: tuple[str, ...]
    source: str
    alone: bool = False

    @property
    def key(self) -> str:
        """A name for the kernel: kernels with the same text have the same."""
        return "k" + hashlib.sha256(repr((self.types, self.source)).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Code:
    """The text of a module that defines `region`, the kernels by the names that it has for them,
    and its tensors.
    """

    text: str
    kernels: tuple[tuple[str, Kernel], ...]
    constants: tuple[tuple[str, torch.Tensor], ...]


def closed_region(region: Trace) -> tuple[Trace, tuple[torch.Tensor, ...]]:
    """The region with its constants as last inputs, and those: code then depends on no value."""
    inputs = (*region.inputs, *(constant.var for constant in region.constants))
    equations = tuple(map(_explicit, region.equations))
    closed = cut(region, inputs=inputs, equations=equations, constants=())
    return closed, tuple(constant.tensor for constant in region.constants)


def _explicit(equation: Equation) -> Equation:
    """Write out the dtype and device of an op that makes a tensor from nothing: defaults change."""
    if not ops.is_factory(equation.op):
        return equation
    type = equation.outputs[0].type
    assert isinstance(type, TensorType), "factories make tensors"
    given = {**dict(equation.kwargs), "dtype": Literal(type.dtype), "device": Literal(type.device)}
    return replace(equation, kwargs=tuple(given.items()))


def generate(job: Job, *, own_products: bool = False) -> Code:
    """Inductor's code for a region; if so, with a kernel of our own for matrix products, where that
    is faster.

    Raises:
        RegionError: Inductor's code is not in the form that is known here, or its outputs lie
            otherwise than eager's.
        Exception: whatever Inductor raises.
    """
    if job.symbols:
        return _symbolic_code(job)
    fakes = _static_fakes(job)
    plan = _planned(job, fakes, None)
    if not plan.layouts:
        return _only_views(job, plan)
    donated = tuple(place for place in job.donated if place not in plan.inputs_shown)
    strides = [layout and layout.strides for layout in plan.layouts]
    wrapper = internals.wrapper_code(
        calls(replace(job, region=plan.region)),
        fakes,
        job.threads,
        strides,
        copy_expanded_targets,
        donated,
    )
    found = wrapper.products if own_products and is_faster_here() else {}
    products = {
        name: given for name, call in found.items() if (given := arguments_of(call, job.threads))
    }
    return cut_out(wrapper, plan, products, donated)


def output_strides(job: Job) -> tuple[Any, ...]:
    """The strides of the outputs of a region without symbols; None for an output that is no
    tensor.
    """
    outputs = _planned(job, _static_fakes(job), None).outputs
    return tuple(None if output.layout is None else output.layout.strides for output in outputs)


def _static_fakes(job: Job) -> list[Any]:
    """Inputs without values.

    Raises:
        RegionError: an input is a number.
    """
    types = [var.type for var in job.region.inputs]
    layouts = [
        (static_shape(type), strides, type.dtype, type.device)
        for type, strides in zip(types, job.static_strides, strict=True)
        if isinstance(type, TensorType)
    ]
    if len(layouts) != len(types):
        raise RegionError("an input is a number, and regions take tensors only")
    return internals.strided_fakes(layouts)


def _symbolic_code(job: Job) -> Code:
    """The code for all sizes for which Inductor's decisions hold; for others its function gives
    None.
    """
    fakes, numbers = fakes_of_job(job)
    plan = _planned(job, fakes, numbers)
    if plan.layouts:
        dim: Callable[[Any], Any] = lambda one: (
            numbers.number(one) if isinstance(one, Expr) else one
        )
        strides = [layout and tuple(map(dim, layout.strides)) for layout in plan.layouts]
        asked = replace(job, region=plan.region)
        wrapper = internals.wrapper_code(
            calls(asked), fakes, job.threads, strides, copy_expanded_targets
        )
        code = cut_out(wrapper, plan, symbols=_places_of_symbols(job))
    else:
        code = _only_views(job, plan)
    return replace(code, text=code.text + _checked(job, tuple(map(str, numbers.constraints))))


def _planned(job: Job, fakes: Sequence[Any], numbers: Numbers | None) -> Plan:
    """The layout of the outputs in memory."""
    with internals.running(fakes, numbers):
        return plan_outputs(job.region, values_of(job)(*fakes))


def _only_views(job: Job, plan: Plan) -> Code:
    """The code of a region that shows its inputs."""
    symbols = _places_of_symbols(job)
    names = [f"arg{place}" for place in range(len(job.region.inputs) + len(job.extra_symbols))]
    body = returned(
        ast.parse("return ()").body,
        names,
        plan,
        (),
        (),
        {key: names[at] for key, at in symbols.items()},
    )
    return Code(f"{internals.REINTERPRET}{ast.unparse(_function(names, body, []))}\n", (), ())


def fakes_of_job(job: Job) -> tuple[list[Any], Numbers]:
    """Inputs without values for a job with symbols, the extra symbols last; what knows of the
    symbols.
    """
    layouts: list[Any] = [
        (
            (type.shape, strides, type.dtype, type.device)
            if isinstance(type, TensorType)
            else cast("NumberType", type).value
        )
        for type, strides in zip(job.region.input_types, job.strides, strict=True)
    ]
    return internals.symbolic_fakes([*layouts, *map(Expr, job.extra_symbols)])


def calls(job: Job) -> Callable[..., tuple[Any, ...]]:
    """The region as a function that calls ATen, given its inputs and the extra symbols."""
    run = values_of(job)

    def results(*given: Any) -> tuple[Any, ...]:
        values = run(*given)
        return tuple(
            values[atom.index] if isinstance(atom, Var) else atom.value
            for atom in job.region.outputs
        )

    return results


def values_of(job: Job) -> Callable[..., list[Any]]:
    """A function that calls ATen for the value of every variable, given the region's inputs and
    the extra symbols.
    """

    def run(*values: Any) -> list[Any]:
        given = values[: len(job.region.inputs)]
        numbers = {
            var.type.value.value: value
            for var, value in zip(job.region.inputs, given, strict=True)
            if isinstance(var.type, NumberType) and isinstance(var.type.value, Expr)
        }
        numbers.update(zip(job.extra_symbols, values[len(given) :], strict=True))
        env = list(given)

        def read(arg: Any) -> Any:
            match arg:
                case Var():
                    return env[arg.index]
                case Literal():
                    return read(arg.value) if isinstance(arg.value, (Expr, tuple)) else arg.value
                case Expr():
                    return compute(arg, numbers)
                case tuple():
                    return [read(item) for item in arg]
                case _:
                    return arg

        for equation in job.region.equations:
            kwargs = {key: read(arg) for key, arg in equation.kwargs}
            result = ops.overload(equation.op)(*map(read, equation.args), **kwargs)
            env.extend(map(_typed, ops.flatten_result(result), equation.outputs))
        return env

    return run


def _typed(value: Any, var: Var) -> Any:
    """The value in the dtype of its variable: some of Inductor's decompositions promote."""
    if isinstance(var.type, TensorType) and value.dtype != var.type.dtype:
        return value.to(var.type.dtype)
    return value


def _checked(job: Job, conditions: tuple[str, ...]) -> str:
    """Write the check that makes the function return None where a condition does not hold."""
    if not conditions:
        return ""
    values = "".join(
        f"    {symbol} = values[{position}]\n"
        for symbol, position in _places_of_symbols(job).items()
    )
    holds = " and ".join(f"({condition})" for condition in conditions)
    return (
        f"import math\ndef checked(*values, region=region):\n{values}"
        f"    return region(*values) if {holds} else None\nregion = checked\n"
    )


def _places_of_symbols(job: Job) -> dict[str, int]:
    """The places from which the code of a region with symbols gets their values."""
    numbers = (
        (str(var.type.value), place)
        for place, var in enumerate(job.region.inputs)
        if isinstance(var.type, NumberType) and isinstance(var.type.value, Expr)
    )
    extra = (
        (str(symbol), len(job.region.inputs) + i) for i, symbol in enumerate(job.extra_symbols)
    )
    return dict((*numbers, *extra))


# ---- what Inductor is known to compile wrongly ----


def copy_expanded_targets(graph: torch.fx.Graph) -> None:
    """Put a copy in front of every op that writes into a tensor some elements of which share
    memory.

    Inductor runs these ops in place of their first operand. If that is the `expand` of an
    intermediate, one element's memory is written for all of them (pytorch#183986, #190855).
    """
    for node in tuple(graph.nodes):
        target = node.target
        if node.op != "call_function" or not hasattr(target, "overloadpacket") or not node.args:
            continue
        if str(target) not in facts.WRITES_INTO_FIRST or not _is_expanded(node.args[0]):
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(
                torch.ops.aten.clone.default,
                (node.args[0],),
                {"memory_format": torch.contiguous_format},
            )
            copy.meta["val"] = node.args[0].meta["val"].contiguous()
        node.replace_input_with(node.args[0], copy)


def _is_expanded(value: object) -> bool:
    """Test whether elements of the tensor may share memory: a view along the way has a stride of
    zero.
    """
    while isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
        fake = value.meta["val"]
        if any(
            size > 1 and stride == 0 for size, stride in zip(fake.shape, fake.stride(), strict=True)
        ):
            return True
        target = value.target
        if (
            value.op != "call_function"
            or not isinstance(target, OpOverload)
            or not _is_view(target)
        ):
            return False
        value = value.args[0]
    return False


def _is_view(target: OpOverload) -> bool:
    return target.namespace == "aten" and ops.is_view(ops.leaf(target))


# ---- reading Inductor's module ----


def cut_out(
    wrapper: WrapperCode,
    plan: Plan,
    products: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    donated: Collection[int] = (),
    symbols: Mapping[str, int] = MappingProxyType({}),
) -> Code:
    """The function, what it uses and the kernels of a module that Inductor wrote.

    Args:
        plan: how the outputs lie in memory.
        products: those to do ourselves.
        donated: inputs, by place, that the code may return.
        symbols: the places of parameters that are values of symbols.

    Raises:
        RegionError: the module is not of the known form.
    """
    text, constants = wrapper.text, wrapper.constants
    module = ast.parse(text)
    kernels = dict(_kernels(module)) | {NAME: Kernel(TYPES, SOURCE, alone=True)}
    call = next(
        (
            node
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef) and node.name == "call"
        ),
        None,
    )
    if call is None:
        raise RegionError("Inductor's module has no function `call`")
    names, body, device = _spread(Products(products).visit(call))
    given = {symbol: names[place] for symbol, place in symbols.items()}
    function = _function(
        names, returned(body, names, plan, wrapper.strides, donated, given), device
    )
    used = _names(function)
    defined: list[ast.stmt] = []
    for node in reversed(module.body):
        bound = _bound(node)
        if bound & used and not bound & kernels.keys():
            kept = _only(node, used)
            defined.append(kept)
            used |= _names(kept)
    body = ast.Module([*reversed(defined), function], [])
    plain = _Plain()
    new = ast.unparse(ast.fix_missing_locations(plain.visit(body)))
    if (
        "async_compile" in new
    ):  # kernels that are not C++: all that the text names are compiled at once
        new += "\nasync_compile.wait(globals())"
    if "extern_kernels" not in {
        node.id for node in ast.walk(ast.parse(new)) if isinstance(node, ast.Name)
    }:
        new = "\n".join(
            line for line in new.splitlines() if not line.endswith(" import extern_kernels")
        )
    return Code(
        f"{new}\n",
        tuple((name, kernel) for name, kernel in kernels.items() if name in used),
        tuple((name, value) for name, value in constants.items() if name in used),
    )


def _kernels(module: ast.Module) -> Iterator[tuple[str, Kernel]]:
    """Assignments `name = async_compile.cpp_pybinding(types, source)`."""
    for node in module.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(attr="cpp_pybinding"), args=[types, source]),
            ):
                yield name, Kernel(tuple(ast.literal_eval(types)), ast.literal_eval(source))
            case _:
                pass


def _spread(call: ast.FunctionDef) -> tuple[list[str], list[ast.stmt], list[ast.withitem]]:
    """`def call(args): a, b = args; args.clear(); ...` as its parameters, `a, b`, the rest, and
    the device that it is on.
    """
    names, rest, device = list[str](), list[ast.stmt](), list[ast.withitem]()
    for statement in call.body:
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Name(id="args")):
                names = [element.id for element in elements if isinstance(element, ast.Name)]
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(value=ast.Name(id="args"), attr="clear"))
            ):
                pass
            case ast.With(items=items, body=inside) if (
                not device
            ):  # the return stands inside or behind
                rest += inside
                device = items
            case ast.With():
                raise RegionError("Inductor's function runs on several devices")
            case _:
                rest.append(statement)
    if "args" in _names(ast.Module(rest, [])):
        raise RegionError("Inductor's function uses its arguments as a list")
    return names, rest, device


def _function(
    names: Sequence[str], body: list[ast.stmt], device: list[ast.withitem]
) -> ast.FunctionDef:
    parameters = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
    body = [ast.With(device, body)] if device else body
    return ast.fix_missing_locations(ast.FunctionDef("region", parameters, body, [], None))


class _Plain(ast.NodeTransformer):
    """`extern_kernels.mm` as `torch.mm`, where it is that: importing the former imports all of
    Inductor.
    """

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "extern_kernels":
            function = getattr(torch, node.attr, None)
            if function is not None and internals.extern_kernel(node.attr) is function:
                return ast.Attribute(ast.Name("torch", ast.Load()), node.attr, node.ctx)
        return node


def _names(node: ast.AST) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement of the module binds."""
    match node:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {name.asname or name.name.split(".")[0] for name in names}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.FunctionDef(name=name) if name != "call":
            return {name}
        case _:
            return set()


def _only(node: ast.stmt, used: set[str]) -> ast.stmt:
    """An import without the names that are not used."""
    if isinstance(node, ast.ImportFrom):
        names = [name for name in node.names if (name.asname or name.name) in used]
        return ast.ImportFrom(node.module, names, node.level)
    return node
