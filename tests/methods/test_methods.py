"""Every method on every network of the zoo, with uneven batches, against its dense float64 oracle."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance import KroneckerBlock, structures
from lapwing.jacobian.outer import Outer
from lapwing.methods import problem as problem_module
from lapwing.methods import subspace
from tests import oracle
from tests.conformance import (
    EVERY,
    PRETENDED,
    Setup,
    block_slices,
    close,
    cut,
    picked_rows,
    psd,
    setup,
    subspace_covariance,
)
from tests.conformance import subspace as span_of
from tests.conformance_factors import ekfac_curvature, kfac_curvature, kronecker_factors
from tests.network.test_untouched import untouched
from tests.quick import others_slow
from tests.zoo import ZOO
from tests.zoo_modules import Net

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")  # on a pretended device


def dense(fitted: lw.Posterior) -> Tensor:
    """Returns Σ (P, P) on the CPU."""
    return fitted.covariance.to_dense().cpu()


FEW = ("mlp", "grouped_strided_conv", "prelu", "tied")  # T = 1; T > 1 and groups; generic; two uses of one weight
LAST = (
    "mlp", "mlp_relu_inplace", "mlp_scalar", "deep_linear", "cnn_bn_inplace", "grouped_strided_conv", "residual_block",
    "frozen_trunk", "all_frozen", "attention", "mha", "vit", "gpt2", "tied", "shared_module", "functional_reuse",
    "compiled",
)  # fmt: skip
QUICK_LAST = ("mlp_scalar", "all_frozen", "tied", "functional_reuse")
POSITIONS = (*FEW, "cnn_bn_inplace", "conv1d", "attention", "mha_seq_first", "embedding_bag_of_tokens")


LIKE_ANOTHER = (
    "test_covariance_and_latent", "test_batches_chunks_and_order_do_not_matter", "test_with_prior",
    "test_save_and_load", "test_takes_the_smaller_form", "test_order_of_picks_does_not_matter",
    "test_deep_linear_network_is_exact", "test_one_sample_is_exact", "test_dense_blocks_for_the_uncovered",
)  # fmt: skip
"""Quick tests of a method that is another one by another way: what only its own sums and structure decide."""


class MethodConformance:
    """The checks; a method gives `method` and `sigma`, its dense oracle at a curvature G (noise included)."""

    method: lw.Method
    tolerance = 1e-8
    order_matters = False  # where points or rows are picked by their place in the data
    samples = 9  # for the test of invariance
    quick: tuple[str, ...] | None = None  # names of the tests that are quick; None for all (conftest.py)
    instead: ClassVar[dict[str, str]] = {}  # networks for them in place of others

    def sigma(self, problem: Setup, G: Tensor, delta: Tensor, fitted: lw.Posterior) -> Tensor:
        """Σ (P, P) for the curvature G, already scaled, and prior precisions δ (P,)."""
        raise AssertionError

    def check(self, problem: Setup, factor: float = 1.0, delta: Tensor | float = 2.0, **options: Any) -> lw.Posterior:
        fitted = problem.fit(self.method, **options)
        assert [b.name for b in fitted.tangent.blocks] == [b.name for b in problem.blocks]
        delta = oracle.precision_vector(delta, len(problem.theta))
        wanted = self.sigma(problem, factor * problem.G, delta, fitted)
        close(dense(fitted), wanted, self.tolerance)
        return fitted

    @pytest.mark.parametrize("name", others_slow(ZOO, FEW))
    def test_covariance_and_latent(self, name):
        problem = setup(name)
        fitted = self.check(problem)
        sigma = dense(fitted)
        assert psd(sigma)
        latent = fitted.latent(problem.test)
        close(latent.mean, oracle.outputs(problem.model, problem.test))
        wanted = oracle.output_covariance(problem.J_test, sigma)
        close(latent.covariance, wanted, 1e-8)
        close(latent.variance, wanted.diagonal(dim1=-2, dim2=-1), 1e-8)

    @pytest.mark.parametrize("name", ["mlp", "tied"])
    def test_last_layer(self, name):
        problem = setup(name, last_layer=True)
        fitted = self.check(problem)
        assert len(fitted.tangent.blocks) == (2 if name == "tied" else 1)  # its weight is the embedding's too
        wanted = oracle.output_covariance(problem.J_test, dense(fitted))
        close(fitted.latent(problem.test).covariance, wanted, 1e-8)

    @pytest.mark.parametrize("name", others_slow(FEW, ("grouped_strided_conv", "tied")))
    def test_batches_chunks_and_order_do_not_matter(self, name, monkeypatch):
        problem = setup(self.instead.get(name, name), samples=self.samples)
        whole = problem.fit(self.method, loader=cut(problem.x, problem.y, (self.samples,)))
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(1))
        order = order.sort().values if self.order_matters else order
        shuffled = cut(oracle.take(problem.x, order), problem.y[order], (self.samples - 5, 4, 1))
        monkeypatch.setattr(lw.tangent.Tangent, "chunk_length", lambda *args, **kwargs: 2)
        other = problem.fit(self.method, loader=shuffled)
        close(dense(other), dense(whole))
        close(other.latent(problem.test).covariance, whole.latent(problem.test).covariance)

    @pytest.mark.parametrize("name", ["deep_linear", "cnn_bn_inplace"])
    def test_temperature_and_data_size(self, name):
        problem = setup(name)
        self.check(problem, 1 / 3, temperature=3.0)
        self.check(problem, 5, data_size=45)
        self.check(problem, 5 / 3, data_size=45, temperature=3.0)

    def test_weight_decay_and_prior_mean(self):
        problem = setup("mlp")
        self.check(problem, 1, 9 * 0.3, weight_decay=0.3, prior_precision=None)
        self.check(problem, 5, 45 * 0.3, weight_decay=0.3, prior_precision=None, data_size=45)
        self.check(problem, prior_mean={"0.bias": torch.full((6,), 1.5)})  # moves the evidence, not Σ

    @pytest.mark.skipif(PRETENDED is not None, reason="the pretended device loses a number assigned to many places")
    @pytest.mark.parametrize("name", ["grouped_strided_conv", "prelu"])
    def test_prior_precision_by_layer(self, name):
        problem = setup(name)
        values = [0.5 * 1.7**i for i in range(len(problem.blocks))]
        by_name = {block.name: value for block, value in zip(problem.blocks, values, strict=True)}
        by_name = {"*": 77.0, **by_name}
        delta = problem.expand(torch.tensor(values, dtype=torch.float64))
        fitted = self.check(problem, 1, delta, prior_precision=by_name)
        assert fitted.prior_precision == {b.name: v for b, v in zip(problem.blocks, values, strict=True)}

    def test_with_prior(self):
        """The curvature is kept; subspaces keep their span, so the oracle is asked at the fit's own prior."""
        problem = setup("prelu")
        fitted = problem.fit(self.method, prior_precision=1.0)
        for delta in (0.01, 7.0):
            moved = fitted.with_prior(delta)
            assert moved.prior_precision == delta
            size = len(problem.theta)
            wanted = self.sigma(problem, problem.G, oracle.precision_vector(delta, size), fitted)
            close(dense(moved), wanted, self.tolerance)
        close(dense(fitted), self.sigma(problem, problem.G, torch.ones(size).double(), fitted), self.tolerance)

    def test_unfrozen_parameters_alone(self):
        problem = Setup(ZOO["frozen_trunk"], lw.everything)
        assert [b.name for b in problem.blocks] == ["2"]
        self.check(problem)

    def test_a_chosen_few_parameters(self):
        problem = Setup(ZOO["mlp"], lambda name, parameter: name in ("0.bias", "2.weight"))
        assert sorted(b.name for b in problem.blocks) == ["0.bias", "2"]
        self.check(problem)

    def test_the_model_is_left_alone(self):
        problem = setup("cnn_bn_inplace")
        untouched(problem.model, lambda: problem.fit(self.method).latent(problem.test))

    def test_save_and_load(self, reloaded):
        problem = setup("grouped_strided_conv")
        fitted = problem.fit(self.method, prior_precision=None)
        again = reloaded(fitted, problem.model)
        close(dense(again), dense(fitted), 1e-12)
        assert again.log_marginal_likelihood() == pytest.approx(fitted.log_marginal_likelihood(), rel=1e-12)
        close(again.latent(problem.test).covariance, fitted.latent(problem.test).covariance, 1e-12)
        close(dense(again.with_prior(3.0)), dense(fitted.with_prior(3.0)), 1e-10)

    def test_many_outputs_sample_the_fisher(self, monkeypatch):
        """One Monte-Carlo column an input: a fit is one draw, repeatable by its seed, and right in expectation."""
        problem = setup("mlp")
        monkeypatch.setattr(problem_module, "EXACT_FISHER_OUTPUTS", 2)
        first, again = (dense(problem.fit(self.method, seed=3)) for _ in range(2))
        assert torch.equal(first, again)
        assert not torch.allclose(first, dense(problem.fit(self.method, seed=4)), rtol=1e-3)
        assert psd(first)
        fitted = problem.fit(self.method, seed=3)
        wanted = oracle.output_covariance(problem.J_test, first)
        close(fitted.latent(problem.test).covariance, wanted, 1e-8)


