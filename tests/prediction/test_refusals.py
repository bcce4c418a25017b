"""What ways of prediction, uncertain inputs and quantities of a network refuse: the words of every message."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance import DenseCovariance
from lapwing.prediction.uncertain import prepared
from lapwing.tangent import Tangent
from tests.prediction.streamlined_oracle import F64, Function, build, psd
from tests.prediction.test_quantities import data, fitted, network
from tests.refused import each_row, refused
from tests.zoo import ZOO
from tests.zoo_modules import Net

# --- streamlined prediction ------------------------------------------------------------------------------------------


def streamlined(model: nn.Module, x: Any, at: Any = None, mode: str = "diagonal") -> None:
    """Predicts from a dense posterior of all weights, at other inputs if they are given."""
    tangent = Tangent.survey(model.double().eval(), x, lw.matching("*"))
    covariance = DenseCovariance(tangent.blocks, psd(tangent.size), torch.ones(len(tangent.blocks), dtype=F64), 1.0)
    lw.Streamlined(mode).latent(tangent, covariance, prepared(x if at is None else at))


def with_sorted_inputs() -> None:
    """Sorts 5000 uncertain numbers."""
    sorting = nn.Sequential(nn.Tanh(), Function(lambda x: x.sort(-1).values))
    model = nn.Sequential(nn.Linear(4, 5000), sorting, nn.Linear(5000, 2)).double().eval()
    tangent = Tangent.survey(model, REAL, lw.matching("0.bias"))
    lw.Streamlined().latent(tangent, build(tangent, "diagonal"), prepared(REAL))


def grouped(layer: Any) -> nn.Module:
    return nn.Sequential(layer(4, 6, 2, groups=2), nn.Flatten())


REAL, IMAGES = torch.ones(3, 4, dtype=F64), torch.randn(2, 4, 3, 2, dtype=F64)
GROUPS = "it has groups, and the posterior correlates all its weights"
INSTEAD = "lw.Linearized()"
STREAMLINED = [
    (with_sorted_inputs,
     "stops at aten.sort in '1.1' (Function): it has no moment rule, and its uncertain input has 5000 entries"),
    (lambda: streamlined(Net(lambda net, x: net.layer(x if x.sum() > 0 else -x), layer=nn.Linear(4, 2)), REAL),
     "torch.export cannot read the forward of Net"),
    (lambda: streamlined(grouped(nn.Conv2d), IMAGES), GROUPS),
    (lambda: streamlined(grouped(nn.ConvTranspose2d), IMAGES), GROUPS),
]  # fmt: skip
SHARED = {"tied": "embedding.weight", "shared_module": "shared.weight", "functional_reuse": "fc.weight"}


@each_row(STREAMLINED)
def test_a_streamlined_prediction_is_refused_with_another_way(call, words):
    refused(call, words, INSTEAD)


@pytest.mark.quick(2)
@pytest.mark.parametrize("mode", ["diagonal", "full"])
@pytest.mark.parametrize("name", SHARED)
def test_shared_weights_are_named(name, mode):
    x = ZOO[name].inputs(3, 0)
    refused(
        lambda: streamlined(ZOO[name].build(), x, mode=mode), f"share the treated parameter {SHARED[name]}", INSTEAD
    )


# --- other ways, uncertain inputs and quantities ---------------------------------------------------------------------
@cache
def posterior() -> lw.Posterior:
    return fitted()


def of(function: Any, *loader: Any, **options: Any) -> Any:
    return posterior().of(function, *loader, **options)


def of_other_likelihood() -> Any:
    class Other(lw.Gaussian):
        selects_outputs = False

    return Other(0.3).predict(posterior().latent(X, via=lw.Linearized(outputs=1)))


def uncertain_at_positions(way: lw.Linearized) -> Any:
    model, x = nn.Sequential(nn.Linear(4, 3)).eval(), torch.randn(6, 2, 4)
    posterior = lw.fit(model, (x, model(x).argmax(2)), lw.KFAC(), prior_precision=1.0)
    assert posterior.predict(lw.Uncertain(x, 0.1), via=lw.MonteCarlo(draws=3)).probs.shape == (6, 2, 3)
    return posterior.predict(lw.Uncertain(x, 0.1), via=way)


def first_or_mean(f: Any, batch: Any) -> Tensor:
    return f(batch[0]).mean() if len(batch[0]) == 4 else f(batch[0]).mean()[None]


def uncertain(**options: Any) -> lw.Uncertain:
    return lw.Uncertain(torch.randn(3, 4), **options)


X, Y = data()
NO_GRADIENT = "without a gradient"
REFUSED = [
    *((lambda outputs=outputs: lw.Linearized(outputs=outputs),
       "needs a number of outputs, at least 1, or a list of different outputs")
      for outputs in (0, -1, True, 2.5, [], [1, 1], [-1], "ab", [0.5], {1, 2})),
    *((lambda way=way: uncertain_at_positions(way), "has no uncertain inputs. Pass via=lw.MonteCarlo(draws=50).")
      for way in (lw.Linearized(), lw.Linearized(draws=8), lw.Linearized(outputs=2))),
    (of_other_likelihood, "needs all outputs of an input in their order … Leave outputs="),
    (lambda: streamlined(nn.Linear(4, 2), REAL, (REAL, torch.zeros(3))), "Linear, called as model(*inputs) on tuple"),
    (lambda: uncertain(), "neither a variance nor a covariance"),
    (lambda: uncertain(variance=0.1, covariance=torch.eye(4)), "a variance and a covariance"),
    (lambda: uncertain(variance=torch.tensor([0.1, -1.0, torch.nan, 0.0])),
     "2 of 4 variances of lw.Uncertain are negative"),
    (lambda: uncertain(variance=torch.ones(3)), "has shape (3,)"),
    (lambda: uncertain(covariance=torch.ones(3, 4)), "of shape (3, 4, 4) or (4, 4)"),
    (lambda: uncertain(covariance=torch.eye(4) + torch.ones(4, 4).triu(1)), "not symmetric"),
    (lambda: uncertain(covariance=-torch.eye(4)), "negative"),
    (lambda: of(lambda f: (f(X).sum(), f(X).mean())), "tuple … torch.stack([a, b])"),
    (lambda: of(lambda f: {"a": f(X).sum()}), "dict … torch.stack"),
    (lambda: of(lambda f: f(X)[:0]), "no number"),
    (lambda: of(lambda f: f(X, X)), "f((x_1, x_2))"),
    (lambda: of(lambda f, x, y: f(x), [(X, Y)]), "lambda f, batch:  … 'y'"),
    (lambda: of(lambda f, batch: f(X)), "without data=. Write lambda f:  … 'batch'"),
    (lambda: of(lambda f, batch: f(batch).sum(0), X), "[(x,)]) for inputs x without"),
    (lambda: of(lambda f, batch: f(batch).sum(0), [X, X]), "[(x,)]) for inputs x without"),
    (lambda: of(X), "lambda f: f"),
    (lambda: of(lambda f: f(X).detach()), f"{NO_GRADIENT} … detach"),
    (lambda: of(lambda f: f(X).argmax(1)), f"{NO_GRADIENT} … argmax"),
    (lambda: of(lambda f: 1.0), NO_GRADIENT),
    (lambda: of(lambda f: posterior().model(X)), "does not depend on f … f(x) … f.weight[name] … functional_call(part"),
    (lambda: of(lambda f: f.weight["0.wait"]), "no weight '0.wait' … f.weight['0.weight']"),
    (lambda: of(lambda f: f([(X, Y)])), "f, batch: f(batch[0])"),
    (lambda: of(lambda f, batch: f(batch[0]), [(X, Y), (X[:3], Y[:3])]), "shape (12, 2) and then shape (3, 2)"),
    (lambda: of(first_or_mean, [(X[:4],), (X[4:6],)]), "shape () and then shape (1,)"),
    (lambda: of(lambda f, batch: f(batch), []), "no batch"),
    (lambda: of(lambda f: f(X).sum() / 0), "NaN or infinite"),
    (lambda: of(lambda f: f(X * torch.nan)), "NaN or infinite"),
    (lambda: of(lambda f: (f(X) - f(X)).square().sum(0).sqrt()), "have such a gradient … the square"),
    (lambda: of(lambda f: (f.weight["0.bias"] * 0).norm()[None].sqrt()), "have such a gradient"),
    (lambda: of(lambda f: f(X), observed=1), "neither True nor False"),
    (lambda: lw.fit(network(outputs=3), (X, torch.arange(12) % 3), lw.KFAC()).of(lambda f: f(X), observed=True),
     "categorical … Leave out observed"),
    (lambda: lw.fit(network(), (X, Y[:, :1]), likelihood="heteroscedastic").of(lambda f: f(X), observed=True),
     "does not support the heteroscedastic … Leave out observed"),
]  # fmt: skip


@each_row(REFUSED)
def test_a_call_is_refused_in_these_words(call, words):
    refused(call, words)
