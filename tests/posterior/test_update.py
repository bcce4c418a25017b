"""Further data: an update equals one fit to both parts, for every curvature that adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import lapwing as lw
from lapwing.covariance import Blockwise, DiagonalBlock
from lapwing.methods import Passes, Problem
from tests.conformance import close
from tests.fitting.test_continual import fisher
from tests.zoo import ZOO

ADDING = {
    "full": lw.Full(form="primal"), "dual": lw.Full(form="dual"), "diagonal": lw.Diagonal(), "kfac": lw.KFAC(),
    "kfac_dense": lw.KFAC(uncovered="dense"), "kfac_reduce": lw.KFAC(weight_sharing="reduce"),
}  # fmt: skip


def parts(name: str, cut: int = 5, samples: int = 9) -> tuple[Any, Any, Any, Any]:
    """Returns a network, two parts of its data in uneven batches, and test inputs."""
    case = ZOO[name]
    x, y = case.inputs(samples, 0), case.targets(samples, 0)
    return case.build(), [(x[:3], y[:3]), (x[3:cut], y[3:cut])], [(x[cut:8], y[cut:8]), (x[8:], y[8:])], x


def same(posterior: lw.Posterior, expected: lw.Posterior, x: Any) -> None:
    assert posterior.samples == expected.samples
    close(posterior.latent(x).covariance, expected.latent(x).covariance, 1e-10)
    for name, value in expected.statistics.items():
        close(posterior.statistics[name], value, 1e-10)
    assert posterior.log_marginal_likelihood() == pytest.approx(expected.log_marginal_likelihood(), rel=1e-10)


@pytest.mark.quick(3)
@pytest.mark.parametrize("method", ADDING)
@pytest.mark.parametrize("name", ["mlp", "cnn_bn_inplace", "tied"])
def test_an_update_equals_one_fit_to_both_parts(name: str, method: str, reloaded: Any) -> None:
    model, first, second, x = parts(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = lw.fit(model, first + second, ADDING[method], prior_precision=2.0)
    posterior = lw.fit(model, first, ADDING[method], prior_precision=2.0)
    unchanged = posterior.latent(x).covariance
    same(posterior.update(second), expected, x)
    same(posterior.update(second[:1]).update(second[1:]), expected, x)
    same(reloaded(posterior, model).update(second), expected, x)
    assert torch.equal(posterior.latent(x).covariance, unchanged)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


SUBSPACES = [
    lw.ELLA(rank=4, rows=8), lw.ELLA(rank=4, rows=8, residual="prior"), lw.SubsetOfWeights(6, by="magnitude"),
    lw.OptimalSubspace(4, curvature=lw.Diagonal(), residual="prior"),
]  # fmt: skip


@pytest.mark.parametrize("method", SUBSPACES, ids=str)
def test_subspaces_keep_their_directions(method: lw.Method) -> None:
    """Beside the dense curvature of both parts on the directions of the first."""
    model, first, second, x = parts("mlp")
    posterior = lw.fit(model, first, method, prior_precision=2.0, tune=lw.Evidence())
    updated = posterior.update(second)
    V, G = torch.cat([*posterior.covariance.basis.rows().values()], -1), fisher(model, x)  # (K, P), (P, P)
    prior = 2 * torch.eye(len(G), dtype=G.dtype)
    wanted = V.T @ torch.linalg.inv(V @ (G + prior) @ V.T) @ V
    if method.residual == "prior":  # Σ⁻¹ = Δ + ΔWᵀD⁻¹HD⁻¹WΔ
        projector = V.T @ torch.linalg.solve(V @ V.T, V)
        wanted = torch.linalg.inv(prior + projector @ G @ projector)
    close(updated.covariance.to_dense(), wanted, 1e-8)
    assert updated.log_marginal_likelihood(lower_bound=True) < updated.log_marginal_likelihood()


def test_tuned_numbers_are_kept_unless_they_are_tuned_again() -> None:
    model, first, second, _ = parts("mlp")
    posterior = lw.fit(model, first, lw.KFAC())
    updated = posterior.update(second)
    assert updated.prior_precision == posterior.prior_precision
    again = posterior.update(second, tune=lw.Evidence())
    assert again.prior_precision == pytest.approx(
        lw.fit(model, first + second, lw.KFAC(), tune=lw.Evidence()).prior_precision
    )
    given = lw.fit(model, first, lw.KFAC(), prior_precision=3.0)
    assert given.update(second, tune=lw.Evidence()).prior_precision == 3.0


HEADS = lw.Joint({"a": lw.Bernoulli(), "b": lw.Bernoulli()}, {"a": slice(0, 1), "b": slice(1, 3)})


@pytest.mark.parametrize("kind", ["softmax", "map", "yes or no", "heads"])
def test_held_out_data_choose_a_temperature_again_that_the_user_did_not_give(kind: str, reloaded: Any) -> None:
    law: Any = {"yes or no": lw.Bernoulli(), "heads": HEADS}.get(kind, lw.Categorical())
    x, model = torch.randn(400, 4).double(), torch.nn.Linear(4, 1 if kind == "yes or no" else 3).double().eval()
    y: Any = torch.distributions.Categorical(logits=model(x).detach()).sample()
    model.requires_grad_(False).weight *= 2  # too sure
    model.requires_grad_()
    if kind in ("yes or no", "heads"):
        yes = torch.bernoulli((model(x) / 2).sigmoid().detach()).bool()
        y = yes if kind == "yes or no" else {"a": yes[:, :1], "b": yes[:, 1:]}
    former, further, old, newest = ((x[k::4], tree_map(lambda part, k=k: part[k::4], y)) for k in range(4))

    def tuned(data: Any, held_out: Any, likelihood: Any = law) -> lw.Posterior:
        tune = lw.Validation(held_out, calibration="matrix" if kind == "map" else "temperature")
        if isinstance(data, lw.Posterior):
            return data.update(further, tune=tune)
        return lw.fit(model, data, lw.KFAC(), likelihood=likelihood, tune=tune)

    def logits(posterior: lw.Posterior) -> Any:
        prediction = posterior.predict(x)
        return [prediction[key].probs.logit() for key in "ab"] if kind == "heads" else [prediction.probs.logit()]

    posterior, wanted = tuned(former, old), tuned([former, further], newest)
    for one in (posterior,) if kind == "heads" else (posterior, reloaded(posterior, model)):
        for found, expected in zip(logits(tuned(one, newest)), logits(wanted), strict=True):
            close(found, expected, 1e-6)
    assert not torch.allclose(logits(posterior)[0], logits(wanted)[0], rtol=1e-3)
    if kind in ("softmax", "yes or no"):
        given = tuned(former, old, type(law)(logit_temperature=3.0))
        assert tuned(given, newest).logit_temperature == 3.0


def test_a_regression_at_a_temperature() -> None:
    x, y = torch.randn(30, 3), torch.randn(30, 1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double().eval()
    options: Any = {"likelihood": lw.Gaussian(0.3), "prior_precision": 1.0, "temperature": 2.0}
    first, second, both = ((x[rows].numpy(), y[rows].numpy()) for rows in (slice(20), slice(20, 30), slice(30)))
    expected, posterior = (lw.fit(model, data, lw.Full(), **options) for data in (both, first))
    same(posterior.update(second), expected, x.double())


@dataclass(frozen=True)
class Halved(lw.Method):
    """A method of a user, without class attributes: its sums are half of the GGN's."""

    def passes(self, problem: Problem) -> Passes:
        covariance = yield from lw.Diagonal().passes(problem)
        halves = {name: DiagonalBlock(block.eigenvalues / 2) for name, block in covariance.structures.items()}
        return Blockwise(covariance.blocks, halves, problem.precision, problem.scale.of_curvature)


