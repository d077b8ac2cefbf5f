"""Bad input to capture: each mistake has its own exception, and its text says what, where and what to write instead."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import io
import itertools
import math
import operator
import pickle
import queue
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.backends.cuda import SDPAParams
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import register_pytree_node

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import errors
from thunder_fn.capture import capture
from thunder_fn.errors import TracedFunctionError

X = torch.arange(6.0).reshape(2, 3) + 0.5
BRANCH = (
    "Python asked whether a traced tensor is true (`if`, `while`, `and`, `bool`), "
    "but its values are not known while tracing (data-dependent control flow)\n"
    "from:         {here}\n"
    "Use `torch.where(condition, a, b)` or `torch.cond`, or move the decision outside the traced function."
)
VALUE = (
    "`{what}` asked for the values in a traced tensor as Python numbers, but they are not known while tracing\n"
    "from:         {here}\n"
    "Keep it a tensor, or pass the number as an argument (see `static_argnames`)."
)
MEMORY = (
    "`{what}` needs the memory of a tensor, but a traced tensor has a type and no memory\nfrom:         {here}\n{fix}"
)
IN_TORCH, OUTSIDE = "Use the function of torch that does the same.", "Do this outside the traced function."


def error_of(f: Callable[..., Any], *args: Any, kind: type[Exception] = Exception) -> Any:
    with pytest.raises(kind) as info:
        capture(f, args or (X.clone(),))
    return info.value


def here(f: Any, line: int = 0) -> str:
    """The name of a line of f in an error."""
    code = f.__code__
    return f"{code.co_filename}:{code.co_firstlineno + line} in {code.co_name}"


# ---- decisions on values ----


def if_(x: Any) -> Any:
    if x.sum() > 0:
        return x
    return -x


def while_(x: Any) -> Any:
    while x.sum() < 100:
        x = x * 2
    return x


def assert_(x: Any) -> Any:
    assert (x > 0).all()
    return x


BRANCHES: tuple[Any, ...] = (
    *(if_, while_, assert_),
    lambda x: (x.sum() > 0) and x,
    lambda x: x[0, 0] in [1.0, 2.0],
    lambda x: max(x[0, 0], x[0, 1]),
    lambda x: sorted([x[0, 0], x[0, 1]]),
    lambda x: torch.equal(x, x + 1),
    lambda x: torch.allclose(x, x + 1),
    lambda x: torch.compile(if_, backend="eager")(x),
)


@pytest.mark.parametrize("f", BRANCHES, ids=range(len(BRANCHES)))
def test_branch(f: Any) -> None:
    error = error_of(f, kind=errors.DataDependentBranch)
    where = here(if_, 1) if f is BRANCHES[-1] else here(f, int(f.__name__ != "<lambda>"))
    assert str(error) == BRANCH.format(here=where)
    assert isinstance(error, TypeError)


VALUES: dict[str, tuple[Any, ...]] = {
    "__float__": (lambda x: math.sqrt(x.sum()),),
    "__index__": (lambda x: [x for _ in range(x[0, 0].long())], lambda x: [1, 2][x[0, 0].long()]),
}
ADVICE = "Write `x.item()`, which is a number while tracing too, and `math.trunc(x.item())` for the int of a float."
LONG = (
    "`tolist` asked for {count} numbers in a traced tensor, and at most 64 ints and floats can be symbols\n"
    "from:         {here}\n"
    "Keep it a tensor, take the few numbers that are needed before (`x[:3].tolist()`), or pass the list as an argument."
)


@pytest.mark.parametrize(("what", "f"), [(what, f) for what, fs in VALUES.items() for f in fs])
def test_value(what: str, f: Any) -> None:
    expected = VALUE.format(what=what, here=here(f))
    if what != "__index__":
        expected = "\n".join([*expected.splitlines()[:2], ADVICE])
    assert str(error_of(f, kind=errors.DataDependentValue)) == expected


def test_long_lists() -> None:
    for f, count in ((lambda x: torch.zeros(65).tolist(), "65"), (lambda x: x.nonzero().tolist(), "2*u0")):
        assert str(error_of(f, kind=errors.DataDependentValue)) == LONG.format(count=count, here=here(f))


# ---- what a tracer does not have ----

CALLS: dict[str, tuple[Any, str]] = {
    "numpy": (lambda x: x.numpy(), IN_TORCH),
    "__array__": (lambda x: np.sin(x), IN_TORCH),
    "__dlpack__": (lambda x: torch.from_dlpack(x), IN_TORCH),
    "pickle": (lambda x: pickle.dumps(x), OUTSIDE),
    "data_ptr": (lambda x: x.data_ptr(), OUTSIDE),
    "untyped_storage": (lambda x: x.untyped_storage(), OUTSIDE),
    "share_memory_": (lambda x: x.share_memory_(), OUTSIDE),
    "to_sparse": (lambda x: x.to_sparse(), "Keep it dense."),
}


@pytest.mark.parametrize("what", CALLS)
def test_memory(what: str) -> None:
    f, fix = CALLS[what]
    assert str(error_of(f, kind=errors.UnsupportedCall)) == MEMORY.format(what=what, here=here(f), fix=fix)


def test_save() -> None:
    assert "`pickle` needs the memory" in str(
        error_of(lambda x: torch.save(x, io.BytesIO()), kind=errors.UnsupportedCall)
    )


def resize(x: Any) -> Any:
    y = x * 1
    y.resize_(8)
    return y[:6]


UNSUPPORTED: tuple[Any, ...] = (
    resize,
    lambda x: torch.utils.dlpack.to_dlpack(x),
    lambda x: torch.nested.nested_tensor([x, x]),
    lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
    lambda x: torch.sparse_coo_tensor(torch.tensor([[0], [1]]), x[0, :1], (2, 3)),
    lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    lambda x: torch.seed(),
    lambda x: (torch.get_rng_state(), torch.rand(2), torch.set_rng_state(torch.get_rng_state() * 1)),
    lambda x: setattr(x, "data", torch.zeros(5)),
)


@pytest.mark.parametrize("f", UNSUPPORTED, ids=range(len(UNSUPPORTED)))
def test_no_exception_of_pytorchs_insides(f: Any) -> None:
    error = error_of(f, kind=errors.CaptureError)
    assert type(error) in (errors.UnsupportedCall, errors.DataDependentShape), type(error)
    assert f"{__file__}:{f.__code__.co_firstlineno + (f is resize) * 3} in " in str(error)
    for word in ("FakeTensor", "FunctionalTensor", "Proxy", "TracerMode", "shape_env"):
        assert word not in str(error)


HIDDEN: dict[str, Any] = {
    "`as_subclass`": lambda x: (x.relu(), x.relu().as_subclass(Wrapper))[1],
    "`as_subclass` ": lambda x: (x.relu(), torch.Tensor.as_subclass(x, Wrapper)),
    "`to_dlpack`": lambda x: (x.relu(), torch.utils.dlpack.to_dlpack(x))[0],
    "a function of C": lambda x: (x.relu(), [torch.utils.dlpack.to_dlpack][0](x))[0],
}
"""Functions of C that no mode sees, behind one that is seen."""


@pytest.mark.parametrize("called", HIDDEN)
def test_a_function_that_no_mode_sees_has_its_name(called: str) -> None:
    error = error_of(HIDDEN[called], kind=errors.UnsupportedCall)
    assert str(error).startswith(f"<lambda> calls {called.strip()}, which needs a tensor's memory"), str(error)


@torch.library.custom_op("test_errors::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("test_errors::positive", mutates_args=(), tags=(torch.Tag.dynamic_output_shape,))
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def test_a_custom_op_without_a_fake_kernel() -> None:
    text = "the custom op `test_errors::{}` has no fake kernel, which says what its results look like without their values\n"
    error = error_of(lambda x: twice(x), kind=errors.UnsupportedCall)
    assert str(error).startswith(text.format("twice"))
    assert str(error).endswith('Register one: `@torch.library.register_fake("test_errors::twice")`.')
    error = error_of(lambda x: positive(x), kind=errors.DataDependentShape)
    assert str(error).startswith(text.format("positive"))
    assert str(error).endswith("`torch.library.get_ctx().new_dynamic_size()` is a size that depends on values.")


def test_symbolic_tracing_inside_a_capture() -> None:
    error = error_of(lambda x: make_fx(torch.sin)(x), kind=errors.UnsupportedCall)
    assert str(error).startswith("PyTorch's own tracer (`make_fx`) cannot run inside a traced function\n")


PARAMETER = nn.Parameter(torch.ones(3))
OPTIMIZER = torch.optim.SGD([PARAMETER], lr=0.1)


def step(x: Any) -> Any:
    OPTIMIZER.step()
    return x


def test_optimizer_from_outside() -> None:
    assert str(error_of(step, kind=errors.UnsupportedCall)) == (
        "the step of a SGD that was made outside the traced function would store traced tensors in its state\n"
        f"from:         {here(step, 1)}\n"
        "Use `functional_optimizer(torch.optim.SGD, ...)`, which takes the state and returns it."
    )


def leave_gradient(x: Any) -> Any:
    (PARAMETER * x).sum().backward()
    return x


def test_gradient_left_behind() -> None:
    assert str(error_of(leave_gradient, kind=errors.CaptureError)) == (
        "the function leaves a gradient in the `.grad` of an f32[3] from outside that had none\n"
        f"from:         {here(leave_gradient)}\n"
        "Use `torch.autograd.grad`, which returns gradients, or thunder_fn's `grad`."
    )
    assert PARAMETER.grad is None


# ---- arguments and results ----


class Wrapper(torch.Tensor):
    """A tensor class with its own dispatch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


