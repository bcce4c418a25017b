"""Numbers far from one: what float32 can still give is right, what it cannot is said or refused, never NaN."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from tests import oracle
from tests.conformance import jacobian
from tests.quick import others_slow
from tests.refused import refused
from tests.zoo_modules import Net

NOISE = 0.01
DENSE = {"primal": lw.Full(form="primal"), "subset": lw.SubsetOfData(size=1000)}
DUAL = {"dual": lw.Full(form="dual"), "ella": lw.ELLA(rank=200, rows="all", residual="prior")}
OWN = {"diagonal": lw.Diagonal(), "kfac": lw.KFAC(), "ekfac": lw.EKFAC(), "dense blocks": lw.KFAC(uncovered="dense")}


class Problem:
    """A small float32 network with features of some size, in regression or classification."""

    def __init__(self, size: float, outputs: int, classes: bool, params: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs)).eval()
        self.x, self.test = size * torch.randn(60, 4), size * torch.randn(8, 4)
        self.y = torch.arange(60) % outputs if classes else torch.randn(60, outputs)
        self.likelihood = lw.Categorical() if classes else lw.Gaussian(NOISE)
        self.params = params

    def variance(self, method: lw.Method, delta: float, double: bool = False) -> Tensor:
        """Returns the latent variances (8, C) of the network, or of its copy in float64."""
        convert: Callable = (lambda value: copy.deepcopy(value).double()) if double else (lambda value: value)
        y = convert(self.y) if self.y.is_floating_point() else self.y
        loader = [(convert(self.x[rows]), y[rows]) for rows in (slice(0, 35), slice(35, 60))]
        posterior = lw.fit(
            convert(self.model), loader, method, likelihood=self.likelihood, params=self.params, prior_precision=delta,
            tune=None,
        )  # fmt: skip
        return posterior.latent(convert(self.test)).variance.double()

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns J and the Fisher information at the training inputs, and J at the test inputs, in float64."""
        model, x = copy.deepcopy(self.model).double(), self.x.double()
        blocks = lw.fit(model, [(x[:5], self.y[:5])], lw.Diagonal(), params=self.params).tangent.blocks
        f, classes = oracle.outputs(model, x), isinstance(self.likelihood, lw.Categorical)
        fisher = oracle.softmax_fisher(f) if classes else oracle.gaussian_fisher(f, self.likelihood.noise_variance)
        return jacobian(model, x, blocks), fisher, jacobian(model, self.test.double(), blocks)

    def diagonal(self, delta: float) -> Tensor:
        """Returns the variances (8, C) of the diagonal of the GGN, in float64."""
        J, fisher, wanted = self.parts()
        return (wanted.square() / (oracle.ggn(J, fisher).diagonal() + delta)).sum(-1)

    def dense(self, delta: float) -> Tensor:
        """Returns the full Laplace variances (8, C) in float64, through a QR factor of all rows and the prior's."""
        J, fisher, wanted = self.parts()
        values, vectors = torch.linalg.eigh(fisher)
        rows = ((vectors * values.clamp_min(0).sqrt()[:, None]).mT @ J).flatten(0, 1)
        stacked = torch.cat([rows, delta**0.5 * torch.eye(rows.shape[1]).double()])
        triangle = torch.linalg.qr(stacked, mode="r")[1]  # RᵀR = G + δI, of half the digits' condition
        solved = torch.linalg.solve_triangular(triangle.T, wanted.flatten(0, 1).T, upper=False)
        return solved.square().sum(0).reshape(wanted.shape[:2])


