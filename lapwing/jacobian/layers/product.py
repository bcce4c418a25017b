"""Products of a batch with a parameter other than a linear layer over the last dimension: `torch.einsum`, `W @ x`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..jacobian import Rows
from .use import BatchAxis, Use, Watched

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class EinsumUse(Use):
    """`out = einsum(x, W)`, with a letter for each dimension. The rows are explicit: `J = einsum(x, g)`."""

    family = "einsum"

    def __init__(self, inputs: Tensor, weight: Tensor, letters: tuple[str, str, str], sample_dims: int) -> None:
        super().__init__(inputs, weight)
        self.letters, self.sample_dims = letters, sample_dims

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype, limit: int
    ) -> Rows:
        assert g is not None  # only linear layers give the outputs
        of_inputs, of_weight, of_out = self.letters
        batch, cotangent, place = [letter for letter in LETTERS if letter not in of_inputs + of_weight + of_out][:3]
        if samples == 1:
            x, g = self.inputs.unsqueeze(0), g.unsqueeze(1)
        else:
            within = of_out[axis.axis]  # letter of the dimension with the samples, and maybe positions
            if within not in of_inputs or within in of_weight:  # the inputs have no samples, so gradients are 0
                return Rows(g.new_zeros(samples, len(g), self.parameters["weight"].numel(), dtype=dtype))
            positions = "" if self.inputs.shape[axis.axis] == samples else place
            of_inputs, of_out = (of.replace(within, positions) for of in (of_inputs, of_out))
            x, g = axis.front(self.inputs, samples), axis.front(g, samples, 1)  # (B, ...), (R, B, ...)
        product = f"{batch}{of_inputs},{cotangent}{batch}{of_out}->{batch}{cotangent}{of_weight}"
        return Rows(torch.einsum(product, x.to(dtype), g.to(dtype)).flatten(2))


def einsum_use(equation: str, left: Tensor, right: Tensor, watched: Watched) -> Use | None:
    """Returns the use of the watched factor, or None if input and output share no dimension of samples.

    Sums along a dimension that only the weight has, diagonals and broadcast dimensions of length 1 are not covered.
    """
    letters = _letters(equation, left, right)
    if letters is None or watched(left) == watched(right):
        return None
    of_left, of_right, of_out = letters
    sides = (left, of_left), (right, of_right)
    (x, of_x), (weight, of_weight) = sides if watched(right) else sides[::-1]
    sizes = dict(zip(of_weight, weight.shape, strict=True)) | dict(zip(of_x, x.shape, strict=True))
    whole = all(sizes[letter] == n for letter, n in zip(of_weight, weight.shape, strict=True))
    if not whole or set(of_weight) - set(of_x + of_out):
        return None
    pairs = enumerate(zip(of_x, of_out, strict=False), 1)
    sample_dims = max((i for i, (a, b) in pairs if a == b and a not in of_weight), default=0)
    return EinsumUse(x, weight, (of_x, of_weight, of_out), sample_dims) if sample_dims else None


def _letters(equation: str, left: Tensor, right: Tensor) -> tuple[str, str, str] | None:
    """Returns the letters of both factors and of the output. An ellipsis in one factor is replaced by letters."""
    inputs, arrow, of_out = equation.replace(" ", "").partition("->")
    of_left, comma, of_right = inputs.partition(",")
    if not arrow or not comma or ("..." in of_left and "..." in of_right):
        return None
    for of, tensor in ((of_left, left), (of_right, right)):
        if "..." in of:
            free = [letter for letter in LETTERS if letter not in equation]
            more = "".join(free[: tensor.ndim - len(of) + 3])
            of_left, of_right, of_out = (part.replace("...", more) for part in (of_left, of_right, of_out))
    parts = of_left, of_right, of_out
    plain = all(part.isalpha() or not part for part in parts) and all(len(set(part)) == len(part) for part in parts)
    return parts if plain and len(of_left) == left.ndim and len(of_right) == right.ndim else None
