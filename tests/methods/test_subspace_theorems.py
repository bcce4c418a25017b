"""What the papers and the design state of subspace posteriors: bounds, orders, limits of implicit bases, stopping.

The Jacobian is named J at all training inputs (NC, P) and J̃ at M sampled rows; P̃ projects on the span of J̃.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import lapwing as lw
from lapwing.covariance import ImplicitBasis
from lapwing.network.generic import jvp
from lapwing.tangent import record
from tests import oracle
from tests.conformance import close, picked_rows, setup, subspace


def norm(matrix: Tensor) -> Tensor:
    """The spectral norm."""
    return torch.linalg.matrix_norm(matrix, 2)


# --- ELLA, section 4 -------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "delta"), [("mlp", 0.05), ("conv1d", 2.0), ("cnn_bn_inplace", 0.05), ("tied", 2.0)])
def test_ella_theorem_1(name, delta):
    """`‖Σ' - Σ‖ <= σ₀⁴ c_Λ E' + σ₀²` with K = M; and with the residual `‖T - Σ‖ <= 2 σ₀⁴ c_Λ ‖J‖ √E'`.

    The theorem is loose: `0 ≼ Σ' ≼ Σ ≼ σ₀²I` gives σ₀² at once, and all rows reach it. `T = (P̃ G P̃ + I/σ₀²)⁻¹` of its
    proof is ELLA with the residual, whose bound vanishes with E'. (The proof has E' for `2 ‖J‖ √E'`: it takes the
    largest eigenvalue of a product that is not symmetric for its norm.)
    """
    problem = setup(name)
    J = problem.J.flatten(0, 1)
    exact = oracle.laplace_covariance(problem.G, delta)
    bound = max(norm(block) for block in problem.fisher)  # c_Λ
    for count, seed in ((1, 0), (4, 1), (9, 2), (len(J), 3)):
        rows = picked_rows(problem, count, seed)
        V = subspace(rows)
        outside = J - J @ V.T @ V
        error = norm(outside @ outside.T)  # `‖J P̃ Jᵀ - J Jᵀ‖`, the paper's E'
        options = {"prior_precision": delta, "seed": seed}
        published = problem.fit(lw.ELLA(count, count), **options).covariance.to_dense()
        assert norm(published - exact) <= (bound * error / delta + 1 + 1e-9) / delta
        converging = problem.fit(lw.ELLA(count, count, "prior"), **options).covariance.to_dense()
        assert norm(converging - exact) <= 2 * bound * norm(J) * error.sqrt() / delta**2 + 1e-9 / delta
        V = subspace(rows)
        outside = torch.eye(len(exact)).double() - V.T @ V
        close(converging, published + outside / delta, 1e-8)  # the span is that of the sampled rows (equation 18)


@pytest.mark.parametrize("name", ["mlp", pytest.param("conv1d", marks=pytest.mark.slow)])
def test_ella_theorem_2_and_corollary_1(name):
    """`λ_M+1 <= E' <= λ_M+1 + NC/√M c_κ (2 + log 1/p)` but for a share p of seeds, and with it the bound on Σ'."""
    problem = setup(name)
    J, delta, chance = problem.J.flatten(0, 1), 2.0, 0.25
    exact = oracle.laplace_covariance(problem.G, delta)
    kernel = J @ J.T
    values = torch.linalg.eigvalsh(kernel).flip(0)
    bound = float(max(torch.linalg.eigvalsh(block).max() for block in problem.fisher))
    means = []
    for count in (2, 6, 12):
        beyond, errors = 0, []
        for seed in range(12):
            fitted = problem.fit(lw.ELLA(count, count), seed=seed).covariance
            V = torch.cat([*fitted.basis.rows().values()], -1)
            outside = J - J @ V.T @ V  # what the fit itself leaves out, V orthonormal
            error = norm(outside @ outside.T)
            allowed = values[count] + len(J) / count**0.5 * kernel.diagonal().max() * (2 - torch.tensor(chance).log())
            beyond += bool(error > allowed or norm(fitted.to_dense() - exact) > bound * allowed / delta**2 + 1 / delta)
            assert error >= values[count] * (1 - 1e-9)  # Eckart and Young: no M directions do better
            errors.append(error)
        assert beyond <= chance * 12
        means.append(float(torch.stack(errors).mean()))
    assert all(fewer > more for fewer, more in pairwise(means))  # "decreases along with the growing of M"


# --- orders -----------------------------------------------------------------------------------------------------------

