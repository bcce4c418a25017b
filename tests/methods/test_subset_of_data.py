"""Subset of data: the conformance checks, Full on the same points, and the evidence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.covariance import ExplicitBasis, ImplicitBasis
from lapwing.methods.subset_of_data import chosen_places
from tests import oracle
from tests.conformance import EVERY, Setup, close, cut, psd, setup
from tests.methods.test_methods import FEW, MethodConformance, OnFewNetworks
from tests.methods.test_subspace_theorems import wide_problem
from tests.refused import refused


def places_of(method: lw.SubsetOfData, samples: int) -> Tensor:
    """The points of a uniform subset."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(0))[: method.size].sort().values


def alone(problem: Setup, places: Tensor, method: lw.Method | None = None, **options: object) -> lw.Posterior:
    """A method fitted to these points only."""
    loader = cut(oracle.take(problem.x, places), problem.y[places], (len(places),))
    return problem.fit(method or lw.Full(), loader=loader, **options)


class SubsetConformance(MethodConformance):
    order_matters = True  # points are picked by their place in the data

    def sigma(self, problem, G, delta, fitted):
        factor = float(G.trace() / problem.G.trace())
        places = places_of(self.method, problem.samples)
        return oracle.laplace_covariance(factor * oracle.ggn(problem.J[places], problem.fisher[places]), delta)


class TestSubset(SubsetConformance):
    method = lw.SubsetOfData(4)


class TestAllOfTheData(OnFewNetworks, MethodConformance):
    """Every point: Full exactly."""

    method = lw.SubsetOfData(1000)

    def sigma(self, problem, G, delta, fitted):
        return oracle.laplace_covariance(G, delta)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("noise", ["given", "open"])
def test_equals_full_on_the_subset(name, noise):
    """Posterior, evidence, tuned prior and noise, and predictions equal those of a fit without the other points."""
    problem, method = setup(name), lw.SubsetOfData(5)
    options: dict = {"prior_precision": None}
    if noise == "open" and not problem.case.classification:
        options["likelihood"] = lw.Gaussian()
    mine = problem.fit(method, **options)
    theirs = alone(problem, places_of(method, 9), **options)
    assert mine.samples == theirs.samples == 5
    assert mine.data_factor == 1.0
    assert mine.prior_precision == pytest.approx(theirs.prior_precision, rel=1e-6)
    assert mine.noise_variance == pytest.approx(theirs.noise_variance, rel=1e-6) if theirs.noise_variance else True
    assert mine.log_marginal_likelihood() == pytest.approx(theirs.log_marginal_likelihood(), rel=1e-9)
    bounds = [p.log_marginal_likelihood(lower_bound=True) for p in (mine, theirs)]
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-9)
    theirs = theirs.with_prior(mine.prior_precision, mine.noise_variance)
    close(mine.covariance.to_dense(), theirs.covariance.to_dense(), 1e-8)
    close(mine.latent(problem.test).covariance, theirs.latent(problem.test).covariance, 1e-8)
    place = places_of(method, 9)
    loader = cut(oracle.take(problem.x, place), problem.y[place], (5,))
    gradient = mine.log_marginal_likelihood(linearised_mode=True, loader=loader)
    assert gradient == pytest.approx(theirs.log_marginal_likelihood(linearised_mode=True, loader=loader), rel=1e-8)


@pytest.mark.parametrize("name", ["mlp", "deep_linear"])
def test_data_size_of_a_subset_is_that_of_all_its_data(name):
    """`data_size=5 N` counts the n points as 5 n."""
    problem, method = setup(name), lw.SubsetOfData(3)
    for options, size in (({"data_size": 45}, 15), ({"temperature": 2.0}, 3)):
        mine = problem.fit(method, prior_precision=None, **options)
        theirs = alone(problem, places_of(method, 9), prior_precision=None, **{**options, "data_size": size})
        assert mine.data_factor == pytest.approx(size / 3)
        assert mine.prior_precision == pytest.approx(theirs.prior_precision, rel=1e-6)
        assert mine.log_marginal_likelihood() == pytest.approx(theirs.log_marginal_likelihood(), rel=1e-8)