TYPE = "which cannot be traced: the type of a tensor is its dtype, shape and device\n"
OR_PARTS = "or pass its components as separate tensors."
ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "coo": (X.to_sparse, f"is a tensor of layout sparse_coo, {TYPE}Convert it with `.to_dense()`, {OR_PARTS}"),
    "csr": (X.to_sparse_csr, f"is a tensor of layout sparse_csr, {TYPE}Convert it with `.to_dense()`, {OR_PARTS}"),
    "mkldnn": (X.to_mkldnn, f"is a tensor of layout mkldnn, {TYPE}Convert it with `.to_dense()`, {OR_PARTS}"),
    "nested": (
        lambda: torch.nested.nested_tensor([X, X]),
        f"is a nested tensor, {TYPE}Convert it with `.to_padded_tensor(0)`, {OR_PARTS}",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([X, X], layout=torch.jagged),
        f"is a nested tensor, {TYPE}Convert it with `.to_padded_tensor(0)`, {OR_PARTS}",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
        f"is a quantized tensor, {TYPE}Convert it with `.dequantize()`, {OR_PARTS}",
    ),
    "subclass": (
        lambda: X.as_subclass(Wrapper),
        f"is a Wrapper, a tensor class with its own dispatch, {TYPE}Pass the plain tensors that it holds.",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_tensors_without_a_type(name: str) -> None:
    make, text = ARGUMENTS[name]
    value = make()
    with pytest.raises(errors.UnsupportedInput) as info:
        capture(lambda x, y: x, (X, {"a": [value]}))
    assert message_of(info.value) == f"args[1]['a'][0] {text}"
    with pytest.raises(errors.UnsupportedInput) as info:
        capture(lambda x: x + value, (X,))
    assert message_of(info.value) == f"a closed-over tensor {text}"


def test_an_array_cannot_be_traced() -> None:
    with pytest.raises(errors.UnsupportedInput) as info:
        capture(lambda x, y: x, (X,), {"y": np.ones(3)})
    text, _, last = message_of(info.value).split("\n")
    assert text == "kwargs['y'] is a numpy.ndarray, which cannot be traced"
    assert last == "Convert it with `torch.from_numpy`; a tensor becomes an input of the trace."


def generator(x: Any) -> Any:
    yield x


async def coroutine(x: Any) -> Any:
    return x


class Holder:
    """Not a pytree."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def get(self) -> Any:
        return self.x


class Row(list[Any]):
    """Not a pytree."""


def in_queue(x: Any) -> Any:
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()
    made.put(x)
    return made


OF_CODE = "Return the tensors, and make of them what is called outside of the traced function."
RESULTS: dict[str, tuple[Any, str]] = {
    "generator": (generator, "generator returned a generator, whose code has not run\nReturn a list."),
    "coroutine": (
        coroutine,
        "coroutine returned a coroutine, whose code has not run\nTrace a function that is not async.",
    ),
    "map": (lambda x: map(abs, [x]), "<lambda> returned an iterator, whose code has not run\nReturn a list."),
    "object": (
        lambda x: Holder(x * 2),
        "<lambda> returned a Holder that holds traced tensors, but Holder is not a pytree\n"
        "Return the tensors, or register the class with `torch.utils._pytree.register_pytree_node`.",
    ),
    "set": (
        lambda x: {x * 2},
        "<lambda> returned a set that holds traced tensors, but set is not a pytree\n"
        "Return the tensors, or register the class with `torch.utils._pytree.register_pytree_node`.",
    ),
    "list of a class": (
        lambda x: Row([x * 2]),
        "<lambda> returned a Row that holds traced tensors, but Row is not a pytree\n"
        "Return the tensors, or register the class with `torch.utils._pytree.register_pytree_node`.",
    ),
    **{
        name: (f, f"<lambda> returned a {kind} that holds traced tensors\n{OF_CODE}")
        for name, kind, f in (
            ("closure", "function", lambda x: lambda y: y * x),
            ("closure of a closure", "function", lambda x: (lambda f: lambda: f)(lambda y: y * x)),
            ("default", "function", lambda x: lambda y=x: y),
            ("keyword's default", "function", lambda x: lambda *, y=x: y),
            ("partial", "partial", lambda x: functools.partial(torch.add, x)),
            ("method", "method", lambda x: Holder(x).get),
            ("method of a tensor", "method", lambda x: x.add),
        )
    },
    **{
        name: (f, "<lambda> returned an iterator, whose code has not run\nReturn a list.")
        for name, f in (
            ("map", lambda x: map(torch.sin, [x])),
            ("enumerate", lambda x: enumerate([x])),
            ("iter", lambda x: iter([x])),
            ("reversed", lambda x: reversed([x])),
            ("accumulate", lambda x: itertools.accumulate([x, x])),
            ("iter of numbers", lambda x: (x, iter([1, 2]))),
        )
    },
    **{
        f"{kind} of tensors": (
            f,
            f"<lambda> returned {article} {kind} that holds traced tensors, but {kind} is not a pytree\n"
            "Return the tensors, or register the class with `torch.utils._pytree.register_pytree_node`.",
        )
        for article, kind, f in (
            ("a", "slice", lambda x: slice(x, None)),
            ("a", "cell", lambda x: types.CellType(x)),
            ("a", "dict_keys", lambda x: {x: 1}.keys()),
            ("a", "dict_values", lambda x: {1: x}.values()),
            ("a", "dict_items", lambda x: {1: x}.items()),
            ("an", "odict_values", lambda x: collections.OrderedDict(a=x).values()),
            ("a", "mappingproxy", lambda x: types.MappingProxyType({1: x})),
            ("a", "SimpleQueue", lambda x: in_queue(x)),
            ("an", "itemgetter", lambda x: operator.itemgetter(x)),
            ("a", "methodcaller", lambda x: operator.methodcaller("add", x)),
            ("a", "property", lambda x: property(lambda of: x)),
            ("a", "staticmethod", lambda x: staticmethod(lambda: x)),
            ("a", "_lru_cache_wrapper", lambda x: functools.lru_cache(lambda: x)),
            ("a", "ValueError", lambda x: ValueError(x)),
            ("a", "ContextVar", lambda x: contextvars.ContextVar("x", default=x)),
            ("a", "GenericAlias", lambda x: types.GenericAlias(list, (x,))),
            ("a", "SDPAParams", lambda x: SDPAParams(x, x, x, None, 0.0, False, False)),
        )
    },
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_cannot_be_traced(name: str) -> None:
    f, text = RESULTS[name]
    what, source, fix = str(error_of(f, kind=errors.UnsupportedOutput)).split("\n")
    assert f"{what}\n{fix}" == text
    assert source == f"from:         {here(f)}"


# ---- tensors that are changed in place and reached twice ----


def test_mutated_argument_with_an_alias() -> None:
    def f(x: Any, row: Any) -> Any:
        x.add_(1)
        return row * 2

    with pytest.raises(errors.AliasedMutation) as info:
        capture(f, (X, X[0]))
    assert message_of(info.value) == (
        "f changes tensor argument 0 (f32[2, 3]) in place, and tensor argument 1 (f32[3]) shares its memory\n"
        f"from:         {here(f)}\n"
        "Pass a clone of one of them, or compute a new tensor instead of changing this one."
    )
    with pytest.raises(errors.AliasedMutation, match="tensor argument 1"):
        capture(f, (X, X))
    with pytest.raises(errors.AliasedMutation, match="a closed-over tensor"):
        capture(lambda x: (x.add_(1), row * 2), (X,)) if (row := X[0]) is not None else None
    both = torch.zeros(2, 3)
    capture(f, (both[:1], both[1]))  # one storage, but no memory in common
    capture(lambda x, y: x * y, (X, X))  # nothing is changed
    capture(lambda x, y: x.add_(1), (X.clone(), X))


def test_mutated_argument_keeps_its_shape() -> None:
    f = lambda x: x.transpose_(0, 1) * 2
    assert str(error_of(f, kind=errors.CaptureError)) == (
        "the function changes an f32[2, 3] from outside in place to f32[3, 2]\n"
        f"from:         {here(f)}\n"
        "A mutated tensor keeps its dtype and shape; return the new tensor instead."
    )


# ---- tracers that escape ----

KEPT: list[Any] = []
ESCAPED = (
    "a tracer was used{by} after the function that made it had been traced\n"
    "Return the value from the traced function instead of storing it in a global, a closure or an attribute."
)


@pytest.mark.parametrize("part", (lambda x: x * 2, lambda x: x.unbind(0)[1], lambda x: x, lambda x: x.max(0).values))
def test_escaped_tracer(part: Any) -> None:
    KEPT.clear()
    capture(lambda x: KEPT.append(part(x)), (X,))
    (tracer,) = KEPT
    assert repr(tracer) == "EscapedTracer()"
    uses: dict[str, Callable[[], Any]] = {
        "add": lambda: tracer + 1,
        "sin": lambda: torch.sin(tracer),
        "stack": lambda: torch.stack([torch.ones(3), tracer]),
        "__get__": lambda: tracer.shape,
        "item": lambda: tracer.item(),
        "__bool__": lambda: bool(tracer),
        "linear": lambda: nn.functional.linear(X, tracer),
    }
    for name, use in uses.items():
        with pytest.raises(errors.EscapedTracer) as info:
            use()
        assert message_of(info.value) == ESCAPED.format(by=f" by {name}"), name
    with pytest.raises(errors.EscapedTracer):
        capture(lambda x: x, (tracer,))
    with pytest.raises(errors.EscapedTracer):
        capture(lambda x: x + tracer, (X,))
    with pytest.raises(errors.EscapedTracer):
        tfn.grad(lambda x: (x * tracer).sum())(X)


# ---- exceptions inside the traced function ----


class Strange(Exception):
    """Its constructor takes what an exception's does not."""

    def __init__(self, a: int, *, code: int) -> None:
        super().__init__(f"strange {a}")
        self.code = code


class Silent(ValueError):
    """Its text is its own affair."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


def raises(error: Any) -> Any:
    def f(x: Any) -> Any:
        raise error

    return f


RAISED = (
    *(
        ValueError("no"),
        KeyError("a"),
        OSError(2, "gone", "file"),
        Strange(1, code=7),
        Silent(7),
        StopIteration(3),
        MemoryError("full"),
    ),
    *(UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"), ExceptionGroup("many", [ValueError(1)]), NotImplementedError()),
    *(
        AssertionError("FakeTensor"),
        ImportError("no", name="m"),
        RecursionError("deep"),
        Warning("w"),
        SyntaxError("s"),
    ),
)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_exceptions_keep_their_type(error: Any) -> None:
    f = raises(error)
    found = error_of(f, kind=type(error))
    assert isinstance(found, TracedFunctionError)
    assert found.__cause__ is error
    assert found.args == error.args
    assert vars(found).items() >= vars(error).items()
    assert str(found) == (f"f raised {type(error).__name__} while it was traced: {error}\nfrom:         {here(f, 1)}")


def test_exceptions_keep_what_the_interpreter_keeps() -> None:
    assert error_of(lambda x: open("/nonexistent"), kind=FileNotFoundError).filename == "/nonexistent"  # noqa: SIM115
    assert error_of(raises(Strange(1, code=7)), kind=Strange).code == 7
    assert error_of(lambda x: x @ x, kind=RuntimeError).__cause__ is not None


@pytest.mark.parametrize("error", (KeyboardInterrupt, SystemExit(3), GeneratorExit))
def test_exceptions_that_end_the_program_pass(error: Any) -> None:
    with pytest.raises(BaseException) as info:
        capture(raises(error), (X,))
    assert info.type is (error if isinstance(error, type) else type(error))


def test_wrong_shapes_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    error_of(lambda x: x @ x, kind=RuntimeError)
    assert caplog.records == []


def test_backward_hooks() -> None:
    layer = nn.Linear(3, 3)
    handle = layer.register_full_backward_hook(lambda module, inputs, outputs: None)
    loss = lambda x: layer(x).sum()
    assert str(error_of(loss, kind=errors.UnsupportedCall)) == (
        "a Linear has backward hooks, which autograd runs and a trace does not have\n"
        f"from:         {here(loss)}\n"
        "Remove them, or write what they do to the gradient with `custom_vjp`."
    )
    handle.remove()
    capture(layer, (X,))


@pytest.mark.parametrize("f", (torch.linalg.cholesky, torch.linalg.eigh, torch.linalg.slogdet, torch.linalg.inv))
def test_errors_of_fake_kernels_are_those_of_eager_mode(f: Any) -> None:
    with pytest.raises(RuntimeError) as wanted:
        f(torch.ones(3))
    for transform in (tfn.jit, tfn.functionalize, lambda f: lambda x: tfn.vmap(f, in_dims=1)(x[:, None])):
        with pytest.raises(RuntimeError) as found:
            transform(f)(torch.ones(3))
        assert message_of(wanted.value).splitlines()[0] in message_of(found.value)


# ---- classes among arguments, and classes registered with PyTorch ----


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def test_a_dataclass_itself_as_an_argument_is_a_value() -> None:
    """It raised that `fields()` needs a dataclass."""
    f = lambda cls, x: cls(x * 2, x)
    x = torch.ones(2)
    assert torch.equal(tfn.vmap(f, in_dims=(None, 0))(Pair, x).x, x * 2)
    assert torch.equal(tfn.grad(lambda x, cls: f(cls, x).x.sum())(x, Pair), x * 2)
    assert torch.equal(tfn.jit(f, static_argnums=0)(Pair, x).x, x * 2)


class Registered:
    def __init__(self, x: Any, held: Any) -> None:
        self.x, self.held = x, held


def test_tensors_in_the_context_of_a_pytree_of_pytorch() -> None:
    """Tensorclasses hold a dict of tensors so: PyTorch compared values, and a tracer escaped."""
    register_pytree_node(Registered, lambda r: ([r.x], {"held": r.held}), lambda c, d: Registered(*c, d["held"]))
    x = torch.ones(2)
    assert torch.equal(tfn.jit(lambda r: Registered(r.x * 2, r.held))(Registered(x, Pair)).x, x * 2)
    for f, given in (
        (lambda r: r.x + r.held["w"], Registered(x, {"w": x})),
        (lambda x: Registered(x, {"w": x * 2}), x),
    ):
        for transform in (tfn.jit, tfn.vmap, tfn.grad):
            with pytest.raises(errors.UnsupportedInput, match="a Registered holds tensors where its pytree has const"):
                transform(f)(given)


# ---- errors of a program that runs ----


def picked(x: Any, i: Any) -> Any:
    return (x + 1)[i].sum()


RUNS: dict[str, Callable[[Any, Any], Any]] = {
    "jit": tfn.jit(picked),
    "eager transform": tfn.grad(picked),
    "gradient": tfn.jit(tfn.grad(picked)),
    "loop": tfn.jit(lambda x, i: tfn.fori_loop(0, 2, lambda _, total: total + picked(x, i), torch.zeros(()))),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_error_of_a_program_names_the_users_line(name: str) -> None:
    RUNS[name](torch.ones(3), torch.tensor([0]))
    for _ in range(2):
        with pytest.raises(IndexError) as info:
            RUNS[name](torch.ones(3), torch.tensor([7]))
        (note,) = info.value.__notes__
        assert re.match(r"while the program ran\nin equation:  v\d+: .* = aten\.", note)
        assert note.endswith(here(picked, 1))
