"""The default tuning without held-out data: `classifier_width.py` for classifiers, `regression_width.py` otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from ..covariance import has_prior
from ..network.entry import outside_modes
from ..options import at_least, option, positive
from ..posterior import Posterior
from .classifier_width import number_of_inputs, with_bounded_cost
from .evidence import Evidence, Training, Tuning
from .regression_width import inputs_read, with_left_out_width


@dataclass(frozen=True)
class BoundedEvidence(Tuning):
    """Prior precision and noise variance without held-out data: the default tuning of `lw.fit`.

    Classification: `δ = max(δ_evidence, min{δ : mean_n [log p(y_n|f_n) - log p(y_n|N(f_n, J_n Σ_δ J_nᵀ))] <= nats})`.
    The evidence approximates the loss by a quadratic. If a classifier is sure of its training labels, its loss is flat
    next to a slope, so the curvature is small and the evidence (of `Evidence`, with one δ) spreads the weights too
    wide. The prior precision is raised until the spread costs the training data at most `nats` per sample.

    Regression: `(δ, σ²) = (δ*/c, c σ*²)`, `c = s/(σ*² + mean_n J_n Σ* J_nᵀ)`. The linearised network is a Gaussian
    process, whose evidence is highest at (δ*, σ*²). Its leave-one-out predictions give s, the width of predictions of
    unseen targets, and c scales the covariance of any method to this width (for `Full`, which separates seen from
    unseen inputs, the width at unseen inputs). So networks that overfit or interpolate get the right width too, also if
    only the last layer is treated. Widths are at least the mean squared residual.

    All trained weights count in networks of at most a million weights, most of them with a layer family. In larger
    networks only the treated weights count. Freeze the weights that other data trained (`requires_grad`). A prior
    precision that the user gave is kept, and so is a covariance that chose its own prior (`SampledLLA`, `MeanField`):
    then σ² makes the width. If the user gave the noise variance, the evidence chooses the prior precision. A
    sample whose outputs have positions is left out with all of them.

    Args:
        nats: maximum cost of the spread, in nats per training sample, with the default link.
        samples: maximum number of training samples that are read, four times as many for a regression. They come in
            whole batches spread evenly over the loader, which should not be sorted. If a classifier's outputs have
            positions, each position is a sample; a last layer reads 16 times as many. At least 8 inputs are read.
        decades: range of the search above the evidence's δ, in powers of ten.
        points: number of candidates in that range; the cost is interpolated between them.

    Raises:
        LapwingError: if a number is out of range, or the loader has no samples.

    Cost: for classifiers the cost of the evidence, and one pass over the loader for `samples` samples, which are
    recorded and contracted once. For the default probit link the squares of J are summed over classes, and the
    `points` candidates cost almost nothing; other links need variances or Gram matrices of the outputs for each
    candidate. If more than 1 000 classes need a backward pass each, 16 random combinations estimate their mean
    variance. For regressions: a kernel of at most 2 000 rows over all trained weights, 500 if a sample has more than
    200 outputs, its eigenvalues, and predictions of the samples.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(32, 4), torch.arange(32) % 3
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> evidence = lw.fit(model, [(x, y)], tune=lw.Evidence()).prior_precision
        >>> lw.fit(model, [(x, y)], tune=lw.BoundedEvidence()).prior_precision >= evidence
        True
    """

    nats: float = option(0.005, positive())
    samples: int = option(500, at_least(1))
    decades: float = option(8.0, positive())
    points: int = option(17, at_least(3))

    @outside_modes
    def tune(self, posterior: Posterior, training: Training = Training()) -> Posterior:  # noqa: B008 (frozen)
        """Returns the posterior at the evidence's prior precision within the bound, or at the width of a regression."""
        residual = posterior.likelihood.residual_variance(posterior.statistics)
        if residual is not None and not posterior.noise_fixed:
            return with_left_out_width(posterior, residual, training, 4 * self.samples)
        if not has_prior(posterior.covariance):
            return posterior
        tuned = Evidence().tune(posterior)
        if posterior.prior.fixed or tuned.noise_variance is not None:
            return tuned
        return with_bounded_cost(tuned, training, self.samples, self.nats, self.decades, self.points)

    def training_samples(self, posterior: Posterior) -> int:
        if not posterior.noise_fixed:
            return inputs_read(posterior, 4 * self.samples)
        if posterior.prior.fixed or posterior.likelihood.needs_noise:
            return 0
        return number_of_inputs(posterior, self.samples)