class OnFewNetworks:
    """For a method that is another one by another way: fewer networks."""

    quick = LIKE_ANOTHER

    @pytest.mark.parametrize("name", others_slow(FEW, ("grouped_strided_conv", "tied")))
    def test_covariance_and_latent(self, name):
        super().test_covariance_and_latent(name)


class OnEveryLastLayer:
    """For a method that keeps factors: every kind of last layer."""

    @pytest.mark.parametrize("name", others_slow(LAST, QUICK_LAST))
    def test_last_layer(self, name):
        super().test_last_layer(name)


class OnEveryKindOfPosition:
    """For factors that differ from others only where a layer is used at several positions."""

    quick = LIKE_ANOTHER

    @pytest.mark.parametrize("name", others_slow(ZOO, POSITIONS))
    def test_covariance_and_latent(self, name):
        super().test_covariance_and_latent(name)


class TestDiagonal(MethodConformance):
    method = lw.Diagonal()
    quick = LIKE_ANOTHER

    def sigma(self, problem, G, delta, fitted):
        return torch.diag(1 / (G.diagonal() + delta))


class TestFullPrimal(MethodConformance):
    method = lw.Full(form="primal")

    def sigma(self, problem, G, delta, fitted):
        return oracle.laplace_covariance(G, delta)