def test_directions_that_exceed_the_memory_are_implicit():
    """The same posterior, to the implicit basis's 1e-5."""
    model, loader, test = wide_problem()
    options = {"prior_precision": {"0": 2.0, "2": 3.0, "4": 4.0}}
    implicit, explicit = (
        lw.fit(model, loader, lw.SubsetOfData(10), memory=memory, **options) for memory in (2**24, 2**30)
    )
    assert isinstance(explicit.covariance.basis, ExplicitBasis)
    assert isinstance(implicit.covariance.basis, ImplicitBasis)
    close(implicit.latent(test).covariance, explicit.latent(test).covariance, 1e-5)
    assert implicit.samples == 10
    assert implicit.log_marginal_likelihood() == pytest.approx(explicit.log_marginal_likelihood(), rel=1e-5)
    shuffled = DataLoader(TensorDataset(*map(torch.cat, zip(*loader, strict=True))), 5, shuffle=True)
    refused(lambda: lw.fit(model, shuffled, lw.SubsetOfData(10), memory=2**24, **options), "shuffle=False")


def test_a_subset_that_no_dense_form_can_hold_is_implicit_too():
    """More rows than the dual form of `Full` takes, and a dense covariance above the budget."""
    model = nn.Sequential(nn.Linear(10, 90), nn.Tanh(), nn.Linear(90, 1))
    x, options = torch.randn(800, 10), {"likelihood": lw.Gaussian(0.1), "prior_precision": 1.0}
    implicit, dense = (
        lw.fit(model, (x, x[:, :1]), lw.SubsetOfData(800), memory=memory, **options) for memory in (2**24, 2**30)
    )
    close(implicit.latent(x[:5]).covariance, dense.latent(x[:5]).covariance, 1e-4)


class TestChoice:
    labels = torch.tensor([3] * 50 + [0] * 5 + [7] * 45)

    def test_uniform_subsets_are_nested_and_follow_the_seed(self):
        at = lambda n, seed=0: chosen_places(100, n, torch.Generator().manual_seed(seed), None)  # noqa: E731
        assert set(at(10).tolist()) < set(at(20).tolist())
        assert torch.equal(at(100), torch.arange(100))
        assert not torch.equal(at(10), at(10, 1))
        assert len(at(40).unique()) == 40

    def test_balanced_takes_as_many_of_each_class(self):
        at = lambda n: chosen_places(100, n, torch.Generator().manual_seed(0), self.labels)  # noqa: E731
        for n, wanted in ((12, [4, 4, 4]), (30, [5, 12, 13]), (100, [5, 50, 45])):
            places = at(n)
            assert torch.equal(places, places.unique())
            counts = [int((self.labels[places] == label).sum()) for label in (0, 3, 7)]
            assert sorted(counts) == sorted(wanted)

    def test_balanced_fits(self):
        problem = setup("cnn_bn_inplace", samples=30)
        method = lw.SubsetOfData(6, sampling="balanced")
        fitted = problem.fit(method)
        places = chosen_places(30, 6, torch.Generator().manual_seed(0), problem.y)
        assert problem.y[places].bincount().max() - problem.y[places].bincount().min() <= 1
        close(fitted.covariance.to_dense(), alone(problem, places).covariance.to_dense(), 1e-8)

    def test_a_shuffling_loader(self):
        """One pass over a uniform subset is right in any order; the rest needs one order, and says so."""
        problem = setup("cnn_bn_inplace", samples=30)
        loader = DataLoader(TensorDataset(problem.x, problem.y), batch_size=7, shuffle=True)
        assert psd(problem.fit(lw.SubsetOfData(6), loader=loader).covariance.to_dense())
        refused(lambda: problem.fit(lw.SubsetOfData(6, "balanced"), loader=loader), "shuffle=False")


def test_only_the_chosen_points_are_run():
    """No forward pass of the others: the loader is read, as far as the last chosen point, and no more."""
    problem = setup("mlp", samples=9)

    def rows_in(run) -> int:
        seen = []
        handle = problem.model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
        try:
            run()
        finally:
            handle.remove()
        return sum(seen)

    batches = cut(problem.x, problem.y, (3, 3, 3))
    fit = rows_in(lambda: problem.fit(lw.SubsetOfData(2), loader=batches, tune=None))
    survey = rows_in(lambda: lw.tangent.Tangent.survey(problem.model, problem.x[:3], EVERY))
    assert fit - survey == 2
