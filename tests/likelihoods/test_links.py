"""Links against numerical integration of the softmax under the latent Gaussian."""

from __future__ import annotations

import math

import pytest
import torch

import lapwing as lw
from lapwing.covariance import Latent, LatentDraws
from lapwing.covariance.terms import DenseTerm, EigenTerm, FactoredTerm
from lapwing.likelihoods import Categorical, LaplaceBridge, Probit, SampledLink
from lapwing.likelihoods import links as links_module
from tests.likelihoods.latents import dense_latent, integral, marginal_latent, random_latent

F64 = torch.float64
SCALES = ["mean", "weighted", "class", "marginal"]


@pytest.mark.quick(2)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_sampled_link_is_unbiased(size, scale):
    """200 000 draws: a standard error of at most 0.0011; five of them."""
    latent = random_latent(size=size, scale=scale)
    probs = SampledLink(draws=200_000).log_probs(latent).exp()
    pairs = zip(latent.mean, latent.covariance, strict=True)
    exact = torch.stack([integral(lambda f: f.softmax(-1), *pair) for pair in pairs])
    torch.testing.assert_close(probs, exact, atol=5.5e-3, rtol=0)
    torch.testing.assert_close(probs.sum(-1), torch.ones(4, dtype=F64))


def probit_variances(latent, scale: str):
    """The variance that scales each logit (B, C), contrast by contrast."""
    _, size = latent.mean.shape
    if scale == "marginal":
        return latent.covariance.diagonal(dim1=1, dim2=2)
    columns = []
    for c in range(size):
        contrast = torch.full((size,), -1 / (size - 1), dtype=F64)  # f_c less the mean of the others
        contrast[c] = 1.0
        columns.append(torch.einsum("c,bcd,d->b", contrast, latent.covariance, contrast))
    variances = torch.stack(columns, 1)
    if scale == "class":
        return variances
    weights = latent.mean.softmax(1) if scale == "weighted" else torch.full_like(variances, 1 / size)
    return (weights * variances).sum(1, keepdim=True).expand_as(variances)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("scale", SCALES)
def test_probit_formula(scale, size):
    latent = random_latent(size=size)
    centred = latent.mean if scale == "marginal" else latent.mean - latent.mean.mean(1, keepdim=True)
    expected = torch.softmax(centred / torch.sqrt(1 + math.pi / 8 * probit_variances(latent, scale)), -1)
    torch.testing.assert_close(Probit(scale=scale).log_probs(latent).exp(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "size"), [(1, 2), (7, 10), (5, 1000)])
def test_one_scale_keeps_the_classes(size, batch, dtype):
    """However unlike the variances are; with a scale for each class they change."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(batch, size, generator=generator).to(dtype)
    variance = (4 * torch.randn(batch, size, generator=generator)).exp().to(dtype)
    latent = Latent(mean, (EigenTerm(None, variance),))
    for scale in ("mean", "weighted"):
        assert torch.equal(Categorical().predict(latent, Probit(scale=scale)).classes, mean.argmax(1))
    if size > 2:
        assert not torch.equal(Categorical().predict(latent, Probit(scale="class")).classes, mean.argmax(1))


def correlated(size: int, shift: float) -> Latent:
    """A latent with correlated logits, and a shift common to all of them of variance ``shift``."""
    generator = torch.Generator().manual_seed(3)
    factor = 0.7 * torch.randn(6, size, size, generator=generator, dtype=F64)
    common = torch.full((6, size, 1), math.sqrt(shift), dtype=F64)
    return Latent(
        torch.randn(6, size, generator=generator, dtype=F64), (FactoredTerm(torch.cat([factor, common], -1)),)
    )


@pytest.mark.parametrize("terms", ["thin", "rotated", "diagonal", "dense"])
def test_centred_variance_of_every_term(terms):
    generator = torch.Generator().manual_seed(5)
    factor, scale = (
        torch.randn(4, 5, 3, generator=generator, dtype=F64),
        torch.rand(4, 5, generator=generator, dtype=F64),
    )
    basis = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=F64))[0]
    term = {
        "thin": FactoredTerm(factor), "rotated": EigenTerm(basis, scale), "diagonal": EigenTerm(None, scale),
        "dense": DenseTerm(factor @ factor.mT),
    }[terms]  # fmt: skip
    centre = torch.eye(5, dtype=F64) - 0.2
    expected = (centre @ term.dense() @ centre).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(Latent(torch.zeros(4, 5, dtype=F64), (term,)).centred_variance, expected)


@pytest.mark.parametrize("size", [2, 3, 10])
def test_bridge_inverts_the_bridge_of_a_dirichlet(size):
    """Laplace's approximation of Dirichlet(α) in the softmax basis has ``f ~ N(log α, diag 1/α)`` up to a constant."""
    alpha = 0.5 + 5 * torch.rand(6, size, generator=torch.Generator().manual_seed(0), dtype=F64)
    latent = marginal_latent(alpha.log() + 3.0, 1 / alpha)
    torch.testing.assert_close(LaplaceBridge().concentration(latent), alpha)
    torch.testing.assert_close(LaplaceBridge().log_probs(latent).exp(), alpha / alpha.sum(-1, keepdim=True))


