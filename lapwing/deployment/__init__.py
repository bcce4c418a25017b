"""Deployed networks: predictions with error bars as plain modules, for `torch.compile`, `torch.export` and ONNX.

It uses posteriors and the programs of `prediction/streamlined`. Only the package's `__init__` imports it. Begin with
`deploy` below, then read `predictor.py`.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..covariance import Factor, Latent
from ..covariance.terms import DenseTerm, MarginalTerm
from ..data import batches
from ..data.data import Data
from ..data.frames import as_inputs
from ..data.inputs import Inputs
from ..errors import LapwingError, check_choice, shown
from ..fitting import Novelty
from ..fitting.novelty import doubt, doubt_of
from ..likelihoods import BernoulliPrediction, ClassPrediction, Likelihood, Link, Quadrature
from ..likelihoods.classwise import CLASSES
from ..network.entry import outside_modes
from ..options import POSITIVE_OF_EACH, check_argument, instance_of
from ..posterior import Posterior
from ..prediction import Linearized, Scaled, Way, default_way
from ..prediction.streamlined import Streamlined
from ..tuning import Amortized, scale_factor
from .export import Observe, Results, trace
from .predictor import Predictor

log = logging.getLogger("lapwing")

MIN_LEVEL_INPUTS, MAX_LEVEL_INPUTS = 8, 64
"""Minimum and maximum number of inputs that fit the level of variances. At most `MIN_LEVEL_INPUTS` read the network."""


@outside_modes
def deploy(
    posterior: Posterior,
    x: Any,
    via: Way | None = None,
    outputs: Literal["prediction", "scores", "latent"] = "prediction",
    link: Link | None = None,
    novelty: Novelty | None = None,
    data: Any = None,
) -> Predictor:
    """Returns a network with its error bars as a module of plain calls: `posterior.predict(x, via=predictor.via)`.

    The buffers of the module are copies of the weights, and constants from their covariances. It runs in eager mode,
    under `torch.compile`, through `torch.export`, on another device, and as ONNX (`predictor.to_onnx(path, x)`), for
    any batch. It computes only the moments of the outputs that the results need: covariances for "scores" of classes.

    Args:
        posterior: the posterior.
        x: example inputs: a tensor, or a tuple or dict of tensors, with any number of samples. Lengths above 1 of
            integer and boolean inputs may vary later if the network allows it. Other shapes may not.
        via: `Streamlined` in diagonal mode; `lw.amortize(posterior, loader)`, which adds the output "beyond" (B,);
            `Linearized` if only the last layer is treated; `Scaled` of one of them. None means `Streamlined`,
            scaled by `lw.scale_factor(..., to=lw.Linearized())` unless that is 1 for a last layer; or the way of a
            detector that was made with via=.
        outputs: "prediction": probabilities (B, C), or for regression means and variances (B, C) of y, noise included;
            and for Student t noise its degrees of freedom (), also as `predictor.df`. For `lw.Joint` each head has
            these, by `key_name`;
            "scores": probabilities (B, C), entropy (B,) and mutual information (B,), for up to 100 classes;
            "latent": means and variances (B, C) of the network's outputs.
        link: link from logits to probabilities in closed form; None means the link that held-out data chose, or else
            the likelihood's own.
        novelty: detector of `lw.novelty`. Its "novelty" or "p_value" (B,) is the last output. One of a posterior is
            made for the way that is deployed: `lw.novelty(posterior, loader, held_out=held_out, via=way)`.
        data: training or held-out data, (x, y) or a loader, for the factor if the example has fewer than 8 inputs.

    Raises:
        LapwingError: for a way, link or structure of inputs that cannot be deployed.

    Cost: once, a few seconds, a copy of the network, and `lw.scale_factor` of at most 64 inputs. Per call, in products
    of a layer's size: one before the first treated layer, two after it, three at one with a diagonal posterior.

    Source: Li et al., Streamlining Prediction in Bayesian Deep Learning, section 3; run times in its appendix B.7.

    Example:
        >>> import torch, lapwing as lw
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)).eval()
        >>> x, y = torch.randn(20, 4), torch.arange(20) % 3
        >>> posterior = lw.fit(model, [(x, y)], lw.Diagonal(), prior_precision=10.0)
        >>> predictor = lw.deploy(posterior, x)
        >>> torch.allclose(predictor(x), posterior.predict(x, via=predictor.via).probs, atol=1e-6)
        True
    """
    if not isinstance(posterior, Posterior):
        raise LapwingError(
            f"lw.deploy takes a posterior first, not {batches.describe(posterior)}. Write "
            "lw.deploy(lw.fit(model, loader), x)."
        )
    if posterior.tangent.positions.several:
        raise LapwingError(
            f"The outputs of {type(posterior.model).__name__} have positions, and a deployed network returns one row "
            "per input. Predict with posterior.predict(x), or with via=lw.Streamlined()."
        )
    check_choice("lw.deploy", "outputs", outputs, ("prediction", "scores", "latent"))
    rule = instance_of("a detector", Novelty, type(None))
    check_argument("lw.deploy", "novelty", novelty, rule, "lw.novelty(model, loader)")
    x = as_inputs(x, posterior.tangent.model)
    names, keys = _named(x)
    if via is None:
        via = _default_way(posterior, x, data) if novelty is None or novelty.via is None else novelty.via
    exported, factor, linearised = _exported_way(via)
    inputs = Inputs.of(dict(x) if keys else x)
    posterior.latent(inputs.take(slice(0, 2)), via=via)  # raises if the way does not support the inputs
    likelihood, size = posterior.likelihood, posterior.tangent.outputs
    link = posterior.aim.link if link is None and posterior.aim is not None else link
    doubts = novelty is not None and novelty.posterior is not None
    observe, returns, kinds, df = _observing(likelihood, size, outputs, link, factor, doubts)
    example = inputs.take(slice(0, MIN_LEVEL_INPUTS))
    if novelty is not None and novelty.posterior is not None:
        _check_doubt(posterior, via, novelty, example)
    layer = None if outputs == "latent" else posterior.likelihood.features_read
    wanted = Results(observe, kinds, novelty, layer)
    traced = trace(posterior.tangent, posterior.covariance, exported, example, wanted, linearised)
    returns += ("beyond",) if isinstance(exported, Amortized) else ()
    last = () if novelty is None else ("novelty" if novelty.held_out is None else "p_value",)
    return Predictor(traced, names, keys, (*returns, *last), via, df)


def _default_way(posterior: Posterior, x: Any, data: Any) -> Way:
    """Returns `Streamlined`, at the level of linearisation by the example or the data. Warns if both are too few."""
    if posterior.aim is not None and isinstance(posterior.aim.via, Streamlined):
        return posterior.aim.via  # held-out data chose the prior precision for it
    if posterior.aim is not None and posterior.aim.other_way is not None:
        log.warning(
            "Held-out data chose the numbers of the posterior for %r, which cannot be deployed. Write "
            "tune=lw.Validation(held_out, via=lw.Streamlined()).", posterior.aim.via,
        )  # fmt: skip
    if posterior.tangent.treats_one_layer:
        return Streamlined()  # equals linearisation
    inputs = Inputs.of(x)
    if inputs.samples < MIN_LEVEL_INPUTS and data is not None:
        inputs = Data.of(data, posterior).first.inputs
    if inputs.samples >= MIN_LEVEL_INPUTS or posterior.tangent.treats_output_alone:  # its level hardly varies
        some, way = inputs.take(slice(0, MAX_LEVEL_INPUTS)), default_way(posterior.tangent)
        return scale_factor(posterior, some, Streamlined(), to=way)
    log.warning(
        "Streamlined variances may be several times too large or too small. For the level of posterior.predict write "
        "lw.deploy(posterior, x) with at least %d inputs x, or with data=(x_train, y_train).", MIN_LEVEL_INPUTS,
    )  # fmt: skip
    return Streamlined()


def _check_doubt(posterior: Posterior, via: Way, novelty: Novelty, example: Inputs) -> None:
    """Raises unless the held-out doubts of a detector come from this posterior and this way."""
    doubting, way = novelty.posterior, novelty.via
    assert doubting is not None
    tuned = None if posterior.aim is None else posterior.aim.via
    exact = all(each is None or each == Linearized() or isinstance(each, Streamlined) for each in (via, way or tuned))
    if exact and doubting is posterior and posterior.tangent.treats_one_layer:
        return  # equal except for rounding, which matters at a weak prior
    mine, theirs = doubt(posterior, example, via), doubt(doubting, example, way)
    if not torch.allclose(mine, theirs, rtol=0.01, atol=1e-6):
        raise LapwingError(
            f"The held-out doubts of this detector are by another way or posterior than via={shown(via)}, so its "
            "p-values would be wrong. Write detector = lw.novelty(posterior, loader, held_out=held_out, via=way), with "
            "the posterior and the way that are deployed, such as way = lw.deploy(posterior, x).via."
        )


def _exported_way(via: Way) -> tuple[Streamlined | Amortized, Factor, bool]:
    """Returns the way that is exported, the factor of its variances, and whether `via` is `Linearized`."""
    factor: Factor = 1.0
    inner = via
    while isinstance(inner, Scaled):
        factor, inner = POSITIVE_OF_EACH.convert(np.multiply(factor, inner.factor)), inner.via
    if isinstance(inner, Linearized) and inner == Linearized():
        return Streamlined(), factor, True  # equal if only the last layer is treated
    if isinstance(inner, Amortized) or (isinstance(inner, Streamlined) and inner.covariance == "diagonal"):
        return inner, factor, False
    raise LapwingError(
        f"via={shown(via)} cannot be deployed. Write lw.deploy(posterior, x, via=lw.Streamlined()), in diagonal mode; "
        "via=lw.amortize(posterior, loader); via=lw.Linearized() if only the last layer is treated; or lw.Scaled(...) "
        "of one of them."
    )


def _named(x: Any) -> tuple[tuple[str, ...], bool]:
    """Returns the names of the inputs, and whether they are a dict."""
    if isinstance(x, Tensor):
        return (), False
    keys = hasattr(x, "keys")
    leaves = dict(x) if keys else {f"x{place}": leaf for place, leaf in enumerate(x if isinstance(x, tuple) else ())}
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves.values()):
        raise LapwingError(
            f"The inputs {batches.describe(x)} are neither a tensor nor a flat tuple or dict of tensors. Pass such an "
            "example to lw.deploy, with forward=lambda model, inputs: model(...) in lw.fit."
        )
    return tuple(leaves), keys


def _observing(
    likelihood: Likelihood, size: int, outputs: str, link: Link | None, factor: Factor, doubts: bool
) -> tuple[Observe, tuple[str, ...], int, float | None]:
    """Returns a function from moments to results, their names, the number of kinds of moments that it reads, and ν.

    With `doubts` the last result is the doubt, which has no name: a p-value reads it.
    """
    scored = outputs == "scores"
    ones, chosen = torch.ones(1, size), None if outputs == "latent" else _closed_link(likelihood, size, link)
    information = likelihood.reads_covariance(Quadrature())  # mutual information reads the same
    matrix = information if scored or doubts else chosen is not None and likelihood.reads_covariance(chosen)
    if information and (scored or doubts) and size > CLASSES:
        raise LapwingError(
            f"outputs='scores' and the doubt of a detector are for labels of up to {CLASSES} classes, and the network "
            f"has {size}. Write lw.deploy(posterior, x), or predict with posterior.predict(x)."
        )

    def prediction(latent: Latent, features: Tensor | None) -> Any:
        return likelihood.predicted(latent.scaled(factor), chosen, features=features)

    def results(latent: Latent, features: Tensor | None) -> dict[str, Tensor]:
        if chosen is None:
            found = {"mean": latent.mean, "variance": latent.scaled(factor).variance}
        else:
            whole = prediction(latent, features)
            found = whole.summary() | (_scores(likelihood, whole) if scored else {})
        if doubts:
            known = found.get("mutual_information")
            found["doubt"] = doubt_of(likelihood, latent.scaled(factor)) if known is None else known
        return found

    noises = [part.input_noise for part in likelihood.regressions.values() if part.input_noise is not None]
    centre = noises[0].centre[None] if noises else None
    with torch.enable_grad():
        ones = ones if centre is None else ones.to(centre.device)
        centred = ones.clone().requires_grad_()
        term = DenseTerm(torch.eye(size).to(ones)[None], centred) if matrix else MarginalTerm(ones, centred)
        example = Latent(ones, (term,))
        found = results(example, centre)
        kinds = 3 if matrix else 1 + any(value.requires_grad for value in found.values())
    df = None if chosen is None else getattr(prediction(example, centre), "df", None)
    found.pop("doubt", None)
    return (lambda *moments: tuple(results(*moments).values())), tuple(found), kinds, df


def _closed_link(likelihood: Likelihood, size: int, link: Link | None) -> Link:
    chosen = likelihood.choose_link(Latent(torch.ones(1, size), ()), link)
    if chosen.closed_form:
        return chosen
    closed = [f"link=lw.{kind.__name__}()" for kind in likelihood.links if kind.closed_form]
    raise LapwingError(
        f"The link {shown(chosen)} of the {likelihood.name} likelihood has no closed form. "
        + (f"Pass {' or '.join(closed)}, or write" if closed else "Write")
        + " lw.deploy(posterior, x, outputs='latent')."
    )


def _scores(likelihood: Likelihood, prediction: Any) -> dict[str, Tensor]:
    if isinstance(prediction, (BernoulliPrediction, ClassPrediction)):
        return {"entropy": prediction.entropy(), "mutual_information": prediction.mutual_information()}
    raise LapwingError(
        f"outputs='scores' is for labels, and the {likelihood.name} likelihood has other targets. Write "
        "lw.deploy(posterior, x), or predict with posterior.predict(x)."
    )


__all__ = ["Predictor", "deploy"]
