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
from ase.calculators.calculator import PropertyNotImplementedError  # noqa: E402
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress  # noqa: E402
from ase.filters import FrechetCellFilter  # noqa: E402
from ase.md.verlet import VelocityVerlet  # noqa: E402
from ase.optimize import BFGS  # noqa: E402

from lapwing.integrations.ase import LaplaceCalculator  # noqa: E402
from tests import oracle  # noqa: E402
from tests.zoo_modules import Net  # noqa: E402

FIRST, SECOND = torch.triu_indices(4, 4, 1)
UNIT, SHIFT = 2.5, -40.0


def pairs(outputs: int = 1) -> nn.Module:
    apart = lambda net, r: net.pair((r[:, FIRST] - r[:, SECOND]).norm(dim=-1)[..., None]).sum(1)  # noqa: E731
    return Net(apart, pair=nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, outputs)).double())


def structures(count: int) -> Tensor:
    square = torch.tensor([[0.0, 0, 0], [1.3, 0, 0], [0, 1.3, 0], [1.3, 1.3, 0]]).double()
    return square + 0.1 * torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(count)).double()


@cache
def fitted() -> lw.Posterior:
    torch.manual_seed(0)
    r, model = structures(40), pairs().eval()
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


@torch.enable_grad()
def with_forces(net: Any, r: Tensor) -> Tensor:
    """Forces too, (B, 1 + 12), as derivatives that the network takes itself."""
    r = r if r.requires_grad else r.detach().requires_grad_()
    energies = net.energies(r)
    (slopes,) = torch.autograd.grad(energies.sum(), r, create_graph=True)
    return torch.cat([energies, -slopes.flatten(1)], 1)


def rows_of(model: nn.Module, r: Tensor) -> Tensor:
    """The Jacobian (B, C, P) by one backward pass for each output: `torch.func` refuses such a network."""
    weights, outputs = list(model.parameters()), model(r)
    rows = [torch.autograd.grad(one, weights, retain_graph=True, materialize_grads=True) for one in outputs.flatten()]
    return torch.stack([torch.cat([grad.flatten() for grad in row]) for row in rows]).reshape(*outputs.shape, -1)


def test_a_fit_to_energies_and_forces_with_a_noise_for_each():
    r, model = structures(12), Net(with_forces, energies=pairs()).eval()
    y = model(r).detach() + 0.1 * torch.randn(12, 13).double()
    noise = torch.tensor([0.01] + 12 * [0.04]).double()
    likelihood = lw.Gaussian(noise.tolist())
    posterior = lw.fit(model, (r, y), lw.Full(), prior_precision=2.0, likelihood=likelihood)
    j, new = rows_of(model, r), structures(3)
    covariance = (torch.einsum("bcp,c,bcq->pq", j, 1 / noise, j) + 2 * torch.eye(j.shape[-1])).inverse()
    j = rows_of(model, new)
    expected = torch.einsum("bcp,pq,bdq->bcd", j, covariance, j)
    torch.testing.assert_close(posterior.latent(new).covariance, expected, rtol=1e-7, atol=1e-12)

    inputs = lambda positions, atoms: positions[None]  # noqa: E731
    atoms = atoms_with(LaplaceCalculator(posterior, inputs, UNIT, SHIFT, output=0))
    std = UNIT * expected[1].diagonal().sqrt()
    assert atoms.calc.get_property("energy_std", atoms) == pytest.approx(float(std[0]), rel=1e-6)
    np.testing.assert_allclose(atoms.calc.get_property("forces_std", atoms).ravel(), std[1:], rtol=1e-6)
    np.testing.assert_allclose(atoms.get_forces(), UNIT * model(new)[1, 1:].detach().reshape(4, 3), rtol=1e-9)


def test_networks_of_several_outputs_are_refused():
    posterior = lw.fit(pairs(2).eval(), (structures(9), torch.randn(9, 2).double()), prior_precision=1.0, tune=None)
    with pytest.raises(lw.LapwingError, match=r"of energies \(one output\), not .* Write LaplaceCalculator\("):
        LaplaceCalculator(posterior, lambda positions, atoms: positions[None])
    with pytest.raises(lw.LapwingError, match="output=0 if the first of several outputs is the energy"):
        LaplaceCalculator(posterior, lambda positions, atoms: positions[None], output=2)
    with pytest.raises(lw.LapwingError, match="needs a posterior"):
        LaplaceCalculator(pairs(), lambda positions, atoms: positions[None])