def test_bridge_formula():
    """α_c = (1 - 2/C + e^{μ_c}/C² Σ e^{-μ_l}) / V_c with μ and V of the centred logits, by explicit projection."""
    latent = random_latent(size=4)
    centre = torch.eye(4, dtype=F64) - 0.25
    mean = latent.mean @ centre
    projected = (centre @ latent.covariance @ centre).diagonal(dim1=1, dim2=2)
    alpha = (1 - 2 / 4 + mean.exp() / 16 * (-mean).exp().sum(-1, keepdim=True)) / projected
    torch.testing.assert_close(LaplaceBridge().concentration(latent), alpha)


@pytest.mark.parametrize("link", [Probit(), LaplaceBridge(), SampledLink(64)])
def test_links_keep_log_accuracy_where_probabilities_underflow(link):
    mean = torch.tensor([[0.0, -60.0, -400.0]])
    logs = link.log_probs(dense_latent(mean, 1e-4 * torch.eye(3)[None]))
    assert logs.isfinite().all()
    assert logs.argmax(-1).item() == 0
    if not isinstance(link, LaplaceBridge):
        torch.testing.assert_close(
            logs, mean.log_softmax(-1), atol=2e-2 if isinstance(link, SampledLink) else 1e-6, rtol=1e-3
        )


@pytest.mark.parametrize("link", [Probit(), Probit("weighted"), Probit("class"), LaplaceBridge()])
def test_zero_variance_is_finite_and_ordered(link):
    logs = link.log_probs(marginal_latent(torch.tensor([[1.0, 0.0, -2.0]]), torch.zeros(1, 3)))
    assert logs.isfinite().all()
    assert logs[0].argsort(descending=True).tolist() == [0, 1, 2]


@pytest.mark.parametrize("link", [*map(Probit, SCALES), LaplaceBridge(), SampledLink(16)])
def test_links_are_differentiable_in_mean_and_covariance(link):
    latent = random_latent(batch=2, size=3)

    def log_probs(mean, root):
        return link.log_probs(dense_latent(mean, root @ root.mT))

    root = torch.linalg.cholesky(latent.covariance)
    assert torch.autograd.gradcheck(log_probs, (latent.mean.requires_grad_(), root.requires_grad_()))


@pytest.mark.parametrize("link", [Probit(), LaplaceBridge(), SampledLink(8)])
def test_half_precision_latents_are_worked_on_in_float32(link):
    draws = torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    latent = LatentDraws(draws) if isinstance(link, SampledLink) else marginal_latent(draws[0], draws[1].abs())
    assert link.log_probs(latent).dtype == torch.float32