class TestFullDual(OnFewNetworks, TestFullPrimal):
    method = lw.Full(form="dual")


class TestFullDualByGram(OnFewNetworks, TestFullPrimal):
    """What is too large for an SVD goes by the rows' Gram matrix and a QR."""

    method = lw.Full(form="dual")
    tolerance = 1e-7

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr(subspace, "SVD_NUMBERS", 0)


class TestFullAuto(OnFewNetworks, TestFullPrimal):
    method = lw.Full()

    def test_takes_the_smaller_form(self):
        assert type(setup("mlp").fit(lw.Full()).covariance).__name__ == "LowRankWithResidual"  # 27 rows, 83 weights
        for rows, name in ((18, "LowRankWithResidual"), (19, "DenseCovariance"), (40, "DenseCovariance")):
            problem = Setup(ZOO["mlp_scalar"], EVERY, rows)  # 31 weights, 18 < .6 x 31 < 19
            assert type(problem.fit(lw.Full()).covariance).__name__ == name


class EllaConformance(MethodConformance):
    residual = False
    order_matters = True

    def rows(self, problem):
        return picked_rows(problem, self.method.rows)

    def sigma(self, problem, G, delta, fitted):
        """Rows are whitened by the ratios of the fit's own prior; another scalar prior keeps the span."""
        chosen = fitted.prior.precision
        ratios = problem.expand(chosen / chosen[0]).rsqrt()
        return subspace_covariance(span_of(self.rows(problem) * ratios, self.method.rank), G, delta, self.residual)


class TestElla(EllaConformance):
    method = lw.ELLA(rank=5, rows=8)


class TestEllaWithResidual(OnFewNetworks, EllaConformance):
    method = lw.ELLA(rank=5, rows=8, residual="prior")
    residual = True


class TestEllaOfEveryRow(OnFewNetworks, EllaConformance):
    """Every training row and the residual: Full exactly."""

    method = lw.ELLA(rank=10_000, rows="all", residual="prior")
    order_matters = False

    def sigma(self, problem, G, delta, fitted):
        return oracle.laplace_covariance(G, delta)

    def test_order_of_picks_does_not_matter(self):
        problem = setup("mlp")
        close(dense(problem.fit(self.method, seed=5)), dense(problem.fit(self.method)))


# --- Kronecker factors -----------------------------------------------------------------------------------------------


