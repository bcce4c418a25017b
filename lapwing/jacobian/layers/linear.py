"""Linear layers: `F.linear` (so `nn.Linear`, attention, functional reuse), Hugging Face's `Conv1D`, `x @ W`, `x @ W.T`.

Other products of a batch with a parameter, `W @ x`, three-dimensional weights and `torch.einsum`, are `EinsumUse`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import ascii_letters

import torch
from torch import Tensor
from torch.nn import functional as F

from ..blocks import Matrix
from ..jacobian import Rows
from ..outer import Outer
from ..shared_outer import SharedOuter
from ..strips import Box, Strip, at
from .use import BatchAxis, Use, Watched, aten, by_name, outer_jacobian, register_reader, with_bias_column


class LinearUse(Use):
    """`out = a Wᵀ + b` over the last dimension, at any number of positions.

    The weight may be the transpose of a watched parameter: `x @ W.T`, `F.linear(x, W.t())`.
    """

    family = "linear"
    is_product = True
    features = -1

    def __init__(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, watched: Watched = lambda _: True
    ) -> None:
        base = None if watched(weight) else weight._base
        turned = base is not None and weight.shape == base.shape[::-1] and weight.stride() == base.stride()[::-1]
        if base is not None and turned and watched(base):
            self.view, weight, transposed = weight, base, not transposed
        super().__init__(inputs, weight, bias)
        self.transposed = transposed
        self.sample_dims = inputs.ndim - 1

    def matrix(self) -> Matrix:
        return Matrix.of(self.parameters["weight"].shape, transposed=self.transposed)

    def position_inputs(self, grid: Sequence[int], step: int) -> Iterator[Tensor]:
        return iter(self.inputs.flatten(0, -2).split(step))

    def jacobian(
        self, g: Tensor | None, axis: BatchAxis, samples: int, roles: frozenset[str], dtype: torch.dtype, limit: int
    ) -> Outer | SharedOuter:
        """Returns the block Jacobian. Positions are all dimensions between the samples and the features."""
        a = axis.front(self.inputs, samples)  # (B, *grid, I)
        g = None if g is None else axis.front(g, samples, 1)  # (R, B, *grid, O)
        if a.ndim == 2:  # one position
            a, g = a.to(dtype), None if g is None else g.to(dtype).transpose(0, 1)
            outputs = self.parameters["weight"].shape[self.transposed]
            if "weight" in roles:
                return Outer(a, g, outputs, bias="bias" in roles)
            return Outer(with_bias_column(a, roles), g, outputs)
        assert g is not None  # outputs (B, C) have one position per sample
        gradients, layout = g, self.matrix()

        def part(box: Box) -> Strip:
            some, there = at(a, box, 1), at(gradients, box, 2)
            some = some.reshape(samples, -1, 1, some.shape[-1])  # (B, t, 1, I)
            return some, there.reshape(len(there), samples, -1, 1, layout.outputs).transpose(0, 1)  # (B, R, t, 1, O)

        return outer_jacobian(part, a.shape[1:-1], (samples, len(g)), layout, roles, dtype, limit)


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
        (of_inputs, of_weight, of_out), used = self.letters, "".join(self.letters)
        batch, cotangent, place = [letter for letter in ascii_letters if letter not in used][:3]
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
            free = [letter for letter in ascii_letters if letter not in equation]
            more = "".join(free[: tensor.ndim - len(of) + 3])
            of_left, of_right, of_out = (part.replace("...", more) for part in (of_left, of_right, of_out))
    parts = of_left, of_right, of_out
    plain = all(part.isalpha() or not part for part in parts) and all(len(set(part)) == len(part) for part in parts)
    return parts if plain and len(of_left) == left.ndim and len(of_right) == right.ndim else None


def _linear(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    if kwargs or len(args) != 3:
        named = by_name(("input", "weight", "bias"), args, kwargs)
        args = named["input"], named["weight"], named.get("bias")
    inputs, weight, bias = args
    return LinearUse(inputs, weight, bias, False, watched) if inputs.ndim > 1 and weight.ndim == 2 else None


def _addmm(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    if kwargs or len(args) != 3 or args[0].ndim != 1 or args[0].shape[0] != args[2].shape[-1]:
        return None
    return LinearUse(args[1], args[2], args[0], True, watched)


def _matmul(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    if kwargs or len(args) != 2 or not all(isinstance(arg, Tensor) and arg.ndim > 1 for arg in args):
        return None
    left, right = args
    if right.ndim == 2 and not watched(left):
        return LinearUse(left, right, None, True, watched)
    letters = "abcdefgh"[: max(left.ndim, right.ndim) - 2]  # one for each batch dimension, counted from the last
    first, second = (letters[len(letters) + 2 - one.ndim :] for one in args)
    return einsum_use(f"{first}ij,{second}jk->{max(first, second, key=len)}ik", left, right, watched)


def _einsum(args: tuple, kwargs: dict, watched: Watched) -> Use | None:
    if kwargs or len(args) != 3 or not isinstance(args[0], str) or not all(isinstance(x, Tensor) for x in args[1:]):
        return None
    return einsum_use(*args, watched)


register_reader(_linear, F.linear, aten.linear.default)
register_reader(_addmm, torch.addmm, aten.addmm.default)
register_reader(_matmul, torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm)
register_reader(_matmul, torch.Tensor.__matmul__, aten.matmul.default, aten.mm.default, aten.bmm.default)
register_reader(_einsum, torch.einsum)
