"""
Energies and forces: errors of derivatives
==========================================

A network of energies gives forces as derivatives. ``posterior.of`` returns forces with their errors, from a fit to
energies. Their level is not right by itself: a few held-out forces set it.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import lapwing as lw

FIRST, SECOND = torch.triu_indices(4, 4, 1)


def distances(positions):
    """Returns the six distances of four atoms in the plane, (B, 6)."""
    return (positions[:, FIRST] - positions[:, SECOND]).norm(dim=-1)


def energies(positions):
    """Returns the true energies, (B, 1): a sum of Morse potentials over pairs."""
    return ((1 - torch.exp(-1.5 * (distances(positions) - 1.2))).square() - 1).sum(1, keepdim=True)


def forces(f, positions):
    """Returns minus the derivatives of energies f by the positions, (B, 4, 2)."""
    positions = positions.detach().requires_grad_()
    return -torch.autograd.grad(f(positions).sum(), positions, create_graph=True)[0]


class Pairs(nn.Module):
    """A sum over pairs of a network of their distance."""

    def __init__(self):
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, positions):
        """Returns the energies, (B, 1)."""
        return self.pair(distances(positions)[..., None]).sum(1)


def structures(count):
    """Returns distorted squares, (count, 4, 2)."""
    return 1.3 * torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]) + 0.15 * torch.randn(count, 4, 2)


# %%
# A fit to energies
# -----------------
# Sixty structures train the network, on energies and forces. ``lw.fit`` gets their energies only.


def trained(seed):
    """Returns a network in units of the standard deviation of energies, its data, and twenty more structures."""
    torch.manual_seed(seed)
    train = structures(60)
    mean, unit = energies(train).mean(), energies(train).std()
    y, slopes = (energies(train) - mean) / unit, forces(energies, train).detach() / unit
    model = Pairs()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 1000)
    for _ in range(1000):
        optimiser.zero_grad()
        error = nn.functional.mse_loss(model(train), y) + nn.functional.mse_loss(forces(model, train), slopes)
        error.backward()
        optimiser.step()
        schedule.step()
    held_out = structures(20)
    return model.eval(), (train, y, slopes), (held_out, forces(energies, held_out).detach() / unit), unit


# %%
# The level of the forces
# -----------------------
# ``lw.scale_factor(posterior, held_out, of=forces)`` compares the errors of forces in twenty held-out structures with
# their standard deviations. ``posterior.of(..., via=way)`` multiplies the variances by its factor.
#
# In a simulation, ``lapwing.integrations.ase.LaplaceCalculator`` gives energies, forces, the stress of a cell, and the
# errors of all three to ASE.


def errors(posterior, unit, via, of):
    """Returns the errors of the forces of a hundred new structures and their standard deviations, in this unit."""
    torch.manual_seed(100)
    new = structures(100)
    found = [posterior.of(lambda f, part=part: of(f, part), via=via) for part in new.split(20)]
    mean, std = (torch.cat([getattr(one, name) for one in found]) for name in ("mean", "std"))
    return mean - forces(energies, new).detach() / unit, std


def judged(seed, posterior, held_out, unit, of):
    """Prints a line, and returns the errors without and with the factor."""
    way = lw.scale_factor(posterior, held_out, of=of)
    before, after = errors(posterior, unit, None, of), errors(posterior, unit, way, of)
    inside = [float((error.abs() < 1.645 * std).double().mean()) for error, std in (before, after)]
    ratio = [float((error / std).std()) for error, std in (before, after)]
    nll = -float(torch.distributions.Normal(0, after[1]).log_prob(after[0]).mean())
    print(
        f"{seed}     {way.factor:5.1f}   {inside[0]:.2f}, {inside[1]:.2f}     "
        f"{ratio[0]:.2f}, {ratio[1]:.2f}                     {nll:.2f}"
    )
    return before, after


HEADING = "seed  factor  inside 90 %: before, after  std of error/std: before, after  NLL: after"
networks = [trained(seed) for seed in range(5)]
print(HEADING)
for seed, (model, (train, y, _), held_out, unit) in enumerate(networks):
    before, after = judged(seed, lw.fit(model, (train, y)), held_out, unit, forces)

# %%
# The errors of the last network. Dashed lines are 90 % intervals.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained", sharey=True)
for ax, (error, std), label in zip(axes, (before, after), ("as fitted", "with the factor"), strict=True):
    ax.loglog(std.flatten(), error.abs().flatten(), ".", markersize=3)
    ends = torch.tensor([float(std.min()), float(std.max())])
    ax.plot(ends, 1.645 * ends, "--", color="0.3")
    ax.set_xlabel(f"standard deviation, {label}")
axes[0].set_ylabel("error of a force")
plt.show()

# %%
# A fit to energies and forces
# ----------------------------
# A network may take derivatives itself, and return energies and forces: nine outputs here. ``lw.fit`` estimates a noise
# variance for each output; ``lw.Gaussian(noise_variance=[...])`` sets them. Without the factor, standard deviations of
# forces are 2 to 8 times too small. With it, the NLL of forces is .01 to .08 nats lower in each of five seeds than by
# the fit to energies.
#
# ``LaplaceCalculator(posterior, inputs, output=0)`` reads the energy of such a posterior.


class EnergiesAndForces(nn.Module):
    """Energies and forces of a network of energies, (B, 1 + 8)."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    @torch.enable_grad()
    def forward(self, positions):
        """Returns energies in the first column, then the forces."""
        return torch.cat([self.network(positions), forces(self.network, positions).flatten(1)], 1)


print(HEADING)
for seed, (model, (train, y, slopes), held_out, unit) in enumerate(networks):
    posterior = lw.fit(EnergiesAndForces(model), (train, torch.cat([y, slopes.flatten(1)], 1)))
    judged(seed, posterior, held_out, unit, lambda f, positions: f(positions)[:, 1:].reshape(-1, 4, 2))

# %%
# When not to
# -----------
#
# - **Potentials for a simulation.** metatrain has last-layer errors within a whole framework of atomistic models.
# - **Structures of another kind.** One factor is right on average over structures like those that set it. Structures in
#   which atoms come much closer than in training have larger errors than any such factor can tell.
# - **Forces in the fit of a large network.** lapwing recognises no layer of a network that takes derivatives itself. So
#   ``lw.KFAC()`` ignores the covariances of its weights, and warns. Here the NLL of the forces is then .03 to .99 nats
#   higher than with ``lw.KFAC()`` and energies alone.
# - **Held-out forces with noise of their own.** The factor counts that noise as an error of the network.
