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


def fitted(seed):
    """Returns the posterior of a network in units of the standard deviation of energies, and that unit."""
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
    return lw.fit(model.eval(), (train, y)), unit


# %%
# The level of the forces
# -----------------------
# ``lw.scale_factor(posterior, held_out, of=forces)`` compares the errors of forces in twenty held-out structures with
# their standard deviations. ``posterior.of(..., via=way)`` multiplies the variances by its factor.
#
# In a simulation, ``lapwing.integrations.ase.LaplaceCalculator`` gives energies, forces and their errors to ASE.


def errors(posterior, unit, via):
    """Returns the errors of the forces of a hundred new structures and their standard deviations, in this unit."""
    torch.manual_seed(100)
    new = structures(100)
    found = [posterior.of(lambda f, part=part: forces(f, part), via=via) for part in new.split(20)]
    mean, std = (torch.cat([getattr(one, name) for one in found]) for name in ("mean", "std"))
    return mean - forces(energies, new).detach() / unit, std


print("seed  factor  inside 90 %: before, after  std of error/std: before, after")
for seed in range(5):
    posterior, unit = fitted(seed)
    held_out = structures(20)
    way = lw.scale_factor(posterior, (held_out, forces(energies, held_out).detach() / unit), of=forces)
    before, after = errors(posterior, unit, None), errors(posterior, unit, way)
    inside = [float((error.abs() < 1.645 * std).double().mean()) for error, std in (before, after)]
    ratio = [float((error / std).std()) for error, std in (before, after)]
    print(f"{seed}     {way.factor:5.1f}   {inside[0]:.2f}, {inside[1]:.2f}     {ratio[0]:.2f}, {ratio[1]:.2f}")

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
# When not to
# -----------
#
# - **Potentials for a simulation.** metatrain has last-layer errors within a whole framework of atomistic models.
# - **Structures of another kind.** One factor is right on average over structures like those that set it. Structures in
#   which atoms come much closer than in training have larger errors than any such factor can tell.
# - **Held-out forces with noise of their own.** The factor counts that noise as an error of the network.
