"""vmap, jvp, linearize and the Jacobians as torch.func has them: the same answers, and errors of our own."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from tests.unit.capturing import assert_same
from thunder_fn import errors

X, Y = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(4, 3).sin()
A, B = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.5, 0.25, -0.75])
TREE = {"a": X, "b": [Y, A]}
SCALAR = torch.tensor(0.5)


def outputs(a: Any, b: Any) -> Any:
    return {"u": a * b, "v": (a.sin(),)}


def loss(a: Any, b: Any) -> Any:
    return (a * b).sum() + (a**3).sum()


def twice(v: Any) -> Any:
    return v, {"k": v * 2}


CALLS: dict[str, Callable[[Any], Any]] = {
    "negative dims": lambda f: f.vmap(torch.dot, in_dims=(-2, -1))(X, Y),
    "nested dims": lambda f: f.vmap(lambda t: t["a"].sum() + t["b"][0].sum(), in_dims=({"a": 0, "b": [1, None]},))(
        TREE
    ),
    "out_dims": lambda f: f.vmap(twice, out_dims=(1, {"k": -1}))(X),
    "out_dims of one result": lambda f: f.vmap(lambda v: v * 2, out_dims=(1,))(X),
    "out_dims None": lambda f: f.vmap(lambda v: (v, torch.ones(2)), out_dims=(0, None))(X),
    "unbatched output": lambda f: f.vmap(lambda v: torch.ones(2))(X),
    "keywords": lambda f: f.vmap(lambda v, k: v * k)(X, k=X[0]),
    "not a tensor": lambda f: f.vmap(lambda v, k: v * k, in_dims=(0, None))(X, 3),
    "chunks": lambda f: f.vmap(twice, out_dims=(1, {"k": -1}), chunk_size=2)(X),
    "nothing in the batch": lambda f: f.vmap(torch.sin)(torch.ones(0, 3)),
    "in place": lambda f: f.vmap(lambda v: v.clone().add_(1).mul_(2))(X),
    "same numbers": lambda f: f.vmap(lambda v: v + torch.rand(4), randomness="same")(X),
    "different numbers": lambda f: f.vmap(lambda v: v + torch.rand(4), randomness="different")(X),
    "different in same": lambda f: f.vmap(
        f.vmap(lambda v: v + torch.randn(()), randomness="different"), randomness="same"
    )(X),
    "same in different": lambda f: f.vmap(
        f.vmap(lambda v: v + torch.randn(()), randomness="same"), randomness="different"
    )(X),
    "dropout": lambda f: f.vmap(lambda v: torch.nn.functional.dropout(v, 0.5), randomness="different")(X),
    "jvp": lambda f: f.jvp(lambda v: (v.sin(), {"q": v}), (A,), (B,), has_aux=True),
    "jvp of a constant": lambda f: f.jvp(lambda v: torch.ones(2), (A,), (B,)),
    "linearize": lambda f: (found := f.linearize(outputs, A, B))[1](B, A) and (found[0], found[1](B, A)),
    "hessian": lambda f: f.hessian(loss, argnums=(0, 1))(A, B),
    "hessian of a tree": lambda f: f.hessian(lambda d: loss(d["x"], d["y"]))({"x": A, "y": B}),
    "hessian of a scalar": lambda f: f.hessian(torch.sin)(SCALAR),
    "functionalize": lambda f: f.functionalize(lambda v: v.clone().mul_(2)[0].add_(1))(X),
    "functionalize, views too": lambda f: f.functionalize(lambda v: v.t().clone(), remove="mutations_and_views")(X),
    "copied": lambda f: f.jacrev(outputs, chunk_size=2, _preallocate_and_copy=True)(A, B),
    **{f"chunks of {c}": lambda f, c=c: f.jacrev(outputs, argnums=(0, 1), chunk_size=c)(A, B) for c in (1, 2, 5)},
}
for _name in ("jacrev", "jacfwd"):
    _jac: Callable[[Any], Any] = lambda f, name=_name: getattr(f, name)
    CALLS |= {
        f"{_name} of both": lambda f, j=_jac: j(f)(outputs, argnums=(0, 1))(A, B),
        f"{_name} of one in a tuple": lambda f, j=_jac: j(f)(outputs, argnums=(1,))(A, B),
        f"{_name} with aux": lambda f, j=_jac: j(f)(lambda a, b: (a * b, {"z": a}), has_aux=True)(A, B),
        f"{_name} of trees": lambda f, j=_jac: j(f)(lambda d, e: d["x"] * e, argnums=(0, 1))({"x": A}, B),
        f"{_name} of a scalar": lambda f, j=_jac: j(f)(torch.sin)(SCALAR),
        f"{_name} of a vector to a scalar": lambda f, j=_jac: j(f)(lambda v: v.sum())(A),
        f"{_name} of two dtypes": lambda f, j=_jac: j(f)(lambda v, w: v * w.float(), argnums=(0, 1))(A, B.double()),
        f"{_name} of nothing": lambda f, j=_jac: j(f)(lambda v: v * 2)(torch.ones(0)),
        f"{_name} of a constant": lambda f, j=_jac: j(f)(lambda v: torch.ones(2))(A),
    }


@pytest.mark.parametrize("name", CALLS)
def test_as_torch_func(name: str) -> None:
    torch.manual_seed(0)
    found = CALLS[name](tfn)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.func.linearize warns of its own graph
        expected = CALLS[name](torch.func)
    assert_same(found, expected)


INTEGERS: dict[str, Callable[[Any], Any]] = {
    "argmax": torch.argmax,
    "comparison": lambda v: (v > 0).any(),
    "cast": lambda v: v.sum().to(torch.uint8),
    "constant": lambda v: torch.tensor(3),
}
OF_INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda f, g: f.grad(g)(A),
    "value": lambda f, g: f.grad_and_value(g)(A),
    "two arguments": lambda f, g: f.grad(lambda v, w: g(v * w), argnums=(0, 1))(A, B),
    "aux": lambda f, g: f.grad(lambda v: (g(v), v.sum()), has_aux=True)(A),
    "examples": lambda f, g: f.vmap(f.grad(g))(X),
    "second": lambda f, g: f.grad(lambda v: (f.grad(g)(v) * v).sum())(A),
}


@pytest.mark.parametrize("is_jitted", (False, True), ids=("plain", "jit"))
@pytest.mark.parametrize("value", INTEGERS)
@pytest.mark.parametrize("call", OF_INTEGERS)
def test_integers_have_gradients_of_zeros(call: str, value: str, is_jitted: bool) -> None:
    ours = lambda: OF_INTEGERS[call](tfn, INTEGERS[value])
    assert_same((tfn.jit(ours) if is_jitted else ours)(), OF_INTEGERS[call](torch.func, INTEGERS[value]))


@pytest.mark.parametrize(
    "name",
    ["vmap", "grad", "grad_and_value", "vjp", "jvp", "linearize", "jacrev", "jacfwd", "hessian", "functionalize"],
)
def test_signatures_are_torch_funcs(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)) for module in (tfn, torch.func))
    renamed = [
        p.replace(name="func" if p.name == "f" else p.name, annotation=p.empty) for p in ours.parameters.values()
    ]
    assert renamed == [p.replace(annotation=p.empty) for p in theirs.parameters.values()]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda: tfn.vmap(torch.add)(X, Y),
            errors.VmapError,
            "vmap_add: Expected all tensors to have the same size in the mapped dimension, but\n"
            "  args[0] has size 3 in dim 0\n  args[1] has size 4 in dim 0",
        ),
        (
            lambda: tfn.vmap(lambda p: p["w"], in_dims=({"w": (0,)},))({"w": X}),
            errors.VmapError,
            "vmap_<lambda>: in_dims is not compatible with the structure of `inputs`, of which it must be a prefix: "
            "in_dims[0]['w'] is (0,), and args[0]['w'] is a leaf",
        ),
        (
            lambda: tfn.vmap(lambda p: p, out_dims={"w": 0, "b": 0})({"w": X}),
            errors.VmapError,
            "vmap_<lambda>: out_dims is not compatible with the structure of `outputs`, of which it must be a prefix: "
            "out_dims is {'w': 0, 'b': 0}, and out is a dict with the keys 'w'",
        ),
        (
            lambda: tfn.vmap(lambda p: p, out_dims={"w": None})({"w": X}),
            errors.VmapError,
            "vmap_<lambda>: out_dims is None for out['w'], but out['w'] differs between examples",
        ),
        (
            lambda: tfn.vmap(lambda p: p, out_dims={"w": 2})({"w": X}),
            errors.VmapError,
            "vmap_<lambda>: out['w']: Dimension out of range: it has 2 dims with the batch dim, so out_dims cannot be 2",
        ),
        (
            lambda: tfn.jvp(lambda p: p, ({"w": (X, X)},), ({"w": (X,)},)),
            errors.TangentError,
            "jvp: Expected primals and tangents to have the same python structure, "
            "but tangents[0]['w'] is a tuple of 1, and primals[0]['w'] is a tuple of 2",
        ),
        (
            lambda: tfn.vjp(lambda p: p, {"w": X, "b": A})[1]({"w": X, "b": X[0]}),
            errors.CotangentError,
            "vjp_<lambda>: cotangent['b'] is f32[4], but out['b'] is f32[3]",
        ),
        (
            lambda: tfn.linearize(torch.sin, A)[1](B, A),
            errors.TangentError,
            "linearize: Expected primals and tangents to have the same python structure, "
            "but tangents is a tuple of 2, and primals is a tuple of 1",
        ),
        (
            lambda: tfn.jacrev(lambda v: 3)(A),
            errors.NotDifferentiable,
            "vjp(f, *primals): expected f(*primals) to return only tensors, given an int; return other values as aux",
        ),
        (
            lambda: tfn.jacfwd(lambda v: 3)(A),
            errors.NotDifferentiable,
            "jvp(f, primals, tangents): expected f(*primals) to return only tensors, given an int; return other values as aux",
        ),
        (
            lambda: tfn.functionalize(torch.sin, remove="views"),
            errors.GradError,
            "functionalize: remove is one of 'mutations', 'mutations_and_views', given 'views'",
        ),
        (
            lambda: tfn.vjp(lambda v: (v, v), A)[1](A, A),
            errors.CotangentError,
            "vjp_<lambda>: takes one cotangent with the structure of the output, given 2\n"
            "For an output that is a tuple pass a tuple: `pullback((a, b))`.",
        ),
    ],
    ids=[
        "sizes",
        "in_dims",
        "out_dims",
        "out_dims None",
        "out_dims too large",
        "tree of tangents",
        "tree of cotangents",
        "tangents",
        "jacrev",
        "jacfwd",
        "functionalize",
        "cotangents",
    ],
)
def test_misuse(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as found:
        call()
    assert message_of(found.value).startswith(text)


def test_a_loop_over_examples_is_one_equation_and_a_warning() -> None:
    """An op that PyTorch cannot batch runs in a scan, so the trace does not grow with the batch."""

    def histogram(x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x, 4, 0.0, 1.0)

    xs = torch.linspace(0, 1, 50).reshape(10, 5)
    with pytest.warns(
        UserWarning, match="aten.histc.default has no batching rule, so it runs in a loop over 10 examples"
    ):
        trace = tfn.trace(tfn.vmap(histogram), xs)
    assert len(str(trace).splitlines()) < 20
    assert_same(tfn.vmap(histogram)(xs), torch.stack([histogram(x) for x in xs]))


def test_random_ops_without_a_batching_rule_draw_the_same_numbers() -> None:
    p = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.8, 0.2]])
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="no batching rule"):
        found = tfn.vmap(torch.bernoulli, randomness="same")(p)
    rows = [torch.manual_seed(0) and torch.bernoulli(row) for row in p]
    assert_same(found, torch.stack(rows))


def test_functionalize_writes_arguments_at_the_end() -> None:
    x = torch.ones(3)

    def f(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1

    assert_same(tfn.functionalize(f)(x), torch.full((3,), 3.0))
    assert_same(x, torch.full((3,), 2.0))


def test_unary_ops_stay_what_they_are_in_a_batch() -> None:
    """functorch takes log_ndtr apart, and the derivative of the parts is NaN far out."""
    x = torch.tensor([-8.5, -1.0, 2.0], dtype=torch.float64)
    gradient = tfn.grad(lambda x: tfn.vmap(torch.special.log_ndtr)(x).sum())(x)
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: torch.special.log_ndtr(x).sum())(x))


# ---- errors are of the classes that torch.func's are ----


def writes_to_what_is_shared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.add_(x)


V = torch.arange(3.0)
MISUSES: dict[str, Callable[[Any], Any]] = {
    "an argnum out of bounds": lambda m: m.grad(torch.mul, argnums=2)(V[0], V[1]),
    "a negative argnum out of bounds": lambda m: m.jacrev(torch.sin, argnums=-2)(V),
    "an argnum that is no int": lambda m: m.grad(torch.mul, argnums=("0",))(V[0], V[1]),
    "no argnum": lambda m: m.jacfwd(torch.sin, argnums=())(V),
    "an argnum twice": lambda m: m.grad(torch.mul, argnums=(0, -2))(V[0], V[1]),
    "a loss that is no scalar": lambda m: m.grad(torch.sin)(V),
    "a loss that is no tensor": lambda m: m.grad(lambda x: 3.0)(V),
    "the gradient of an int": lambda m: m.grad(lambda x: x.sum())(V.long()),
    "the gradient of a number": lambda m: m.grad(lambda x: x * 2)(3.0),
    "aux that is missing": lambda m: m.grad(lambda x: x.sum(), has_aux=True)(V),
    "aux of vjp that is missing": lambda m: m.vjp(lambda x: [x, x], V, has_aux=True),
    "aux of jvp that is missing": lambda m: m.jvp(lambda x: [x, x], (V,), (V,), has_aux=True),
    "vjp of nothing": lambda m: m.vjp(lambda x: (), V),
    "vjp of a number": lambda m: m.vjp(lambda x: 3, V),
    "jvp of nothing": lambda m: m.jvp(lambda x: None, (V,), (V,)),
    "a cotangent of another structure": lambda m: m.vjp(lambda x: (x, x), V)[1](V),
    "a cotangent of another shape": lambda m: m.vjp(torch.sin, V)[1](torch.ones(4)),
    "primals that are no tuple": lambda m: m.jvp(torch.sin, V, V),
    "no primals": lambda m: m.jvp(torch.sin, (), ()),
    "a primal that is no tensor": lambda m: m.jvp(torch.sin, (1.0,), (V,)),
    "tangents of another structure": lambda m: m.jvp(torch.sin, (V,), (V, V)),
    "a tangent of another shape": lambda m: m.jvp(torch.sin, (V,), (torch.ones(4),)),
    "a strict jvp": lambda m: m.jvp(lambda x: V * 1, (V,), (V,), strict=True),
    "a complex Jacobian": lambda m: m.jacrev(torch.conj)(V.to(torch.complex64)),
    "a chunk of nothing": lambda m: m.vmap(torch.sin, chunk_size=0)(V),
    "a batch dim that is not there": lambda m: m.vmap(torch.sin, in_dims=1)(V),
    "in_dims that are too few": lambda m: m.vmap(torch.mul, (0,))(V, V),
    "in_dims that are no dims": lambda m: m.vmap(torch.mul, "lol")(V, V),
    "in_dims of a number": lambda m: m.vmap(torch.mul)(V, 3),
    "nothing batched": lambda m: m.vmap(torch.sin, in_dims=(None,))(V),
    "no arguments": lambda m: m.vmap(lambda: V)(),
    "sizes that differ": lambda m: m.vmap(torch.mul)(V, torch.ones(4)),
    "a result that is a number": lambda m: m.vmap(lambda x: 3.0)(V),
    "out_dims out of range": lambda m: m.vmap(torch.sin, out_dims=3)(V),
    "out_dims that do not fit": lambda m: m.vmap(lambda x: (x, x), out_dims=(0,))(V),
    "out_dims that are no dims": lambda m: m.vmap(torch.sin, out_dims="lol")(V),
    "random numbers": lambda m: m.vmap(lambda x: x + torch.rand(()))(V),
    "another randomness": lambda m: m.vmap(torch.sin, randomness="some")(V),
    "a branch on a value": lambda m: m.vmap(lambda x: x if x > 0 else -x)(V),
    "a number in a tensor": lambda m: m.vmap(lambda x: x.item() * x)(V),
    "sizes that depend on data": lambda m: m.vmap(lambda x: x.nonzero())(torch.ones(2, 3)),
    "a write to what is shared": lambda m: m.vmap(writes_to_what_is_shared, (0, None))(V, V[0].clone()),
    "an error of shapes": lambda m: m.vmap(torch.mm)(torch.ones(2, 3, 4), torch.ones(2, 3, 4)),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_what_catches_torch_funcs_error_catches_ours(misuse: Callable[[Any], Any]) -> None:
    with pytest.raises(Exception) as theirs:
        misuse(torch.func)
    with pytest.raises(errors.ThunderError) as ours:
        misuse(tfn)
    kind = next(one for one in type(theirs.value).__mro__ if one.__module__ == "builtins")
    assert isinstance(ours.value, kind)


def test_an_error_in_printing_a_tensor_leaves_the_dispatcher_as_it_was() -> None:
    """PyTorch's printing keeps a guard in its frame: freed with the exception, it turned autograd and all modes off."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return torch.func.jvp(lambda z: y.quantile(0.5) * z, (x,), (y,))[1]

    dispatcher: Any = vars(torch)["_C"]

    def state() -> tuple[Any, Any]:
        return dispatcher._dispatch_tls_local_include_set(), dispatcher._dispatch_tls_local_exclude_set()

    before, x = state(), torch.ones(3, 1)
    try:
        found = tfn.jit(f)(x)
    except errors.ThunderError as error:  # PyTorch's fake kernel of `lerp_` fails in forward mode
        del error
    else:
        torch.testing.assert_close(found, f(x))
    assert state() == before
    x.requires_grad_()
    torch.testing.assert_close(tfn.jit(torch.exp)(x), x.exp())