CHAINS: dict[str, list[lw.Method]] = {
    "ELLA": [*(lw.ELLA(rank, 12) for rank in (1, 2, 4, 12)), lw.Full()],
    "ELLA with the residual": [lw.ELLA(4, 12), lw.ELLA(4, 12, "prior")],
    "OptimalSubspace by KFAC": [*(lw.OptimalSubspace(rank, lw.KFAC(), 15) for rank in (1, 3, 8)), lw.Full()],
    "OptimalSubspace by the prior": [*(lw.OptimalSubspace(rank, "prior", 15) for rank in (1, 3, 8)), lw.Full()],
    "OptimalSubspace with the residual": [lw.OptimalSubspace(3, lw.KFAC(), 15, each) for each in (None, "prior")],
    "SubsetOfWeights": [*(lw.SubsetOfWeights(size) for size in (1, 5, 11)), lw.Full()],
    "SubsetOfWeights with the residual": [lw.SubsetOfWeights(7, "magnitude", each) for each in (None, "prior")],
    "SubsetOfData": [lw.Full(), *(lw.SubsetOfData(size) for size in (8, 5, 2, 1))],
    "VaLLA": [lw.VaLLA(6, lw.ClosedForm(), "data")],
}
"""Methods whose covariances grow: with nested directions or weights, with the residual, and with fewer points."""


@pytest.mark.quick(11)
@pytest.mark.parametrize("delta", [0.01, 2.0])
@pytest.mark.parametrize(
    ("name", "chain"), [*(("mlp", chain) for chain in CHAINS), *((name, "ELLA") for name in ("conv1d", "tied"))]
)
def test_covariances_grow_along_a_chain_from_zero_to_the_prior(name, chain, delta):
    """`0 ≼ Σ_1 ≼ Σ_2 ... ≼ I/δ`; for predictions too, which includes Faller and Martin's order of traces."""
    problem = setup(name)
    inside = [problem.fit(method, prior_precision=delta).covariance.to_dense() for method in CHAINS[chain]]
    prior = torch.eye(len(problem.theta)).double() / delta
    for lower, upper in pairwise([torch.zeros_like(prior), *inside, prior]):
        assert torch.linalg.eigvalsh(upper - lower).min() > -1e-10 / delta


def wide_problem() -> tuple[nn.Module, list, Tensor]:
    """A network of 76 000 weights: 24 rows of J exceed 14 MB, so 16 MiB hold them and little else, 40 do not fit."""
    layers = [nn.Linear(20, 260), nn.Tanh(), nn.Linear(260, 260), nn.Tanh(), nn.Linear(260, 3)]
    model = nn.Sequential(*layers).double().eval()
    x, y = torch.randn(14, 20).double(), torch.randint(3, (14,))
    test = torch.randn(4, 20).double()
    return model, [(x[:9], y[:9]), (x[9:13], y[9:13]), (x[13:], y[13:])], test


@pytest.mark.parametrize("delta", [0.1, 3.0])
def test_every_row_implicit_with_residual_is_full(delta):
    """Section 4's limit at 1e-5 for a V that is never written out, reached by the memory budget alone."""
    model, loader, test = wide_problem()
    options = {"prior_precision": delta, "tune": lw.Evidence()}
    full = lw.fit(model, loader, lw.Full("dual"), **options)
    implicit = lw.fit(model, loader, lw.ELLA(10**6, "all", "prior"), memory=2**24, **options)
    assert isinstance(implicit.covariance.basis, ImplicitBasis)
    assert implicit.covariance.rank == 42
    close(implicit.latent(test).covariance, full.latent(test).covariance, 1e-5)
    close(implicit.latent(test, joint=True).covariance, full.latent(test, joint=True).covariance, 1e-5)
    evidence = full.log_marginal_likelihood()
    assert implicit.log_marginal_likelihood() == pytest.approx(evidence, rel=1e-5)
    assert implicit.log_marginal_likelihood(lower_bound=True) == pytest.approx(evidence, rel=1e-5)
    moved = implicit.with_prior(7.0).latent(test).covariance
    close(moved, full.with_prior(7.0).latent(test).covariance, 1e-5)


