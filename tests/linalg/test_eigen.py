"""Kronecker factors that are wider than they have rows: the same eigenpairs, from their range."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.linalg import accumulation_dtype, eigen, eigen_in_place
from tests import oracle

SIZE = 60


@pytest.fixture
def ranges(monkeypatch):
    """Takes the range of matrices of any width; lists for each whether it was whole."""
    taken, inner = [], eigen._range_in_place

    def noted(*args):
        values = inner(*args)
        taken.append(values is not None)
        return values

    monkeypatch.setattr(eigen, "MIN_REDUCED_WIDTH", 0)
    monkeypatch.setattr(eigen, "_range_in_place", noted)
    return taken


def squares(rank, dtype=torch.float64):
    """Two sums of `rank` squares of whole numbers, exact in any dtype, their upper triangles unset."""
    rows = torch.randint(-3, 4, (2, rank, SIZE), generator=torch.Generator().manual_seed(rank)).to(dtype)
    sums = torch.zeros(2, SIZE, SIZE, dtype=accumulation_dtype(dtype))
    sums += rows.to(sums.dtype).mT @ rows.to(sums.dtype)
    return sums.double()


def inverse(values, vectors, precision):
    return (vectors / (values + precision)[..., None, :]) @ vectors.mT


def close(got, wanted, tolerance=1e-10):
    assert got.isfinite().all()
    assert (got - wanted).norm() <= tolerance * wanted.norm()


RIGHT = [(rank, rank) for rank in (0, 1, 5, 24, 25, 40, 60)]
TOO_HIGH = [(0, 20), (1, 24), (12, 20), (12, 30), (12, 1000)]
TOO_LOW = [(12, 10), (12, 4), (12, 3), (40, 20), (60, 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "claimed"), [*RIGHT, *TOO_HIGH, *TOO_LOW])
def test_eigenpairs_are_those_of_the_whole_matrix_whatever_rank_is_claimed(rank, claimed, dtype, ranges):
    lower = squares(rank, dtype)
    values, vectors = torch.linalg.eigh(lower)
    values[..., : SIZE - rank] = 0
    given = lower.tril() + torch.full_like(lower, 1e6).triu(1)  # the upper triangle is not read
    found_values, found_vectors = eigen_in_place(given, claimed, accumulation_dtype(dtype))
    assert (found_values.diff() >= 0).all()
    assert (found_values >= 0).all()
    close(found_vectors.mT @ found_vectors, torch.eye(SIZE).double().expand(2, -1, -1), 1e-12)
    exact = claimed == rank or rank == 0
    for precision in (1e-12, 1.0) if exact else (1e-2,):  # noise of 1e-13 stays where the rank is below what is claimed
        close(inverse(found_values, found_vectors, precision), inverse(values, vectors, precision))
    if exact:
        assert ((found_values == 0).sum(-1) == SIZE - rank).all()
    # ranges of up to two thirds of the width, with the spare columns, are tried; they hold a few directions more
    assert ranges == [rank <= claimed + eigen.SPARE] * 2 * (claimed <= 24)


def test_each_matrix_of_higher_rank_is_taken_whole(ranges):
    sums = squares(12)
    sums[1] = squares(40)[1]
    wanted = torch.linalg.eigvalsh(sums)
    values, _ = eigen_in_place(sums.clone(), 12)
    close(values, wanted, 1e-12)
    assert ranges == [True, False]


def test_rounding_of_sums_in_float32_is_no_rank(ranges):
    rows = torch.randn(1, 20, SIZE, generator=torch.Generator().manual_seed(0))
    sums = torch.zeros(1, SIZE, SIZE)
    for row in rows.split(1, 1):
        sums += 10 * row.mT @ row
    values, _ = eigen_in_place(sums.double(), 20, torch.float32)
    assert ranges == [True]
    assert (values == 0).sum() == SIZE - 20
    close(values[0, -20:], 10 * torch.linalg.svdvals(rows[0].double()).square().flip(0), 1e-6)


def test_the_global_generator_stays(ranges):
    before = torch.get_rng_state()
    eigen_in_place(squares(5), 5)
    assert torch.equal(torch.get_rng_state(), before)


def mlp():
    return nn.Sequential(nn.Linear(SIZE, 50), nn.ReLU(), nn.Linear(50, 3)).double().eval(), (SIZE,)


def dead():
    """The second layer's inputs are all 0, and it has no bias."""
    model = nn.Sequential(nn.Linear(SIZE, 50), nn.ReLU(), nn.Linear(50, 40, bias=False), nn.Linear(40, 3))
    nn.init.constant_(model[0].bias, -1e6)
    return model.double().eval(), (SIZE,)