# ---- names from JAX and PyTorch ----

ELSEWHERE: dict[str, tuple[Callable[[], Any], str]] = {
    "wrt": (lambda: tfn.grad(torch.sin, wrt=0), "which is called `argnums` here"),
    "create_graph": (lambda: tfn.grad(torch.sin, create_graph=True), "Leave it out"),
    "argnum": (lambda: tfn.jacrev(torch.sin, argnum=0), "which is called `argnums` here"),
    "mode": (lambda: tfn.compile(torch.sin, mode="default"), r'Write `executors=\["inductor"\]`'),
    "fullgraph": (lambda: tfn.compile(torch.sin, fullgraph=True), "Leave it out: `tfn.jit` raises"),
    "in_axes": (
        lambda: tfn.vmap(torch.sin, in_axes=0),
        "which is called `in_dims` here\nfrom: .*\nWrite `in_dims=` for it",
    ),
    "out_axes": (lambda: tfn.vmap(torch.sin, out_axes=0), "which is called `out_dims` here"),
    "axis_name": (lambda: tfn.vmap(torch.sin, axis_name="i"), "Batch dims have no names"),
    "holomorphic": (lambda: tfn.grad(torch.sin, holomorphic=True), "follow PyTorch's convention"),
    "vectorize": (lambda: tfn.jacrev(torch.sin, vectorize=True), "Rows are batched"),
    "use_reentrant": (lambda: tfn.checkpoint(torch.sin, use_reentrant=False), "there is one kind of checkpoint"),
    "backend": (lambda: tfn.jit(torch.sin, backend="inductor"), r'Write `executors=\["inductor"\]`'),
    "donate_argnames": (lambda: tfn.jit(torch.sin, donate_argnames="x"), "which is called `donate_argnums` here"),
    "true_fun": (lambda: tfn.cond(True, true_fun=torch.sin, false_fun=torch.cos), "which is called `true_fn` here"),
    "init_val": (lambda: tfn.fori_loop(0, 1, torch.add, init_val=A), "which is called `init` here"),
    "f": (lambda: tfn.scan(f=torch.add, init=A, xs=A), "which is called `combine_fn` here"),
    "elems": (lambda: tfn.associative_scan(torch.add, elems=A), "which is called `xs` here"),
    "body_fun": (lambda: tfn.while_loop(cond_fn=torch.sin, body_fun=torch.sin), "which is called `body_fn` here"),
    "minval": (lambda: tfn.random.uniform(tfn.random.key(0), (2,), minval=1), "which is called `low` here"),
    "has_aux": (lambda: tfn.grad(lambda x: x.sum())(A, has_aux=True), r"Write `grad\(f, has_aux=\.\.\.\)\(x\)`"),
    "in_dims": (lambda: tfn.vmap(lambda x: x)(A, in_dims=0), "which is an option of vmap"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_from_elsewhere_says_what_it_is_called_here(name: str) -> None:
    call, text = ELSEWHERE[name]
    with pytest.raises(errors.UnknownOption, match=text) as info:
        call()
    assert f"'{name}'" in message_of(info.value) and isinstance(info.value, TypeError)


def test_an_argument_may_have_the_name_of_an_option() -> None:
    assert (tfn.grad(lambda x, randomness: (x * randomness).sum())(A, randomness=2) == 2).all()
    assert (tfn.grad(lambda x, **options: (x * options["chunk_size"]).sum())(A, chunk_size=3) == 3).all()


def test_an_optimizer_instance_is_no_class() -> None:
    with pytest.raises(errors.OptimizerError, match=r"Write `functional_optimizer\(torch.optim.Adam, lr=\.\.\.\)`"):
        tfn.functional_optimizer(torch.optim.Adam([A.clone().requires_grad_()]))  # type: ignore[arg-type]


def test_a_checkpoint_is_given_its_arguments_later() -> None:
    with pytest.raises(errors.CheckpointError, match=r"`checkpoint\(f\)\(x\)`"):
        tfn.checkpoint(torch.sin, A)


@pytest.mark.parametrize("via", [tfn.jit, lambda f: f], ids=["jit", "plain"])
def test_vmap_inside_torch_funcs_of_a_computed_tensor_that_requires_grad(via: Callable[[Any], Any]) -> None:
    x, w = torch.arange(9.0).reshape(3, 3).cos(), torch.arange(9.0).reshape(3, 3).sin().requires_grad_()

    def f(m: Any) -> Any:
        return lambda a: torch.func.vmap(lambda row: m.vmap(lambda r: r * 2)((w * 1).narrow(0, 0, 2)).sum() * row)(a)

    found, known = via(f(tfn))(x), f(torch.func)(x)
    torch.testing.assert_close(found, known)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), w), torch.autograd.grad(known.sum(), w))


