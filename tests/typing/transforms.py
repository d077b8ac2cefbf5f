"""Programs and the answers of a type checker: types and errors stand behind the lines they are about.

`tests/meta/test_package.py` reads this file with pyright. It is never run.
"""

from typing import reveal_type

import torch
from torch import Tensor

import thunder_fn as tfn

x = torch.ones(3)


def loss(params: dict[str, Tensor], n: int) -> Tensor:
    return (params["w"] * n).sum()


@tfn.jit
def step(x: Tensor, n: int = 2) -> Tensor:
    return x * n


@tfn.jit(executors=["torch"], cache="symbolic values")
def other(x: Tensor) -> tuple[Tensor, int]:
    return x, 1


# jit and compile keep signatures and classes
reveal_type(step(x))  # type: Tensor
reveal_type(other(x))  # type: tuple[Tensor, int]
reveal_type(tfn.jit(torch.nn.Linear(2, 3)))  # type: Linear
reveal_type(tfn.compile(torch.nn.Linear(2, 3), executors="torch"))  # type: Linear
reveal_type(tfn.compile(loss))  # type: (params: dict[str, Tensor], n: int) -> Tensor
reveal_type(step.lower(x).compile()(x))  # type: Any
step()  # error: Argument missing for parameter "x"
step("x")  # error: Argument of type "Literal['x']" cannot be assigned to parameter "x" of type "Tensor"
tfn.jit(loss, cahce="symbolic values")  # error: No overloads for "jit"
tfn.jit(loss, cache="symbolic")  # error: cannot be assigned to parameter "cache"
tfn.compile(loss, frontend="dynamic")  # error: cannot be assigned to parameter "frontend"


class Model:
    @tfn.jit
    def apply(self, x: Tensor) -> Tensor:
        return x


reveal_type(Model().apply(x))  # type: Tensor

# gradients are as the first argument; a transform of a jitted function is jitted
reveal_type(tfn.grad(loss)({"w": x}, 2))  # type: dict[str, Tensor]
reveal_type(tfn.value_and_grad(loss)({"w": x}, 2))  # type: tuple[Tensor, dict[str, Tensor]]
reveal_type(tfn.grad_and_value(loss)({"w": x}, 2))  # type: tuple[dict[str, Tensor], Tensor]
reveal_type(tfn.grad(tfn.jit(loss)))  # type: Jitted[(dict[str, Tensor], n: int), dict[str, Tensor]]
reveal_type(tfn.jit(tfn.grad(loss)))  # type: Jitted[(dict[str, Tensor], n: int), dict[str, Tensor]]
reveal_type(tfn.grad(lambda x: x.sum())(x))  # type: Any
tfn.grad(loss)({"w": x})  # error: Argument missing for parameter "n"
tfn.grad(loss)([x], 2)  # error: cannot be assigned to parameter

# others keep the function's type
reveal_type(tfn.vmap(step))  # type: Jitted[(x: Tensor, n: int = 2), Tensor]
reveal_type(tfn.vmap(loss, in_dims=(0, None)))  # type: (params: dict[str, Tensor], n: int) -> Tensor
reveal_type(tfn.checkpoint(loss))  # type: (params: dict[str, Tensor], n: int) -> Tensor
reveal_type(tfn.autocast(loss))  # type: (params: dict[str, Tensor], n: int) -> Tensor
reveal_type(tfn.jvp(torch.sin, (x,), (x,)))  # type: tuple[Tensor, Tensor]
reveal_type(tfn.vjp(loss, {"w": x}, 2))  # type: tuple[Tensor, Pullback]
tfn.vmap(loss, randomness="any")  # error: cannot be assigned to parameter "randomness"


# control flow has the types of its functions
def body(carry: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return carry + y, {"seen": carry}


reveal_type(tfn.scan(body, x, torch.ones(4, 3)))  # type: tuple[Tensor, dict[str, Tensor]]
reveal_type(tfn.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))  # type: Tensor
reveal_type(tfn.cond(x.sum() > 0, torch.sin, torch.cos, [x]))  # type: Tensor
reveal_type(tfn.while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x * 2), (x.sum(), x)))  # type: tuple[Tensor, Tensor]
tfn.scan(body, 1.0, torch.ones(4, 3))  # error: cannot be assigned to parameter
tfn.cond(x.sum() > 0, step, torch.cos, (x, x))  # error: No overloads for "cond"


# custom functions keep the function's signature
@tfn.custom_vjp
def clipped(x: Tensor, bound: float = 1.0) -> Tensor:
    return x * bound


def clipped_fwd(x: Tensor, bound: float) -> tuple[Tensor, None]:
    return clipped(x, bound), None


@tfn.custom_jvp
def softplus(x: Tensor) -> Tensor:
    return x.exp().log1p()


@softplus.defjvp
def softplus_jvp(primals: tuple[Tensor], tangents: tuple[Tensor]) -> tuple[Tensor, Tensor]:
    return softplus(*primals), tangents[0]


@tfn.custom_vmap
def square(x: Tensor) -> Tensor:
    return x * x


reveal_type(clipped(x, bound=2.0))  # type: Tensor
reveal_type(tfn.custom_vjp(loss)({"w": x}, 2))  # type: Tensor
reveal_type(softplus(x))  # type: Tensor
reveal_type(softplus_jvp)  # type: (primals: tuple[Tensor], tangents: tuple[Tensor]) -> tuple[Tensor, Tensor]
reveal_type(square(x))  # type: Tensor
reveal_type(tfn.grad(clipped)(x))  # type: Tensor
reveal_type(tfn.vmap(square)(x))  # type: Tensor
clipped.defvjp(clipped_fwd, lambda _, ct: (ct, None))
clipped()  # error: Argument missing for parameter "x"
softplus("x")  # error: cannot be assigned to parameter "x" of type "Tensor"
clipped.defvjp(loss, clipped_fwd)  # error: cannot be assigned to parameter "fwd"