def with_images(positions: Tensor, atoms: Any, cell: Tensor) -> Tensor:
    """Distances to all atoms of the cell and the 26 cells around it, (1, M)."""
    shifts = torch.cartesian_prod(*3 * [torch.arange(-1.0, 2)]).to(cell) @ cell
    apart = positions[:, None] - positions - shifts[:, None, None]  # (27, n, n, 3)
    others = torch.ones(apart.shape[:-1], dtype=torch.bool)
    others[13] = ~torch.eye(len(positions), dtype=torch.bool)
    return apart[others].norm(dim=-1)[None]


CELL = torch.tensor([[1.6, 0.1, 0], [0.7, 1.8, 0.5], [0.3, -0.2, 2.1]]).double()


def crystals(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(count)
    places = torch.tensor([[0.0, 0, 0], [0.8, 0.8, 1]]).double()
    places = places + 0.1 * torch.randn(count, 2, 3, generator=generator).double()
    return [ase.Atoms("C2", positions=one.numpy(), cell=CELL.numpy(), pbc=True) for one in places]


def distances_in(atoms: Any) -> Tensor:
    return with_images(torch.tensor(atoms.positions), atoms, torch.tensor(atoms.cell[:]))


@cache
def crystal_posterior() -> tuple[lw.Posterior, Tensor]:
    torch.manual_seed(0)
    near = lambda net, d: (net.pair(d[..., None]) * torch.exp(-d.square())[..., None]).sum(1)  # noqa: E731
    model = Net(near, pair=nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()).eval()
    x = torch.cat([distances_in(atoms) for atoms in crystals(30)])
    y = model(x).detach() + 0.1 * torch.randn(30, 1).double()
    return lw.fit(model, (x, y), lw.Full(), prior_precision=1.0, likelihood=lw.Gaussian(0.01)), x


def test_the_stress_of_a_crystal_and_its_error():
    posterior, x = crystal_posterior()
    model = posterior.model
    (atoms,) = crystals(1)
    atoms.calc = LaplaceCalculator(posterior, with_images, UNIT, SHIFT)
    stress = atoms.get_stress()
    assert np.abs(stress).min() > 1e-3
    np.testing.assert_allclose(stress, calculate_numerical_stress(atoms, 1e-5), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(atoms.get_forces(), calculate_numerical_forces(atoms, 1e-5), rtol=1e-5, atol=1e-8)
    j = oracle.jacobian(model, x)[:, 0]
    covariance = (j.T @ j / 0.01 + torch.eye(j.shape[1])).inverse()

    for at, (a, b) in enumerate([(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]):
        rows = []
        for step in (1e-5, -1e-5):
            strain = torch.zeros(3, 3).double()
            strain[a, b] += step / 2
            strain[b, a] += step / 2
            moved = atoms.copy()
            moved.set_cell(atoms.cell[:] @ (np.eye(3) + strain.numpy()), scale_atoms=True)
            rows.append(oracle.jacobian(model, distances_in(moved))[0, 0])
        row = UNIT * (rows[0] - rows[1]) / 2e-5 / atoms.get_volume()
        found = atoms.calc.get_property("stress_std", atoms)[at]
        assert found == pytest.approx(float(row @ covariance @ row) ** 0.5, rel=1e-5)


def test_a_cell_relaxes():
    (atoms,) = crystals(1)
    atoms.calc = LaplaceCalculator(crystal_posterior()[0], with_images, UNIT, SHIFT)
    before = atoms.get_potential_energy()
    BFGS(FrechetCellFilter(atoms), logfile=None).run(steps=3)
    assert atoms.get_potential_energy() < before - 0.01


def test_no_stress_without_a_cell():
    atoms = atoms_with(calculator())
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_stress()
    atoms.calc = LaplaceCalculator(fitted(), lambda positions, atoms, cell: positions[None], UNIT, SHIFT)
    assert atoms.get_potential_energy() == atoms_with(calculator()).get_potential_energy()
    with pytest.raises(PropertyNotImplementedError):
        atoms.get_stress()