@pytest.mark.parametrize("dim", [0, -1])
def test_squeeze_of_scalars_under_vmap(dim: int) -> None:
    for x in (X[:1, 0], X[0]):
        assert torch.equal(tfn.vmap(lambda x: x.squeeze(dim))(x), x)


def test_tangents_are_a_tuple_as_primals_are() -> None:
    for tangents in ([X], X):
        with pytest.raises(RuntimeError, match="same python structure"):
            tfn.jvp(torch.sin, (X,), tangents)


def test_vmap_whose_batches_a_library_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorDict puts functions of its own into PyTorch's vmap, which have taken its helpers by name."""
    source = torch._functorch.vmap
    add = source._add_batch_dim

    def create(dims: Any, args: Any, level: int, spec: Any) -> Any:
        pairs = zip(dims, args, strict=True)
        batched = [arg if dim is None else add(arg, dim, level) for dim, arg in pairs]
        return torch.utils._pytree.tree_unflatten(batched, spec)

    monkeypatch.setattr(source, "_create_batched_inputs", create)
    distances = torch.vmap(lambda x, y: (x - y.unsqueeze(0)).square().sum(), in_dims=(None, 0))
    for transform in (tfn.jacrev, tfn.jacfwd, tfn.jit):
        mine = transform(distances)(X[:, 0], Y)
        its = getattr(torch.func, transform.__name__, lambda f: f)(distances)(X[:, 0], Y)
        torch.testing.assert_close(mine, its)


