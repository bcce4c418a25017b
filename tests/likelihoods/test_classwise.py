"""Mutual information and class probabilities by quadrature over one class at a time, against many draws."""

from __future__ import annotations

import math

import pytest
import torch

import lapwing as lw
from lapwing.covariance import JointLatent, Latent, LinearDraws
from lapwing.covariance.terms import DenseTerm, EigenTerm, FactoredTerm
from lapwing.likelihoods import Bernoulli, Categorical, Probit, Quadrature, quadrature
from tests.likelihoods.latents import dense_latent, random_latent

F64 = torch.float64


def correlated(size: int, batch: int = 4, scale: float = 1.0) -> Latent:
    """A latent with correlated logits whose variances differ, and means of their size."""
    generator = torch.Generator().manual_seed(size)
    mean = 2 * torch.randn(batch, size, generator=generator, dtype=F64)
    widths = torch.rand(batch, size, 1, generator=generator, dtype=F64)
    factor = widths * torch.randn(batch, size, size, generator=generator, dtype=F64) * math.sqrt(scale / size)
    return dense_latent(mean, factor @ factor.mT)


def by_draws(latent: Latent, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mutual information (B,) and the class probabilities (B, C) by Sobol draws."""
    sobol = torch.quasirandom.SobolEngine(latent.mean.shape[1], scramble=True, seed=0)
    normal = torch.special.ndtri(sobol.draw(count, dtype=F64).clamp(1e-12, 1 - 1e-12))
    values, vectors = torch.linalg.eigh(latent.covariance)
    information, probs = [], []
    for mean, root in zip(latent.mean, vectors * values.clamp_min(0).sqrt()[:, None], strict=True):
        logs = (mean + normal @ root.T).log_softmax(-1)
        probs.append(logs.exp().mean(0))
        information.append((logs.exp() * (logs - probs[-1].clamp_min(1e-300).log())).sum(-1).mean())
    return torch.stack(information), torch.stack(probs)


def information(latent: object) -> torch.Tensor:
    return Categorical().predict(latent).mutual_information()


@pytest.mark.parametrize(
    ("size", "count", "tolerance"), [(2, 2**17, 1e-3), (3, 2**17, 0.06), (10, 2**15, 0.05), (100, 2**13, 0.06)]
)
def test_mutual_information_against_many_draws(size, count, tolerance):
    latent = correlated(size)
    torch.testing.assert_close(information(latent), by_draws(latent, count)[0], rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("size", [3, 10])
def test_probabilities_are_closer_to_the_average_than_the_probit(size):
    latent = correlated(size, batch=16, scale=4.0)
    exact = by_draws(latent, 2**14)[1]
    quadrature, probit = (Categorical().predict(latent, link).probs for link in (Quadrature(), Probit()))
    torch.testing.assert_close(quadrature.sum(-1), torch.ones(16, dtype=F64))
    assert (quadrature - exact).abs().mean() < 0.25 * (probit - exact).abs().mean()
    assert (quadrature - exact).abs().max() < 0.02


@pytest.mark.parametrize("scale", [0.1, 4.0, 100.0])
def test_two_classes_are_a_bernoulli_output(scale):
    latent = correlated(2, scale=scale)
    gap = torch.tensor([[-1.0, 1.0]], dtype=F64)
    one = dense_latent(latent.mean @ gap.T, (gap @ latent.covariance @ gap.T))
    yes, classes = Bernoulli().predict(one), Categorical().predict(latent, Quadrature())
    torch.testing.assert_close(classes.probs[:, 1:], yes.probs)
    torch.testing.assert_close(classes.mutual_information(), yes.mutual_information(), rtol=1e-4, atol=1e-9)


def test_no_spread_is_exactly_no_information():
    mean = torch.tensor([[3.0, 0.0, -math.inf], [0.0, 1.0, 2.0], [90.0, 0.0, -90.0]])
    assert torch.equal(information(Latent(mean, (EigenTerm(None, torch.zeros(3, 3)),))), torch.zeros(3))
    assert torch.equal(information(Latent(mean[:, :1], (EigenTerm(None, torch.ones(3, 1)),))), torch.zeros(3))
    nothing = Latent(mean[:0], (EigenTerm(None, torch.zeros(0, 3)),))
    assert information(nothing).shape == (0,)


def test_rest_of_the_batch_does_not_matter():
    latent = correlated(10, batch=6)
    for row in range(6):
        torch.testing.assert_close(information(latent.taken(torch.tensor([row]))), information(latent)[row : row + 1])


@pytest.mark.parametrize("value", [-math.inf, -1e9])
def test_classes_that_cannot_be_leave_the_others(value):
    latent = correlated(3, scale=4.0)
    mean = torch.cat([latent.mean, torch.full((4, 2), value, dtype=F64)], 1)
    covariance = torch.zeros(4, 5, 5, dtype=F64)
    covariance[:, :3, :3] = latent.covariance
    padded = dense_latent(mean, covariance).without_impossible()
    torch.testing.assert_close(information(padded), information(latent))
    probs = Categorical().predict(padded, Quadrature()).probs
    torch.testing.assert_close(probs[:, :3], Categorical().predict(latent, Quadrature()).probs)
    assert probs[:, 3:].max() == 0


def test_sure_inputs_keep_their_digits_in_float32():
    """1 - p of the most probable class is 1e-9 and less here, below the digits of float32."""
    latent = correlated(4, scale=0.5)
    sure = Latent(latent.mean + torch.tensor([25.0, 0.0, 0.0, 0.0]), latent.terms)
    single = dense_latent(sure.mean.float(), latent.covariance.float())
    torch.testing.assert_close(information(single).double(), information(sure), rtol=1e-3, atol=0.0)
    assert (information(sure) > 0).all()
    assert information(sure).max() < 1e-6
    torch.testing.assert_close(information(sure), by_draws(sure, 2**15)[0], rtol=0.05, atol=0.0)


def test_never_negative():
    """And of the right size, even if the standard deviations are 30 000."""
    for scale in (1e-6, 1e-2, 1.0, 1e3, 1e6, 1e9):
        latent = correlated(7, batch=50, scale=scale)
        for dtype in (F64, torch.float32):
            found = information(dense_latent(latent.mean.to(dtype), latent.covariance.to(dtype)))
            assert found.dtype == dtype
            assert ((found >= 0) & (found < 1.1 * math.log(7))).all()
            if scale > 10:
                torch.testing.assert_close(found.double(), by_draws(latent, 2**10)[0], rtol=0.0, atol=0.3)


def test_gradients():
    latent = correlated(3, batch=2)

    def of(mean, root):
        prediction = Categorical().predict(dense_latent(mean, root @ root.mT), Quadrature())
        return prediction.mutual_information(), prediction.probs

    root = torch.linalg.cholesky(latent.covariance).requires_grad_()
    assert torch.autograd.gradcheck(of, (latent.mean.requires_grad_(), root))
    mean = torch.tensor([[60.0, 0.0, -math.inf], [1.0, 0.0, -1.0], [0.0, 0.0, -math.inf]], requires_grad=True)
    variance = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1e4, 1e4, 0.0]], requires_grad=True)
    information(Latent(mean, (EigenTerm(None, variance),))).sum().backward()
    assert mean.grad.isfinite().all()
    assert variance.grad.isfinite().all()


def kinds_of_latents() -> dict[str, object]:
    """Latents with the same covariances in several forms."""
    generator = torch.Generator().manual_seed(0)
    mean, factor = (torch.randn(3, 4, *more, generator=generator, dtype=F64) for more in ((), (6,)))
    scale = torch.rand(3, 6, generator=generator, dtype=F64)
    dense = torch.einsum("bck,bk,bdk->bcd", factor, scale, factor)
    joint = torch.randn(3, 4, 3, 4, generator=generator, dtype=F64)
    joint[range(3), :, range(3)] = dense
    deviations = (factor * scale.sqrt().unsqueeze(1)).permute(2, 0, 1) * math.sqrt(6)
    return {
        "matrix": Latent(mean, (DenseTerm(dense),)), "factor": Latent(mean, (FactoredTerm(factor, scale),)),
        "sum": Latent(mean, (DenseTerm(0.25 * dense), FactoredTerm(factor, 0.75 * scale))),
        "joint": JointLatent(mean, joint), "linear draws": LinearDraws(mean, deviations),
        "joint linear draws": LinearDraws(mean, deviations, joint=True),
    }  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in kinds_of_latents() if kind != "matrix"])
def test_every_form_of_a_covariance(kind):
    latents = kinds_of_latents()
    torch.testing.assert_close(information(latents[kind]), information(latents["matrix"]))
    found, expected = (Categorical().predict(latents[name], Quadrature()).probs for name in (kind, "matrix"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rotated", [False, True])
def test_eigenvalues_of_a_last_layer(rotated):
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=F64))[0] if rotated else None
    term = EigenTerm(basis, torch.rand(3, 5, generator=generator, dtype=F64))
    mean, vectors = (
        torch.randn(3, 5, generator=generator, dtype=F64),
        torch.randn(3, 2, 5, generator=generator, dtype=F64),
    )
    torch.testing.assert_close(term.times(vectors), torch.einsum("bcd,bkd->bkc", term.dense(), vectors))
    torch.testing.assert_close(
        information(Latent(mean, (term,))), information(Latent(mean, (DenseTerm(term.dense()),)))
    )


def test_many_classes_and_selected_outputs_use_draws():
    prediction = Categorical().predict(correlated(101, batch=2))
    assert torch.equal(prediction.mutual_information(), prediction.mutual_information(512))
    torch.manual_seed(0)
    x, y = torch.randn(40, 4), torch.arange(40) % 8
    posterior = lw.fit(torch.nn.Linear(4, 8).eval(), [(x, y)], lw.KFAC(), prior_precision=1.0)
    selected = posterior.predict(x, via=lw.Linearized(outputs=3))
    assert torch.equal(selected.mutual_information(), selected.mutual_information(512))
    assert lw.scale_factor(posterior, [(x, y)], link=Quadrature()).factor > 0


def test_a_number_of_draws_is_still_drawn():
    latent = random_latent(batch=3)
    prediction = Categorical().predict(latent)
    few, many = (prediction.mutual_information(draws) for draws in (8, 50_000))
    assert not torch.allclose(few, prediction.mutual_information(), rtol=0.02)
    torch.testing.assert_close(many, prediction.mutual_information(), rtol=0.05, atol=0.0)


def test_constants_made_in_inference_mode_serve_gradients() -> None:
    quadrature._constants.cache_clear()
    mean, variance = torch.tensor([[0.3, -1.0]]).double(), torch.tensor([[0.5, 2.0]]).double()
    with torch.inference_mode():
        wanted = quadrature.information(mean, variance)
    mean.requires_grad_()
    found = quadrature.information(mean, variance)
    found.sum().backward()
    assert torch.equal(found, wanted)
    assert mean.grad is not None
    assert mean.grad.abs().min() > 0
