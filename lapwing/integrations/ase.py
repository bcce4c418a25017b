"""An ASE calculator around a posterior over a network of energies: `LaplaceCalculator`."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

import lapwing as lw

from ..errors import LapwingError, extra, shown

__all__ = ["LaplaceCalculator"]

_calculator: Any = extra("ase.calculators.calculator")
EVERY_CHANGE = _calculator.all_changes
VOIGT = [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]
"""Rows and columns of xx, yy, zz, yz, xz and xy."""


class LaplaceCalculator(_calculator.Calculator):
    """A network of energies as an ASE calculator of energy, forces and stress, with their errors by the posterior.

    `E = shift + unit f(x(r))`, `F = -dE/dr`, and the stress is `dE/dε / V` for a strain ε of positions and cell, in
    ASE's order xx, yy, zz, yz, xz, xy. The errors are the properties "energy_std", "forces_std" and "stress_std",
    standard deviations that uncertain weights cause: `calculator.get_property("forces_std", atoms)`.

    Args:
        posterior: posterior of a network of energies.
        inputs: `inputs(positions, atoms)` returns the network's inputs for one structure, a batch of one sample,
            computed from the positions (n, 3), a tensor that requires gradients. Write `inputs(positions, atoms, cell)`
            to have the stress: compute neighbours across the cell's faces from the cell (3, 3), such a tensor too.
        unit: energy in eV of one unit of f.
        shift: energy in eV at f = 0.
        via: `lw.scale_factor(posterior, held_out, of=forces)`, whose factor widens the errors of forces; None means 1.
        output: index of the energy among several outputs, such as 0 for a fit to energies and forces; None: only one.
        options: options of `ase.calculators.calculator.Calculator`.

    Raises:
        LapwingError: if the first argument is not a posterior, or if `output` does not fit the network.

    Cost: one forward and one backward pass. Errors are computed only if they are asked for: a backward pass for the
    energy, 3 n second derivatives for the forces of n atoms and 6 for the stress, with as many products with Σ.
    """

    implemented_properties: tuple[str, ...] = ("energy", "free_energy", "forces", "energy_std", "forces_std")

    def __init__(
        self,
        posterior: lw.Posterior,
        inputs: Callable[..., Any],
        unit: float = 1.0,
        shift: float = 0.0,
        via: lw.Scaled | None = None,
        output: int | None = None,
        **options: Any,
    ) -> None:
        outputs = posterior.tangent.width if isinstance(posterior, lw.Posterior) else 0
        if output not in range(outputs) and (output, outputs) != (None, 1):
            raise LapwingError(
                f"LaplaceCalculator needs a posterior of a network of energies (one output), not {shown(posterior)}. "
                "Write LaplaceCalculator(lw.fit(model, (x, energies)), lambda positions, atoms: positions[None]), or "
                "output=0 if the first of several outputs is the energy."
            )
        super().__init__(**options)
        self.takes_cell = len(signature(inputs).parameters) == 3
        if self.takes_cell:
            self.implemented_properties = (*self.implemented_properties, "stress", "stress_std")
        self.laplace, self.inputs, self.unit, self.shift, self.via = posterior, inputs, unit, shift, via
        self.output = output or 0

    def calculate(self, atoms: Any = None, properties: Any = ("energy",), system_changes: Any = EVERY_CHANGE) -> None:
        """Computes energy, forces and the stress of a cell, and the errors among `properties`, into `results`."""
        super().calculate(atoms, properties, system_changes)
        tangent, atoms = self.laplace.tangent, self.atoms
        like: dict[str, Any] = {"dtype": tangent.dtype, "device": tangent.device}
        positions, cell = (torch.tensor(some[:], **like, requires_grad=True) for some in (atoms.positions, atoms.cell))
        strain = torch.zeros(3, 3, **like, requires_grad=True)
        periodic = self.takes_cell and atoms.cell.rank == 3

        def energy(f: Callable[[Any], Tensor]) -> Tensor:
            moved, strained = (some + some @ (strain + strain.mT) / 2 for some in (positions, cell))
            x = self.inputs(moved, atoms, strained) if self.takes_cell else self.inputs(moved, atoms)
            return self.unit * f(x)[:, self.output].sum()

        def forces(f: Callable[[Any], Tensor]) -> Tensor:
            return -torch.autograd.grad(energy(f), positions, create_graph=True)[0]

        def stress(f: Callable[[Any], Tensor]) -> Tensor:
            return torch.autograd.grad(energy(f), strain, create_graph=True)[0][VOIGT] / atoms.get_volume()

        if "energy_std" in properties:
            self.results["energy_std"] = float(self.laplace.of(energy).std)
        if "forces_std" in properties:
            self.results["forces_std"] = self.laplace.of(forces, via=self.via).std.cpu().numpy()
        if "stress_std" in properties and periodic:
            self.results["stress_std"] = self.laplace.of(stress).std.cpu().numpy()
        with torch.enable_grad():
            value = energy(lambda x: tangent.call_with({}, x))
            slopes = torch.autograd.grad(value, (positions, strain) if periodic else (positions,))
        self.results["energy"] = self.results["free_energy"] = self.shift + float(value.detach())
        self.results["forces"] = -slopes[0].cpu().numpy()
        if periodic:
            self.results["stress"] = (slopes[1][VOIGT] / atoms.get_volume()).cpu().numpy()
