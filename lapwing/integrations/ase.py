"""An ASE calculator around a posterior over a network of energies: `LaplaceCalculator`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lapwing as lw

from ..errors import LapwingError, extra, shown

__all__ = ["LaplaceCalculator"]

_calculator: Any = extra("ase.calculators.calculator")
EVERY_CHANGE = _calculator.all_changes


class LaplaceCalculator(_calculator.Calculator):
    """A network of energies as an ASE calculator of energy and forces, with their errors by the posterior.

    `E = shift + unit f(x(r))` and `F = -dE/dr`. The errors are the properties "energy_std" and "forces_std", standard
    deviations that uncertain weights cause: `calculator.get_property("forces_std", atoms)`.

    Args:
        posterior: posterior of a network with one output.
        inputs: `inputs(positions, atoms)` returns the network's inputs for one structure, a batch of one sample,
            computed from the positions (n, 3), a tensor that requires gradients.
        unit: energy in eV of one unit of f.
        shift: energy in eV at f = 0.
        via: `lw.scale_factor(posterior, held_out, of=forces)`, whose factor widens the errors of forces; None means 1.
        options: options of `ase.calculators.calculator.Calculator`.

    Raises:
        LapwingError: if the first argument is not a posterior, or if the network has several outputs.

    Cost: one forward and one backward pass. Errors are computed only if they are asked for: a backward pass for the
    energy, and 3 n second derivatives for the forces of n atoms, with as many products with Σ.
    """

    implemented_properties = ("energy", "forces", "energy_std", "forces_std")

    def __init__(
        self,
        posterior: lw.Posterior,
        inputs: Callable[[Tensor, Any], Any],
        unit: float = 1.0,
        shift: float = 0.0,
        via: lw.Scaled | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(posterior, lw.Posterior) or posterior.tangent.width != 1:
            raise LapwingError(
                f"LaplaceCalculator needs a posterior of a network of energies (one output), not {shown(posterior)}. "
                "Write LaplaceCalculator(lw.fit(model, (x, energies)), lambda positions, atoms: positions[None])."
            )
        super().__init__(**options)
        self.laplace, self.inputs, self.unit, self.shift, self.via = posterior, inputs, unit, shift, via

    def calculate(self, atoms: Any = None, properties: Any = ("energy",), system_changes: Any = EVERY_CHANGE) -> None:
        """Computes energy and forces, and the errors among `properties`, into `results`."""
        super().calculate(atoms, properties, system_changes)
        tangent = self.laplace.tangent
        positions = torch.tensor(self.atoms.positions, dtype=tangent.dtype, device=tangent.device, requires_grad=True)

        def energy(f: Callable[[Any], Tensor]) -> Tensor:
            return self.unit * f(self.inputs(positions, self.atoms)).sum()

        def forces(f: Callable[[Any], Tensor]) -> Tensor:
            return -torch.autograd.grad(energy(f), positions, create_graph=True)[0]

        if "energy_std" in properties:
            self.results["energy_std"] = float(self.laplace.of(energy).std)
        if "forces_std" in properties:
            self.results["forces_std"] = self.laplace.of(forces, via=self.via).std.cpu().numpy()
        with torch.enable_grad():
            value = energy(lambda x: tangent.call_with({}, x))
            slope = torch.autograd.grad(value, positions)[0]
        self.results |= {"energy": self.shift + float(value.detach()), "forces": -slope.cpu().numpy()}