DRAWING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda x: x.square() * torch.rand(3),
    "dropout": lambda x: torch.nn.functional.dropout(x * x, 0.5),
    "normal": lambda x: torch.normal(x.sin(), x.cos().abs()) * x,
}
OVER: dict[str, Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], Callable[[torch.Tensor], Any]]] = {
    "grad": lambda T, g: torch.func.grad(lambda x: T(g)(x).sum()),
    "jvp": lambda T, g: lambda x: torch.func.jvp(T(g), (x,), (x,)),
    "vmap of grad": lambda T, g: (
        lambda x: torch.func.vmap(torch.func.grad(lambda u: T(g)(u).sum()), randomness="different")(torch.stack([x, x]))
    ),
    "hessian": lambda T, g: lambda x: torch.func.grad(lambda u: torch.func.grad(lambda v: T(g)(v).sum())(u).sum())(x),
}


@pytest.mark.parametrize("inner", [tfn.jit, tfn.checkpoint])
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("name", ["dropout", "normal"])
def test_torch_func_differentiates_what_was_drawn(name: str, over: str, inner: Any) -> None:
    """The derivative of a function inside has its numbers: it drew others, and a mask of dropout of its own."""
    found = []
    for run, around in ((inner, tfn.jit), (lambda g: g, lambda f: f)):
        torch.manual_seed(0)
        found.append([around(OVER[over](run, DRAWING[name]))(torch.arange(1.0, 4.0)), torch.rand(2)])
    torch.testing.assert_close(*found)