def convolution():
    return nn.Sequential(
        nn.Conv2d(12, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 40, 2), nn.Flatten(), nn.Linear(40, 3)
    ).double().eval(), (12, 4, 4)  # fmt: skip


def twice():
    """A layer that is used twice."""
    layer = nn.Linear(SIZE, SIZE)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(SIZE, 3)).double().eval(), (SIZE,)


@pytest.mark.quick(3)
@pytest.mark.parametrize("method", [lw.KFAC(), lw.KFAC(weight_sharing="reduce"), lw.EKFAC()], ids=str)
@pytest.mark.parametrize("samples", [1, 3, 7])
@pytest.mark.parametrize("make", [mlp, dead, convolution, twice], ids=lambda make: make.__name__)
def test_posteriors_are_those_of_whole_factors(make, samples, method, ranges, monkeypatch):
    """In uneven batches, at a prior precision of 1, and one that is below the curvature and above its rounding."""
    model, shape = make()
    x, y = torch.randn(samples, *shape).double(), torch.arange(samples) % 3
    data = list(zip(x.split(4), y.split(4), strict=True))
    new = torch.randn(5, *shape).double()
    fitted = lw.fit(model, data, method, params=lw.everything, prior_precision=1.0)
    assert any(ranges)
    monkeypatch.setattr(eigen, "MIN_REDUCED_WIDTH", 10**9)
    whole = lw.fit(model, data, method, params=lw.everything, prior_precision=1.0)
    for structure, other in zip(*(p.covariance.structures.values() for p in (fitted, whole)), strict=True):
        if isinstance(method, lw.EKFAC):
            continue  # the null space of A has anyone's eigenvectors
        for name, part in structure.tensors().items():
            if name.endswith("eigenvalues"):
                close(part, other.tensors()[name])
    close(fitted.latent(new).covariance, whole.latent(new).covariance)
    weak = torch.full_like(fitted.prior.precision, 1e-5)
    here, there = (p.at(weak, None).latent(x).covariance for p in (fitted, whole))
    close(here, there, 1e-8)


@pytest.mark.parametrize("weighted", [False, True])
def test_float32_networks_and_weights_of_samples(weighted, ranges, monkeypatch):
    model, x, y = mlp()[0].float(), torch.randn(6, SIZE), torch.arange(6) % 3
    data = [(x[:4], y[:4], torch.rand(4)), (x[4:], y[4:], torch.zeros(2))]
    data = data if weighted else [batch[:2] for batch in data]
    fitted = lw.fit(model, data, lw.KFAC(), prior_precision=0.1, sample_weights=weighted)
    assert any(ranges)
    monkeypatch.setattr(eigen, "MIN_REDUCED_WIDTH", 10**9)
    whole = lw.fit(model, data, lw.KFAC(), prior_precision=0.1, sample_weights=weighted)
    new = torch.randn(5, SIZE)
    close(fitted.latent(new).covariance, whole.latent(new).covariance, 1e-5)
    torch.testing.assert_close(fitted.log_marginal_likelihood(), whole.log_marginal_likelihood(), rtol=1e-5, atol=1e-5)


def test_further_data_go_on_from_the_range(ranges):
    model, x, y = mlp()[0], torch.randn(7, SIZE).double(), torch.arange(7) % 3
    part = lw.fit(model, [(x[:3], y[:3])], lw.KFAC(), prior_precision=0.1)
    both = lw.fit(model, [(x, y)], lw.KFAC(), prior_precision=0.1)
    new = torch.randn(5, SIZE).double()
    close(part.update([(x[3:], y[3:])]).latent(new).covariance, both.latent(new).covariance)
    assert any(ranges)


def test_many_classes_are_centred_from_the_lower_triangle():
    """Products of more than 256 columns leave the upper triangle of Γ unset."""
    classes = 300
    model = nn.Linear(4, classes).double().eval()
    x, y = torch.randn(9, 4).double(), torch.randint(classes, (9,))
    fitted = lw.fit(model, [(x[:6], y[:6]), (x[6:], y[6:])], lw.KFAC(), prior_precision=1.0)
    (structure,) = fitted.covariance.structures.values()
    gamma = structure.outputs * structure.output_eigenvalues[:, None] @ structure.outputs.mT
    close(gamma[0], oracle.softmax_fisher(model(x).detach()).sum(0), 1e-12)
