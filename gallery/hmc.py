"""Hamiltonian Monte Carlo: chains of samples from a density that is known up to a factor.

A chain is a `scan` of leapfrog steps, which are a `scan` over the gradient. `vmap` runs all chains, and `jit` makes one
program of it. Randomness comes from keys: a chain is a pure function.
"""

import torch

import thunder_fn as tfn


def log_density(x):
    """Return the logarithm of a density whose mass lies along a bent ridge."""
    return -0.5 * (x[0] / 1.6) ** 2 - 0.5 * ((x[1] - 0.6 * x[0] ** 2 + 1) / 0.35) ** 2


def leapfrog(x, p, size, length):
    """Follow the Hamiltonian's flow: volume is preserved, and energy almost."""
    force = tfn.grad(log_density)

    def step(state, _):
        x, p = state
        p = p + size / 2 * force(x)
        x = x + size * p
        return (x, p + size / 2 * force(x)), None

    return tfn.scan(step, (x, p), None, length=length)[0]


def energy(x, p):
    return 0.5 * p @ p - log_density(x)


def main(chains=64, samples=150, size=0.1, length=20):
    def transition(x, key):
        for_momentum, for_choice = tfn.random.split(key)
        p = tfn.random.normal(for_momentum, (2,))
        new_x, new_p = leapfrog(x, p, size, length)
        chance = (energy(x, p) - energy(new_x, new_p)).exp()
        accepted = tfn.random.uniform(for_choice, ()) < chance
        x = torch.where(accepted, new_x, x)
        return x, (x, accepted)

    def chain(x, key):
        return tfn.scan(transition, x, tfn.random.split(key, samples))[1]

    starts = tfn.random.normal(tfn.random.key(0), (chains, 2))
    keys = tfn.random.split(tfn.random.key(1), chains)
    path, accepted = tfn.jit(tfn.vmap(chain))(starts, keys)
    return {"path": path, "accepted": accepted.float().mean().item()}


if __name__ == "__main__":
    result = main()
    kept = result["path"][:, 50:].flatten(0, 1)
    print(f"{result['accepted']:.0%} accepted, mean of x {kept[:, 0].mean():+.2f}, spread {kept[:, 0].std():.2f}")
