"""From moments at the outputs to what a deployed network returns, as functions of tensors alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ..covariance import Latent
from ..covariance.terms import MarginalTerm
from ..errors import LapwingError, shown
from ..likelihoods import Likelihood, Link
from .tracing import Observe


def observing(
    likelihood: Likelihood, size: int, outputs: str, link: Link | None, factor: float
) -> tuple[Observe, tuple[str, ...], bool]:
    """Returns what is made of means and variances, its names, and whether it reads the variances of centred outputs.

    Args:
        likelihood: p(y|f).
        size: the number of outputs.
        outputs: "prediction" or "latent".
        link: of the likelihood; None for its default.
        factor: of the variances.

    Raises:
        LapwingError: for links without a closed form.
    """

    def scaled(variance: Tensor) -> Tensor:
        return variance if factor == 1 else variance * factor

    if outputs == "latent":
        return (lambda mean, plain, centred: (mean, scaled(plain))), ("mean", "variance"), False
    ones = torch.ones(1, size)
    chosen = likelihood.choose_link(_latent(ones, ones, ones), link)
    if not chosen.closed_form:
        closed = [f"link={kind.__name__}()" for kind in likelihood.links if kind.closed_form]
        raise LapwingError(
            f"The link {shown(chosen)} of the {likelihood.name} likelihood has no closed form. "
            + (f"Pass {' or '.join(closed)}, or write" if closed else "Write")
            + " lw.deploy(posterior, x, outputs='latent')."
        )

    def summary(mean: Tensor, plain: Tensor, centred: Tensor) -> dict[str, Tensor]:
        return likelihood.predict(_latent(mean, scaled(plain), scaled(centred)), chosen).summary()

    with torch.enable_grad():
        centred = ones.clone().requires_grad_()
        example = summary(ones, ones, centred)
        reads = any(value.requires_grad for value in example.values())
    return (lambda *moments: tuple(summary(*moments).values())), tuple(example), reads


def _latent(mean: Tensor, variance: Tensor, centred: Tensor) -> Latent:
    """Returns all that a link in closed form reads."""
    return Latent(mean, (MarginalTerm(variance, centred),))