def test_a_method_of_a_user_is_refused_unless_it_declares_plain_sums(reloaded: Any) -> None:
    model, first, second, _ = parts("mlp")
    posterior = lw.fit(model, first, Halved(), prior_precision=1.0)
    for one in (posterior, reloaded(posterior, model)):
        with pytest.raises(lw.LapwingError, match="curvature of Halved is not a sum over data"):
            one.update(second)


def test_an_update_over_positions_draws_as_often_as_a_fit(caplog: pytest.LogCaptureFixture) -> None:
    """Of more than 1 000 outputs over positions the Fisher information takes several draws per input."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Tanh(), torch.nn.Conv2d(2, 2, 3)).eval()
    x, y = torch.randn(4, 1, 32, 32), torch.randint(2, (4, 28, 28))
    with caplog.at_level("INFO", "lapwing"):
        lw.fit(model, [(x, y)], lw.Diagonal(), params=lw.everything, prior_precision=1.0).update([(x, y)])
    first, again = [text for text in caplog.messages if "Fisher information is sampled" in text]
    assert first == again


def test_an_update_after_early_stopping_forgets_the_first_samples() -> None:
    model, first, second, x = parts("mlp")
    held_out = lw.EarlyStopping([(x, torch.arange(len(x)) % 3)])
    posterior = lw.fit(model, first, lw.ELLA(rank=4, rows=8), tune=held_out)
    assert posterior.update(second).method.first_samples is None


def test_far_larger_residuals_of_further_data_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator)
    model = torch.nn.Linear(2, 1).eval()
    y = model(x).detach() + 0.1 * torch.randn(80, 1, generator=generator)
    posterior = lw.fit(model, (x[:60], y[:60]), lw.KFAC())
    drifted = (x[60:], y[60:] + 1)
    posterior.update((x[60:], y[60:]))
    posterior.update(drifted, tune=lw.Validation(drifted))
    assert "further data" not in caplog.text
    posterior.update(drifted)
    assert "times the noise variance" in caplog.text
    assert "tune=lw.Validation(newest)" in caplog.text
    caplog.clear()
    lw.fit(torch.nn.Linear(2, 1).eval(), drifted, prior=posterior)
    assert "without prior=" in caplog.text