class KroneckerConformance(MethodConformance):
    """KFAC and EKFAC share their checks."""

    corrected = False

    def precision_block(self, fitted: lw.Posterior, name: str) -> Tensor:
        """The curvature of one block that the structure holds, noise included."""
        covariance = fitted.covariance
        where = block_slices(fitted.tangent.blocks)[name]
        index = [block.name for block in fitted.tangent.blocks].index(name)
        dense = torch.linalg.inv(covariance.to_dense().cpu()[where, where])
        return dense - float(covariance.precision[index]) * torch.eye(len(dense)).double()

    def sigma(self, problem, G, delta, fitted):
        """By the factors of the loops; blocks without factors are diagonal."""
        factors = kronecker_factors(problem, self.method.weight_sharing == "reduce")
        structures = fitted.covariance.structures
        assert {name for name, s in structures.items() if isinstance(s, KroneckerBlock)} == set(factors)
        ratio = float(G.trace() / problem.G.trace())
        curvature = torch.zeros_like(G)
        for name, where in problem.slices.items():
            own = G[where, where]
            if name not in factors:
                curvature[where, where] = torch.diag(own.diagonal())
            elif self.corrected:
                curvature[where, where] = ekfac_curvature(own, factors[name], structures[name])
            else:
                curvature[where, where] = ratio * kfac_curvature(factors[name])
        return oracle.laplace_covariance(curvature, delta)

    def test_deep_linear_network_is_exact(self):
        """Gaussian noise and no activations: the GGN blocks are Kronecker products, for N > 1."""
        problem = setup("deep_linear")
        wanted = oracle.laplace_covariance(problem.block_diagonal(problem.G), 2.0)
        close(dense(problem.fit(self.method)), wanted)

    @pytest.mark.parametrize("name", ["mlp_scalar", "mlp_relu_inplace", "swapped_order", "custom_parameter"])
    def test_one_sample_is_exact(self, name):
        """One sample at one position: each factored block is the GGN's."""
        problem = setup(name, samples=1)
        fitted = problem.fit(self.method)
        for block, structure in fitted.covariance.structures.items():
            where = problem.slices[block]
            wanted = problem.G[where, where]
            if not isinstance(structure, KroneckerBlock):
                wanted = torch.diag(wanted.diagonal())
            close(self.precision_block(fitted, block), wanted)

    def test_dense_blocks_for_the_uncovered(self):
        problem = setup("groupnorm_rms")
        method = type(self.method)(weight_sharing=self.method.weight_sharing, uncovered="dense")
        fitted = problem.fit(method)
        plain = problem.fit(self.method)
        exact = 0
        for block, structure in fitted.covariance.structures.items():
            where = problem.slices[block]
            if structure.kind == "dense":
                exact += 1
                close(self.precision_block(fitted, block), problem.G[where, where])
            else:
                close(self.precision_block(fitted, block), self.precision_block(plain, block))
        assert exact == 3  # GroupNorm, nn.RMSNorm, HandRMSNorm


class TestKfacExpand(OnEveryLastLayer, KroneckerConformance):
    method = lw.KFAC()

    @pytest.mark.parametrize("name", others_slow(ZOO))
    def test_covariance_and_latent(self, name):
        super().test_covariance_and_latent(name)


class TestKfacReduce(OnEveryKindOfPosition, KroneckerConformance):
    method = lw.KFAC(weight_sharing="reduce")


class TestEkfacExpand(KroneckerConformance):
    method = lw.EKFAC()
    quick = LIKE_ANOTHER
    corrected = True


class TestEkfacReduce(OnEveryKindOfPosition, KroneckerConformance):
    """A null space of A has anyone's eigenvectors, mean inputs one: for few samples, where patches add up."""

    method = lw.EKFAC(weight_sharing="reduce")
    corrected = True
    samples = 40
    instead: ClassVar[dict[str, str]] = {"grouped_strided_conv": "conv1d"}