def test_sampled_link_averages_the_weight_draws():
    draws = torch.randn(7, 4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    prediction = Categorical().predict(LatentDraws(draws))
    assert prediction.link == SampledLink()
    torch.testing.assert_close(prediction.probs, draws.softmax(-1).mean(0))


def test_chunks_do_not_change_the_average(monkeypatch):
    draws = torch.randn(7, 4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    whole = SampledLink().log_probs(LatentDraws(draws))
    monkeypatch.setattr(links_module, "_DRAWN_NUMBERS", 24)
    torch.testing.assert_close(SampledLink().log_probs(LatentDraws(draws)), whole)


def of_three_classes(excluded=0, value=0.0, moves=False):
    """A network of three classes, with further ones that cannot be, whose logits may move with the weights."""

    def forward(model, inputs):
        logits = model(inputs)
        others = logits[:, :1].expand(-1, excluded) if moves else torch.zeros(len(logits), excluded)
        return torch.cat([logits[:, :1], others + value, logits[:, 1:]], 1)

    return forward


@pytest.mark.quick(3)
@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize(("excluded", "value", "moves"), [(12, -1e4, False), (96, -math.inf, False), (12, -1e9, True)])
def test_classes_that_cannot_be_change_no_probability(excluded, value, moves, held_out):
    """Masked and padded classes, for every link, the prior precision and the uncertainty."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).eval()
    x, y = torch.randn(80, 4), torch.arange(80) % 3
    options = {"validation": (x[40:], y[40:])} if held_out else {}
    labels = y + excluded * (y > 0)
    options_of_all = {"validation": (x[40:], labels[40:])} if held_out else {}
    alone = lw.fit(model, (x[:40], y[:40]), lw.KFAC(), **options)
    forward = of_three_classes(excluded, value, moves)
    masked = lw.fit(model, (x[:40], labels[:40]), lw.KFAC(), forward=forward, **options_of_all)
    assert masked.prior_precision == pytest.approx(alone.prior_precision, rel=1e-3)
    links = [LaplaceBridge(), *map(Probit, SCALES)]
    kept = [0, 1 + excluded, 2 + excluded]
    for link in links:
        probs = masked.predict(x, link=link).probs
        torch.testing.assert_close(probs[:, kept], alone.predict(x, link=link).probs, rtol=0.0, atol=1e-4)
        assert probs.sum(1).sub(1).abs().max() < 1e-5
    for via in (lw.Linearized(outputs=2), lw.Linearized(outputs=10), lw.Linearized(draws=50), lw.MonteCarlo(20)):
        reference = alone.predict(x, via=lw.Linearized(outputs=3) if via == lw.Linearized(outputs=10) else via)
        torch.testing.assert_close(masked.predict(x, via=via).probs[:, kept], reference.probs, rtol=0.0, atol=1e-4)
    prediction, reference = masked.predict(x), alone.predict(x)
    torch.testing.assert_close(prediction.entropy(), reference.entropy(), rtol=0.0, atol=1e-4)
    assert prediction.mutual_information().isfinite().all()
    assert prediction.log_prob(labels).isfinite().all()


def test_classes_that_cannot_be_in_files_comparisons_and_other_shapes(reloaded):
    model, x = torch.nn.Linear(4, 3).eval(), torch.randn(20, 4)
    forward = of_three_classes(5, -math.inf)
    posterior = lw.fit(model, (x, torch.arange(20) % 3 // 2 * 7), lw.KFAC(), forward=forward)
    loaded = reloaded(posterior, model, forward=forward)
    assert torch.equal(loaded.predict(x).probs, posterior.predict(x).probs)
    assert lw.compare({"one": posterior}, (x, torch.zeros(20, dtype=torch.long)))["network"]["NLL"] > 0
    sigmoids = lw.fit(model, (x, torch.zeros(20, 8, dtype=torch.bool)), lw.KFAC(), forward=forward)
    assert sigmoids.predict(x).probs[:, 1:6].max() == 0
    maps = lw.fit(
        model, (x, torch.zeros(20, 2, dtype=torch.long)), lw.KFAC(),
        forward=lambda m, i: forward(m, i)[:, None].expand(-1, 2, -1),
    )  # fmt: skip
    torch.testing.assert_close(maps.predict(x).probs[..., 1:6].max(), torch.tensor(0.0))
    with pytest.raises(lw.LapwingError, match="NaN or infinite"):
        lw.fit(model, (x, torch.randn(20, 8)), lw.KFAC(), forward=forward)


@pytest.mark.parametrize(("where", "value"), [("forward", -1e4), ("forward", -math.inf), ("bias", -1e4)])
def test_streamlined_and_deployed_networks_leave_out_classes_that_cannot_be(where, value):
    """They equal the same calls without such classes, which a forward function or the last bias rules out."""
    model, x, y = torch.nn.Linear(4, 3).eval(), torch.randn(30, 4), torch.arange(30) % 3
    whole, forward = torch.nn.Linear(4, 5).eval(), None
    with torch.no_grad():
        whole.weight[:3], whole.bias[:3], whole.bias[3:] = model.weight, model.bias, value
    if where == "forward":
        whole, forward = model, lambda model, x: torch.nn.functional.pad(model(x), (0, 12), value=value)
    alone = lw.fit(model, (x, y), lw.Diagonal(), prior_precision=1.0)
    found = lw.fit(whole, (x, y), lw.Diagonal(), prior_precision=1.0, forward=forward)
    for call in (lambda fit: fit.predict(x, via=lw.Streamlined()).probs, lambda fit: lw.deploy(fit, x)(x)):
        torch.testing.assert_close(call(found)[:, :3], call(alone), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(found.predict(x).probs[:, :3], alone.predict(x).probs, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("value", [-1e4, -math.inf])
def test_masks_that_the_first_samples_do_not_show(value):
    """Each sample has its own mask, and the first batch has none: predictions are those of smaller networks."""
    model, x, y = torch.nn.Linear(4, 3).eval(), torch.randn(20, 4), torch.arange(20) % 2
    allowed = torch.ones(20, 3, dtype=torch.bool)
    allowed[10:, 2] = False

    def forward(model, inputs):
        return model(inputs[0]).masked_fill(~inputs[1], value)

    loader = [(x[:10], allowed[:10], y[:10]), (x[10:], allowed[10:], y[10:])]
    posterior = lw.fit(model, loader, lw.Full(), prior_precision=1.0, forward=forward)
    latent = posterior.latent((x, torch.ones_like(allowed)))
    two = Categorical().predict(dense_latent(latent.mean[10:, :2], latent.covariance[10:, :2, :2]))
    probs = posterior.predict((x, allowed)).probs
    torch.testing.assert_close(probs[10:, :2], two.probs, rtol=0.0, atol=1e-5)
    assert probs[10:, 2].max() == 0
    every = torch.cat([posterior.predict((x[i : i + 1], allowed[i : i + 1])).probs for i in range(20)])
    torch.testing.assert_close(every, probs, rtol=0.0, atol=1e-6)
