"""What methods promise whose numbers `MethodConformance` does not check: seeds, chunks, batches, low precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.tangent import Tangent
from tests.conformance import close, cut, setup

by_class = lambda method: type(method).__name__  # noqa: E731
EXACTLY = lw.SampledLLA(4, lw.ConjugateGradients(400, 1e-12))
STILL = lw.MeanField(steps=1, learning_rate=1e-3, initial_std=1e-9)
"""A step whose draws are the mean, so that the order of draws does not matter."""
FITS = lw.ClosedForm(), lw.NaturalGradient(3), lw.AlphaDivergence(steps=4), lw.VariationalBound(steps=4)
VALLA = [lw.VaLLA(4, fit, "data") for fit in FITS]


def moments(posterior: lw.Posterior) -> Tensor:
    """All that a fit decides: means and covariances of test outputs, joined."""
    latent = posterior.latent(setup("mlp").test)
    return torch.cat([latent.mean.flatten(), latent.covariance.flatten()])


@pytest.mark.parametrize("method", [EXACTLY, lw.MeanField(steps=4), *VALLA], ids=by_class)
def test_the_seed_repeats_a_fit_and_the_global_generator_stays(method):
    before = torch.get_rng_state()
    first, again, other = (moments(setup("mlp").fit(method, tune=None, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, rtol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", [EXACTLY, STILL, *VALLA[2:]], ids=by_class)
@pytest.mark.parametrize("name", ["mlp", pytest.param("tied", marks=pytest.mark.slow)])
def test_chunks_add_up(name, method, monkeypatch):
    """Batches beyond the memory budget go in chunks, whose sums and gradients add up."""
    problem = setup(name)
    whole = problem.fit(method, tune=None).latent(problem.test)
    monkeypatch.setattr(Tangent, "chunk_length", lambda *args, **kwargs: 2)
    parts = problem.fit(method, tune=None).latent(problem.test)
    close(parts.mean, whole.mean, 1e-6)
    close(parts.covariance, whole.covariance, 1e-6)


@pytest.mark.parametrize("lengths", [(4, 4, 1), (9,)])
def test_draws_do_not_depend_on_the_batches(lengths):
    problem = setup("mlp")
    other = problem.fit(EXACTLY, tune=None, loader=cut(problem.x, problem.y, lengths))
    close(moments(other), moments(problem.fit(EXACTLY, tune=None)), 1e-8)


@pytest.mark.parametrize("method", [*VALLA[:2], lw.MeanField(steps=2)], ids=by_class)
def test_bfloat16_networks_have_variances_in_float32(method):
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)).eval()
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    options = {"prior_precision": 1.0, "tune": None, "params": lw.everything}
    exact = lw.fit(model, [(x, y)], method, **options).latent(x[:5]).variance
    found = lw.fit(model.bfloat16(), [(x.bfloat16(), y)], method, **options).latent(x[:5].bfloat16()).variance
    assert found.dtype == torch.float32
    assert (found > 0).all()
    torch.testing.assert_close(found, exact, rtol=0.3, atol=0.1)