@pytest.mark.parametrize("params", [lw.everything, lw.last_layer])
@pytest.mark.parametrize("samples", [0, 5, 14, 40])
def test_kfac_of_fewer_samples_than_inputs(samples, params, monkeypatch):
    """Exact far outside the data too, by the short way and, where inputs require gradients, by the long one.

    No samples: one of zeros, which shows the bias alone.
    """
    monkeypatch.setattr(structures, "MIN_SAVED_COLUMNS", 0)
    trunk = [] if params is lw.last_layer else [nn.Linear(20, 4), nn.Tanh()]
    net = nn.Sequential(*trunk, nn.Linear(4 if trunk else 20, 3)).double().eval()
    x = torch.randn(max(samples, 1), 20).double() * (samples > 0)
    fitted = lw.fit(net, [(x, torch.zeros(len(x), dtype=torch.long))], lw.KFAC(), params=params, prior_precision=0.1)
    inputs = 10 * torch.randn(6, 20).double()
    structure = next(iter(fitted.covariance.structures.values()))
    assert structure.null_size == max(1, 21 - max(samples, 1))
    shorter, plain = [], Outer.rotate_inputs
    monkeypatch.setattr(Outer, "rotate_inputs", lambda *arguments: shorter.append(plain(*arguments)) or shorter[-1])
    rows = fitted.tangent.record(inputs).rows()
    wanted = oracle.output_covariance(rows, dense(fitted))
    latent = fitted.latent(inputs)
    assert bool(shorter) == (samples < 10)
    close(latent.covariance, wanted)
    close(latent.variance, wanted.diagonal(dim1=1, dim2=2))
    inputs.requires_grad_()
    slopes = torch.autograd.grad(fitted.latent(inputs).variance.sum(), inputs)[0]
    nudged = inputs.detach().clone()
    nudged[2, 3] += 1e-5
    there = fitted.latent(nudged).variance.sum()
    nudged[2, 3] -= 2e-5
    assert torch.isclose((there - fitted.latent(nudged).variance.sum()) / 2e-5, slopes[2, 3], rtol=1e-5)
    seen = 3 * x[:1]
    (slopes,) = torch.autograd.grad(fitted.latent(seen.requires_grad_()).variance.sum(), seen, create_graph=True)
    (curvature,) = torch.autograd.grad(slopes.sum(), seen)
    assert slopes.isfinite().all()
    assert curvature.isfinite().all()


def test_one_hot_inputs_are_in_their_eigenbasis():
    assert setup("embedding_bag_of_tokens").fit(lw.KFAC()).covariance.structures["embedding"].inputs is None


def test_variances_of_a_rare_class_are_no_rounding_noise_of_float32() -> None:
    """A weak prior gives all logits together a huge variance, which must not leak into those that a softmax sees."""
    head, x = nn.Linear(32, 4).eval(), torch.randn(2000, 32).relu()
    x[:, :12], x[:, 20:] = 0, 0.01 * x[:, 20:]
    with torch.no_grad():
        head.bias[3] -= 12.0
    variances = []
    for dtype in (torch.float32, torch.float64):
        data = [(x.to(dtype), torch.arange(2000) % 3)]
        posterior = lw.fit(head.to(dtype), data, lw.KFAC(), prior_precision=1e-5, tune=None)
        variances.append(posterior.latent(x[:100].to(dtype)).centred_variance.double())
    torch.testing.assert_close(variances[0], variances[1], rtol=0.2, atol=0)


@pytest.mark.parametrize("params", [lw.last_layer, lw.everything], ids=["last layer", "all layers"])
def test_a_constant_added_to_all_logits_has_no_curvature(params) -> None:
    """Λ maps the ones to 0: in float32 rounding would give the last layer's Γ a smallest eigenvalue of 1e-7."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    data = [(torch.randn(40, 4), torch.arange(40) % 3)]
    factors = lw.fit(model, data, lw.KFAC(), params=params, tune=None).covariance.structures["2"]
    assert factors.output_eigenvalues.min() <= 1e-15 * factors.output_eigenvalues.max()


@pytest.mark.parametrize("method", [lw.KFAC, lw.EKFAC])
def test_kronecker_factors_warn_if_most_weights_have_none(method, caplog):
    together = lambda net, x: net.outer(torch.tanh(net.inner(x, x)))  # noqa: E731
    model = Net(together, inner=nn.Bilinear(4, 4, 6), outer=nn.Linear(6, 3)).eval()
    data = (torch.randn(20, 4), torch.arange(20) % 3)
    for params, options, warnings in (
        (lw.everything, {}, 1), (lw.everything, {"uncovered": "dense"}, 0), (lw.last_layer, {}, 0),
    ):  # fmt: skip
        caplog.clear()
        lw.fit(model, data, method(**options), params=params, prior_precision=1.0)
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(lines) == warnings
        assert all("ignores the covariances of 102 of 123 weights" in line for line in lines)