def ratios(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    return (found / wanted).min().item(), (found / wanted).max().item()


KINDS = {"regression": (2, False), "one output": (1, False), "classes": (3, True)}
PARAMS = {"all": lw.everything, "last": lw.last_layer}


def check_full(method: lw.Method, size: float, delta: float, kind: str, params: str) -> None:
    problem = Problem(size, *KINDS[kind], PARAMS[params])
    low, high = ratios(problem.variance(method, delta), problem.dense(delta))
    assert 0.99 < low <= high < 1.01, (low, high)


QUICK_FULL = [
    ("primal", "classes", "all", 1e4), ("subset", "classes", "last", 1.0), ("primal", "regression", "last", 1e4),
    ("primal", "one output", "all", 1e-4),
]  # fmt: skip
EVERY_FULL = list(product([*DENSE, *DUAL], KINDS, PARAMS, [1e-4, 1.0, 1e2, 1e4]))


@pytest.mark.parametrize("case", others_slow(EVERY_FULL, QUICK_FULL), ids=str)
def test_every_form_of_full_is_the_dense_oracle(case: tuple[str, str, str, float]) -> None:
    """If the curvature is less than 1e13 times the prior precision: beyond, float32 has lost the directions."""
    name, kind, params, size = case
    for delta in (1e-6, 1e-3, 1.0, 1e6):
        if size**2 / delta <= 1e8:
            check_full({**DENSE, **DUAL}[name], size, delta, kind, params)


@pytest.mark.parametrize("name", OWN)
def test_other_structures_are_those_of_the_network_in_float64(name: str) -> None:
    problem = Problem(1e4, 2, False, lw.everything)
    low, high = ratios(problem.variance(OWN[name], 1e-3), problem.variance(OWN[name], 1e-3, double=True))
    assert 0.99 < low <= high < 1.01, (low, high)


# --- edges: factors of rank one, layers that are dead or saturated, priors and noise far from one ---------------------
def one_input(problem: Problem) -> None:
    problem.x = problem.x[:1].expand(60, -1).contiguous()  # every Kronecker factor of the first layer has rank 1


def dead(problem: Problem) -> None:
    problem.model[0].bias.data.fill_(-1e3)  # no unit is ever active


def saturated(problem: Problem) -> None:
    problem.model[1] = nn.Tanh()
    problem.model[0].weight.data.mul_(1e3)  # the Jacobian of the first layer underflows


def sure(problem: Problem) -> None:
    problem.model[2].weight.data.mul_(1e4)  # logits of 1e4: the Fisher information underflows


def precise(problem: Problem) -> None:
    if isinstance(problem.likelihood, lw.Gaussian):
        problem.likelihood = lw.Gaussian(1e-30)


EDGES = {edge.__name__: edge for edge in (one_input, dead, saturated, sure, precise)}
AT_EDGES = {
    "full": lw.Full(form="primal"), "dual": lw.Full(form="dual"), "diagonal": lw.Diagonal(), "kfac": lw.KFAC(),
    "ekfac": lw.EKFAC(), "ella": DUAL["ella"],
}  # fmt: skip
PRIORS = (1e-12, 1e-6, 1.0, 1e6, 1e12)


def at_edge(name: str, edge: str, kind: str, params: str, delta: float, caplog: pytest.LogCaptureFixture) -> str:
    """Returns what becomes of variances at an edge: "right", "warned", "refused" or, otherwise, the ratios."""
    problem, method = Problem(1.0, *KINDS[kind], PARAMS[params]), AT_EDGES[name]
    EDGES[edge](problem)
    caplog.clear()
    try:
        found = problem.variance(method, delta)
    except lw.LapwingError as error:
        return "refused" if "not finite" in str(error) or "Scale" in str(error) else str(error)
    assert found.isfinite().all()
    assert (found >= 0).all()
    warned = any("rounding noise" in message for message in caplog.messages)
    if name in ("kfac", "ekfac"):
        wanted = problem.variance(method, delta, double=True)
    else:
        wanted = problem.diagonal(delta) if name == "diagonal" else problem.dense(delta)
    low, high = ratios(found, wanted)
    return "right" if 0.95 < low <= high < 1.05 else "warned" if warned else f"{low:.3g} to {high:.3g}"


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", [lw.Full("primal"), lw.Full("dual"), DUAL["ella"]], ids=str)
@pytest.mark.parametrize("params", PARAMS)
def test_a_shift_of_all_logits_has_no_curvature(method: lw.Method, params: str) -> None:
    """Which counts where the prior has next to none."""
    check_full(method, 1.0, 1e-12, "classes", params)


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", others_slow(AT_EDGES, ["full", "kfac", "ella"]))
@pytest.mark.parametrize("edge", EDGES)
def test_edges(name: str, edge: str, caplog: pytest.LogCaptureFixture) -> None:
    assert at_edge(name, edge, "classes", "all", 1.0, caplog) == "right"


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", AT_EDGES)
@pytest.mark.parametrize("edge", EDGES)
def test_every_edge_under_every_prior(name: str, edge: str, params: str, caplog: pytest.LogCaptureFixture) -> None:
    """Variances are those of float64, or a warning or a refusal says that float32 does not give them.

    Not of Kronecker factors beside small priors where a number is added to all logits: that has no curvature, and
    float32 sums give it some, of 1e-6 of the largest. No probability depends on it.
    """
    for kind in KINDS:
        least = 1.0 if kind == "classes" and name in ("kfac", "ekfac") else 1e-12
        for delta in (delta for delta in PRIORS if delta >= least):
            result = at_edge(name, edge, kind, params, delta, caplog)
            assert result in ("right", "warned", "refused"), (kind, delta, result)


@pytest.mark.parametrize("method", [lw.Full(form="primal"), lw.Full(form="dual"), lw.KFAC()])
def test_a_warning_says_once_where_rounding_decides(method: lw.Method, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lapwing"):
        Problem(1.0, 2, False, lw.everything).variance(method, 1e-3)
        assert not caplog.messages
        Problem(1e4, 2, False, lw.everything).variance(method, 1e-6)
    (message,) = (message for message in caplog.messages if "rounding noise" in message)
    assert "model.double()" in message


def network(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs)).eval()


@pytest.mark.parametrize("name", others_slow(AT_EDGES, ["full", "kfac"]))
@pytest.mark.parametrize(("x_size", "y_size"), [(1.0, 3e19), (1e19, 1.0)])
def test_inputs_and_targets_that_overflow_are_refused_or_their_results_are_finite(
    name: str, x_size: float, y_size: float
) -> None:
    x, y = x_size * torch.randn(12, 4), y_size * torch.randn(12, 2)
    try:
        prediction = lw.fit(network(), [(x, y)], AT_EDGES[name], tune=None).predict(x)
    except lw.LapwingError as error:
        assert "scale the inputs and the targets to about 1" in str(error).lower()  # noqa: PT017
    else:
        assert prediction.variance.isfinite().all()


@pytest.mark.parametrize("method", [lw.Full(), lw.Diagonal(), lw.KFAC()])
def test_variances_that_overflow_are_refused_at_prediction(method: lw.Method) -> None:
    model, x = network(3), torch.randn(12, 4)
    with torch.no_grad():
        model[2].weight *= 1e30
    labels = torch.randint(2, (12, 3))
    posterior = lw.fit(model, [(x, labels)], method, likelihood="bernoulli", prior_precision=1e-3)
    refused(lambda: posterior.predict(x), "not finite … Scale the inputs")
    for read in (
        lambda: posterior.latent(x).variance,
        lambda: posterior.latent([x[:7], x[7:]]).covariance,
        lambda: posterior.latent(x, joint=True),
    ):
        refused(read, "not finite")


@pytest.mark.parametrize("bad", [1e-300, 1e-44, 1e300])
def test_numbers_that_float32_cannot_express_are_refused(bad: float) -> None:
    x, y = torch.randn(12, 4), torch.randn(12, 2)
    posterior = lw.fit(network(), [(x, y)])
    for ask in (
        lambda: lw.fit(network(), [(x, y)], prior_precision=bad),
        lambda: lw.fit(network(), [(x, y)], lw.KFAC(), prior_precision={"*": 1.0, "0": bad}),
        lambda: lw.fit(network(), [(x, y)], weight_decay=bad),
        lambda: lw.fit(network(), [(x, y)], likelihood=lw.Gaussian(bad)),
        lambda: posterior.with_prior(bad),
        lambda: posterior.with_prior(1.0, noise_variance=bad),
    ):
        refused(ask, "0 or infinite in torch.float32")
    double = lw.fit(network().double(), [(x.double(), y.double())], prior_precision=1e-44)
    assert double.predict(x.double()).variance.isfinite().all()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "method",
    others_slow(
        [lw.Full(), lw.Full("dual"), lw.KFAC(), lw.Diagonal(), lw.VaLLA(40), lw.SubsetOfWeights(20), lw.ELLA(20)],
        [lw.KFAC(), lw.ELLA(20)],
    ),
    ids=lambda method: type(method).__name__ + getattr(method, "form", ""),
)
@pytest.mark.parametrize("params", PARAMS)
def test_class_probabilities_do_not_lose_digits_to_the_shift_of_all_logits(method: lw.Method, params: str) -> None:
    """A shift of all logits has the prior's variance, 1/δ, and no part in the probabilities."""
    problem = Problem(1.0, 3, True, params)
    model, test = copy.deepcopy(problem.model).double(), problem.test.double()
    options = {"params": PARAMS[params], "prior_precision": 1e-7, "tune": None}
    posterior = lw.fit(problem.model, [(problem.x, problem.y)], method, **options)
    precise = lw.fit(model, [(problem.x.double(), problem.y)], method, **options)
    for via in (lw.Linearized(), lw.Streamlined()):
        wanted = precise.predict(test, via=via).probs.float()
        torch.testing.assert_close(posterior.predict(problem.test, via=via).probs, wanted, rtol=0, atol=2e-5)
    deployed = lw.deploy(posterior, problem.test, via=lw.Streamlined())(problem.test)
    torch.testing.assert_close(deployed, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("method", [lw.KFAC(), lw.EKFAC(), lw.Diagonal()], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("params", [lw.last_layer, lw.everything], ids=["last layer", "everything"])
def test_a_head_at_positions_keeps_the_digits_of_differences_of_logits(params, method: lw.Method, mean: bool) -> None:
    """The variance of a shift of all logits has more digits here than float32."""
    # a text classifier: its last layer gives logits at every position, and the last position or their mean counts
    logits = lambda net, x: net.head(net.body(x).tanh())  # noqa: E731
    together = lambda net, x: logits(net, x).mean(1) if mean else logits(net, x)[:, -1]  # noqa: E731
    model = Net(together, body=nn.Linear(4, 6), head=nn.Linear(6, 3, bias=False))
    x, labels = torch.randn(40, 5, 4), torch.randint(3, (40,))
    options = {"params": params, "prior_precision": 1e-7, "tune": None}
    single = lw.fit(model, [(x, labels)], method, **options)
    precise = lw.fit(copy.deepcopy(model).double(), [(x.double(), labels)], method, **options)
    wanted = precise.latent(x.double()).centred_variance.float()
    torch.testing.assert_close(single.latent(x).centred_variance, wanted, rtol=0.02, atol=0.0)