def test_torch_func_over_a_choice_that_draws_is_refused() -> None:
    drawn = DRAWING["rand"]
    chosen = lambda x: tfn.cond(x.sum() > 0, drawn, lambda x: x * 1, (x,)).sum()
    for f in (torch.func.grad(chosen), lambda x: torch.func.jvp(chosen, (x,), (x,))):
        with pytest.raises(errors.UnsupportedCall, match="differentiates a cond that draws random numbers"):
            tfn.jit(f)(torch.ones(3))


OUTER: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).pow(2).sum()),
    "grad of grad": lambda f: torch.func.grad(lambda y: torch.func.grad(lambda x: f(x).pow(3).sum())(y).pow(2).sum()),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](x)[0],
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x + 1,))[1],
    "vmap": lambda f: lambda x: torch.func.vmap(f)(torch.stack([x, x + 1])),
    "vmap of grad": lambda f: lambda x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(torch.stack([x, x + 1])),
    "grad of vmap": lambda f: torch.func.grad(lambda x: torch.func.vmap(f)(torch.stack([x, x + 1])).pow(2).sum()),
}
INSIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reads": lambda u: u.sin() * u,
    "writes": lambda u: u.mul_(2),
    "writes to a part": lambda u: (u[1:].mul_(2), u)[1],
    "reads and writes": lambda u: u.mul_(3).add_(u.exp()),
    "asks": lambda u: u * (2 if u.is_leaf else 3),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("outer", OUTER)
def test_jitted_and_checkpointed_functions_inside_take_results_and_leaves_for_what_they_are(
    outer: str, inside: str
) -> None:
    """A result inside torch.func may be written to, by functions that are traced there too. A leaf may not."""
    for given in (torch.clone, lambda x: x * x, lambda x: x.clone()[:], lambda x: x.detach().clone()):
        f = INSIDE[inside]
        x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
        known = OUTER[outer](lambda x, given=given, f=f: f(given(x)))(x)
        for wrap in (tfn.jit, tfn.checkpoint) if inside != "asks" else (tfn.jit,):
            traced = OUTER[outer](lambda x, given=given, f=f, wrap=wrap: wrap(f)(given(x)))
            for _ in range(2):
                assert torch.allclose(tfn.jit(traced)(x), known), (wrap, known)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        tfn.jit(torch.func.grad(lambda x: tfn.jit(lambda u: u.mul_(2).sum())(x)))(torch.ones(3))
