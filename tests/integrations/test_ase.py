"""`LaplaceCalculator`: energies, forces and their errors through ASE, against the network and `posterior.of`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing as lw

ase: Any = pytest.importorskip("ase")
from ase import units  # noqa: E402
from ase.calculators.fd import calculate_numerical_forces  # noqa: E402
from ase.md.verlet import VelocityVerlet  # noqa: E402

from lapwing.integrations.ase import LaplaceCalculator  # noqa: E402

FIRST, SECOND = torch.triu_indices(4, 4, 1)
UNIT, SHIFT = 2.5, -40.0


class Pairs(nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, outputs)).double()

    def forward(self, r: Tensor) -> Tensor:
        return self.pair((r[:, FIRST] - r[:, SECOND]).norm(dim=-1)[..., None]).sum(1)


def structures(count: int) -> Tensor:
    square = torch.tensor([[0.0, 0, 0], [1.3, 0, 0], [0, 1.3, 0], [1.3, 1.3, 0]]).double()
    return square + 0.1 * torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(count)).double()


@cache
def fitted() -> lw.Posterior:
    torch.manual_seed(0)
    r, model = structures(40), Pairs().eval()
    y = model(r).detach() + 0.1 * torch.randn(40, 1).double()
    return lw.fit(model, (r, y), lw.Full(), prior_precision=1.0, likelihood=lw.Gaussian(0.01))


def atoms_with(calculator: LaplaceCalculator) -> Any:
    return ase.Atoms("C4", positions=structures(3)[1].numpy(), calculator=calculator)


def calculator(**options: Any) -> LaplaceCalculator:
    return LaplaceCalculator(fitted(), lambda positions, atoms: positions[None], UNIT, SHIFT, **options)


def forces(f: Any, r: Tensor) -> Tensor:
    r = r.detach().requires_grad_()
    return -torch.autograd.grad(f(r).sum(), r, create_graph=True)[0]


def test_energies_and_forces_are_the_network_s():
    atoms = atoms_with(calculator())
    r = torch.tensor(atoms.positions)[None]
    assert atoms.get_potential_energy() == pytest.approx(SHIFT + UNIT * float(fitted().model(r).detach()), rel=1e-12)
    np.testing.assert_allclose(atoms.get_forces(), UNIT * forces(fitted().model, r)[0].detach(), rtol=1e-9)
    np.testing.assert_allclose(atoms.get_forces(), calculate_numerical_forces(atoms, 1e-5), rtol=1e-5, atol=1e-7)
    assert "forces_std" not in atoms.calc.results  # only if it is asked for


def test_errors_are_those_of_the_posterior_in_units_of_energy():
    atoms = atoms_with(calculator())
    r = torch.tensor(atoms.positions)[None]
    energy = fitted().latent(r).std
    assert atoms.calc.get_property("energy_std", atoms) == pytest.approx(UNIT * float(energy), rel=1e-8)
    wanted = UNIT * fitted().of(lambda f: forces(f, r)).std[0]
    np.testing.assert_allclose(atoms.calc.get_property("forces_std", atoms), wanted, rtol=1e-8)
    new = structures(20)
    way = lw.scale_factor(fitted(), (new, torch.ones_like(new)), of=forces)
    wide = atoms_with(calculator(via=way))
    found = wide.calc.get_property("forces_std", wide)
    np.testing.assert_allclose(found, way.factor**0.5 * wanted, rtol=1e-8)


def test_a_moved_atom_has_other_forces_and_a_simulation_conserves_energy():
    atoms = atoms_with(calculator())
    before, std = atoms.get_forces(), atoms.calc.get_property("forces_std", atoms)
    atoms.positions[0] += 0.05
    assert np.abs(atoms.get_forces() - before).max() > 1e-3
    assert np.abs(atoms.calc.get_property("forces_std", atoms) - std).max() > 1e-6
    start = atoms.get_total_energy()
    VelocityVerlet(atoms, 0.2 * units.fs).run(20)
    assert atoms.get_total_energy() == pytest.approx(start, abs=1e-4)
    assert atoms.get_kinetic_energy() > 1e-3


def test_networks_of_several_outputs_are_refused():
    posterior = lw.fit(Pairs(2).eval(), (structures(9), torch.randn(9, 2).double()), prior_precision=1.0, tune=None)
    with pytest.raises(lw.LapwingError, match=r"of energies \(one output\), not .* Write LaplaceCalculator\("):
        LaplaceCalculator(posterior, lambda positions, atoms: positions[None])
    with pytest.raises(lw.LapwingError, match="needs a posterior"):
        LaplaceCalculator(Pairs(), lambda positions, atoms: positions[None])