def test_a_thousand_outputs_go_by_forward_mode(monkeypatch):
    """2K < C: `J V` by K directional derivatives, in the fit and in predictions, equal to loops over directions."""
    calls = []
    forward = record.forward_products
    monkeypatch.setattr(record, "forward_products", lambda *a: calls.append(1) or forward(*a))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1000)).double().eval()
    x, y, test = torch.randn(9, 5).double(), torch.randint(1000, (9,)), torch.randn(2, 5).double()
    fitted = lw.fit(model, [(x[:4], y[:4]), (x[4:], y[4:])], lw.ELLA(6, 20), prior_precision=0.7, tune=None)
    assert len(calls) >= 2
    del calls[:]
    latent = fitted.latent(test)
    assert calls

    names = {name: value.detach() for name, value in model.named_parameters()}
    V = split_directions(fitted, names)
    width = sum(value.numel() for value in names.values())
    flat = torch.cat([V[name].flatten(1) for name in names], 1)
    close(flat @ flat.T, torch.eye(6).double())
    picked = torch.randperm(9000, generator=torch.Generator().manual_seed(0))[:20]
    rows = torch.stack([row(model, x[i // 1000], i % 1000) for i in picked.tolist()])
    assert rows.shape == (20, width)
    close(torch.linalg.svdvals(flat @ subspace(rows, 6).T), torch.ones(6).double(), 1e-8)  # equations 12 to 16

    def products(inputs: Tensor) -> Tensor:
        """`J V` (B, C, K), one direction at a time (equation 17)."""
        call = lambda values: functional_call(model, values, (inputs,))  # noqa: E731
        return torch.stack([jvp(call, (names,), ({n: V[n][k] for n in names},))[1] for k in range(6)], -1)

    phi, fisher = products(x), oracle.softmax_fisher(model(x).detach())
    inner = torch.einsum("nck,ncd,ndl->kl", phi, fisher, phi) + 0.7 * torch.eye(6).double()
    wanted = torch.einsum("bck,kl,bdl->bcd", products(test), torch.linalg.inv(inner), products(test))  # equation 6
    close(latent.covariance, wanted, 1e-8)
    assert torch.isfinite(fitted.predict(test).probs).all()


def split_directions(fitted: lw.Posterior, names: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the directions of an explicit basis by parameter, (K, *shape)."""
    found = {}
    for block in fitted.tangent.blocks:
        matrix = fitted.covariance.basis.rows()[block.name].reshape(-1, *block.matrix_shape[1:])
        weight, bias = block.parameters
        found[weight], found[bias] = matrix[..., :-1].reshape(-1, *names[weight].shape), matrix[..., -1]
    return found


def row(model: nn.Module, sample: Tensor, output: int) -> Tensor:
    """The gradient of one output at one sample (P,)."""
    gradients = torch.autograd.grad(model(sample[None])[0, output], list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, list, tuple[Tensor, Tensor]]:
    """A network that knows 512 of scikit-learn's digits by heart, too sure of itself; these, and test images."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16.0).float().reshape(-1, 1, 8, 8), torch.tensor(labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        order = torch.randperm(len(x))
        x, y = x[order], y[order]
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        optimiser = torch.optim.Adam(model.parameters(), 3e-3)
        for step in range(600):
            rows = slice(64 * (step % 8), 64 * (step % 8) + 64)
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
    with torch.no_grad():
        for parameter in model[3].parameters():
            parameter *= 3  # far too sure of itself
    return model.eval(), list(zip(x[:512].split(100), y[:512].split(100), strict=True)), (x[512:], y[512:])


def score(posterior: lw.Posterior, data: list[tuple[Tensor, Tensor]]) -> float:
    return float(torch.cat([posterior.predict(x).log_prob(y) for x, y in data]).mean())


@pytest.mark.parametrize(
    ("form", "delta"), [("scaled", 100.0), pytest.param("published", 16.0, marks=pytest.mark.slow)]
)
def test_early_stopping_on_augmented_digits(digits, form, delta):
    """ELLA, section 5.2, with a given δ: the prefix with the best score on augmented training images is chosen."""
    model, loader, (x_test, y_test) = digits
    generator = torch.Generator().manual_seed(1)
    augmented = [(x + 0.27 * torch.randn(x.shape, generator=generator), y) for x, y in loader]
    method = lw.ELLA(20, 200)
    tune = lw.EarlyStopping(augmented, form=form)
    stopped = lw.fit(model, loader, method, prior_precision=delta, tune=tune)

    whole = lw.fit(model, loader, method, prior_precision=delta)
    V = torch.cat([*whole.covariance.basis.rows().values()], -1).double()  # (K, P)
    held_out, scores = list(augmented), {}
    for count in (512 >> i for i in range(10)):
        inner = torch.zeros(20, 20).double()
        for x in torch.cat([x for x, _ in loader])[:count].split(100):
            J = whole.tangent.record(x).rows().double()
            fisher, phi = oracle.softmax_fisher(model(x).detach().double()), J @ V.T
            inner += torch.einsum("nck,ncd,ndl->kl", phi, fisher, phi)
        share = count / 512 if form == "scaled" else 1.0
        sigma = torch.linalg.inv(inner + share * delta * torch.eye(20).double())
        scores[count] = dense_score(whole, V, sigma, held_out)
    best = max(scores, key=scores.__getitem__)
    assert score(stopped, held_out) == pytest.approx(scores[best], abs=1e-5)
    assert scores[stopped.samples] == pytest.approx(scores[best], abs=1e-5)
    assert 1 < best < 512
    map_score = float(torch.log_softmax(model(x_test).detach(), 1)[torch.arange(len(y_test)), y_test].mean())
    test = [(x_test, y_test)]
    assert score(stopped, test) > map_score  # what was chosen without test images helps on them


def dense_score(posterior: lw.Posterior, V: Tensor, sigma: Tensor, data: list[tuple[Tensor, Tensor]]) -> float:
    """The mean log likelihood of the default link, from a covariance on directions V (K, P)."""
    found = []
    for x, y in data:
        phi = posterior.tangent.record(x).rows().double() @ V.T
        mean = posterior.model(x).detach().double()
        centred = phi - phi.mean(1, keepdim=True)  # a softmax does not see a shift common to all outputs
        variance = (torch.einsum("bck,kl,bcl->bc", centred, sigma, centred) * (10 / 9) ** 2).mean(1, keepdim=True)
        logits = (mean - mean.mean(1, keepdim=True)) / (1 + torch.pi / 8 * variance).sqrt()
        found.append(torch.log_softmax(logits, 1)[torch.arange(len(y)), y])
    return float(torch.cat(found).mean())
