"""`posterior.of`: numbers that are computed from a network, against joint latents, dense oracles and draws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import lapwing as lw
from lapwing.tangent import split
from tests.conformance import close
from tests.input_noise import with_input_noise
from tests.zoo_modules import Net

F64 = torch.float64
METHODS = [
    lw.Full(), lw.Diagonal(), lw.KFAC(), lw.EKFAC(), lw.ELLA(rank=5, rows=20),
    lw.ELLA(rank=5, rows=20, residual="prior"), lw.OptimalSubspace(rank=4), lw.SubsetOfWeights(size=6),
    lw.SubsetOfData(size=7), lw.VaLLA(inducing_points=4), lw.SampledLLA(draws=5), "mean field", "swag",
]  # fmt: skip


def network(dtype: torch.dtype = F64, outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).to(dtype).eval()


def data(count: int = 12, outputs: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=generator, dtype=F64)
    return x, x.sum(1, keepdim=True).sin().expand(-1, outputs) + 0.1


def fitted(method: Any = None, model: nn.Module | None = None, **options: Any) -> lw.Posterior:
    model = network() if model is None else model
    x, y = data(outputs=model[-1].out_features)
    x, y = (part.to(next(model.parameters()).dtype) for part in (x, y))
    likelihood = lw.Gaussian(0.1)
    if method == "mean field":
        variances = {name: torch.rand_like(value) for name, value in model.named_parameters()}
        return lw.MeanField.from_variances(model, variances, (x, y), likelihood=likelihood)
    if method == "swag":
        snapshots = lw.SWAG.collector(model)
        for _ in range(3):
            for value in model.parameters():
                value.data.add_(0.1 * torch.randn_like(value))
            snapshots.snapshot()
        return lw.SWAG.from_snapshots(snapshots, (x, y), likelihood=likelihood)
    return lw.fit(model, (x, y), method or lw.Full(), likelihood=likelihood, prior_precision=2.0, **options)


def test_a_part_of_the_network() -> None:
    """The refusal of `model[:2](x)` names this line."""
    posterior, x = fitted(), data(3, seed=2)[0]
    model: Any = posterior.model
    part = model[:2]
    names = ("0.weight", "0.bias")
    found = posterior.of(lambda f: functional_call(part, {name: f.weight[name] for name in names}, x).flatten())
    weights = {name: value.detach() for name, value in model.named_parameters()}
    rows = torch.func.jacrev(lambda own: functional_call(part, own, x).flatten())(
        {name: weights[name] for name in names}
    )
    g = torch.cat([rows[name].flatten(1) for name in names], 1)
    both = torch.func.jacrev(lambda weights: functional_call(model, weights, data()[0]).flatten())(weights)
    jacobian = torch.cat([both[name].flatten(1) for name in weights], 1)
    dense = torch.linalg.inv(jacobian.T @ jacobian / 0.1 + 2.0 * torch.eye(jacobian.shape[1], dtype=F64))
    close(found.covariance, g @ dense[: g.shape[1], : g.shape[1]] @ g.T, 1e-10)


@pytest.mark.parametrize("method", METHODS, ids=[str(method).partition("(s")[0] for method in METHODS])
def test_every_structure(method: Any) -> None:
    """Linear functions have the covariance of the joint latent, and a weight its marginal variance."""
    posterior, x = fitted(method), data(6, seed=2)[0]
    weights = torch.randn(3, 6, 2, dtype=F64)
    found = posterior.of(lambda f: torch.einsum("qbc,bc->q", weights, f(x)))
    joint = posterior.latent(x, joint=True)
    close(found.mean, torch.einsum("qbc,bc->q", weights, joint.mean))
    close(found.covariance, torch.einsum("qbc,bcde,rde->qr", weights, joint.covariance, weights), 1e-8)
    for name, wanted in split(posterior.tangent.blocks, posterior.covariance.diagonal()).items():
        found = posterior.of(lambda f, name=name: f.weight[name])
        close(found.std.square(), wanted, 1e-8)
        close(found.mean, posterior.model.get_parameter(name).detach())


def test_numbers_whose_gradients_exceed_the_budget_are_refused() -> None:
    posterior, x = fitted(lw.KFAC()), data(6, seed=2)[0]
    wanted = posterior.of(lambda f: f(x).sum(0), observed=True)
    tangent = posterior.tangent
    one = replace(posterior, tangent=replace(tangent, memory=2 * (tangent.size + 12) * 8))  # its products one by one
    close(one.of(lambda f: f(x).sum(0), observed=True).covariance, wanted.covariance)
    with pytest.raises(
        lw.LapwingError, match=r"posterior.of .* gradients of 3 numbers.* memory=\d+ .* fewer at a time"
    ):
        one.of(lambda f: f(x)[:3, 0], observed=True)


def test_slopes_are_those_of_draws() -> None:
    posterior = fitted(lw.KFAC(), network(outputs=1))
    x = torch.linspace(-1, 1, 8, dtype=F64).reshape(4, 2)

    def slopes(f: Any) -> Tensor:
        at = x.clone().requires_grad_()
        return torch.autograd.grad(f(at).sum(), at, create_graph=True)[0]

    found = posterior.of(slopes)
    weights = {name: value.detach().requires_grad_() for name, value in posterior.model.named_parameters()}
    each = slopes(lambda at: functional_call(posterior.model, weights, at)).flatten()
    rows = [torch.autograd.grad(slope, list(weights.values()), retain_graph=True, allow_unused=True) for slope in each]
    draws: Any = 0
    for name, values, gradients in zip(weights, posterior.sample(4000).values(), zip(*rows, strict=True), strict=True):
        if gradients[0] is not None:  # the last bias does not move a slope
            moved = values - weights[name].detach()
            draws = draws + moved.flatten(1) @ torch.stack(gradients).flatten(1).T
    torch.testing.assert_close(draws.std(0), found.std.flatten(), rtol=0.03, atol=0)
    close(posterior.of(slopes, observed=True).covariance, found.covariance)  # a slope of f has no noise of y


def test_a_crossing_by_the_implicit_function_theorem() -> None:
    """At f(t) = c the theorem gives dt = -df / f'(t), which is one Newton step with a gradient from the solution."""
    posterior = fitted(model=network(outputs=1))
    direction, t = torch.tensor([[1.0, -0.5]], dtype=F64), torch.tensor(0.3, dtype=F64)
    level = posterior.model(t * direction).item()

    def crossing(f: Any) -> Tensor:
        at = t.clone().requires_grad_()
        value = f(at * direction).squeeze()
        return at.detach() - (value - level) / torch.autograd.grad(value, at, retain_graph=True)[0]

    found, at = posterior.of(crossing), t.clone().requires_grad_()
    slope = torch.autograd.grad(posterior.model(at * direction).sum(), at)[0]
    close(found.mean, t)
    close(found.std, posterior.latent(t * direction).std[0, 0] / slope.abs())


def test_a_loader_adds_up_its_batches() -> None:
    posterior, (x, y) = fitted(), data(9)
    whole = posterior.of(lambda f: f(x).square().sum(0), observed=True)
    for loader in ([(x[:5], y[:5]), (x[5:], y[5:])], (x, y), (x.numpy(), y.numpy()), [(x[:5],), (x[5:],)]):
        found = posterior.of(lambda f, batch: f(batch[0]).square().sum(0), loader, observed=True)
        close(found.mean, whole.mean)
        close(found.covariance, whole.covariance)


@pytest.mark.parametrize("ratios", [None, (0.5, 3.0)])
def test_observed_adds_the_noise_of_each_target(ratios: Any) -> None:
    x, y = data()
    posterior = lw.fit(network(), (x, y), lw.KFAC(), likelihood=lw.Gaussian(0.2, noise_ratios=ratios))
    certain, noisy = (posterior.of(lambda f: f(x).exp().sum(0), observed=on) for on in (False, True))
    noise = 0.2 * torch.tensor(ratios or (1.0, 1.0), dtype=F64)
    close(noisy.covariance - certain.covariance, (noise * posterior.model(x).detach().exp().square().sum(0)).diag())
    prediction = posterior.predict(x[:1])
    close(posterior.of(lambda f: f(x[:1]), observed=True).std, prediction.std)
    close(posterior.of(lambda f: f(x[:1])).interval(0.8)[1], prediction.mean + 1.2815515655 * prediction.latent.std)


def test_noise_that_depends_on_the_input_is_that_of_predictions_far_from_the_data():
    """There it grows with the variance of f."""
    x, y = data()
    posterior = lw.fit(network(), (x, y), lw.KFAC(), prior_precision=1.0, likelihood=lw.Gaussian(0.2))
    posterior, far = with_input_noise(posterior, x, "2", df=math.inf), 5 * x[:4]
    prediction, noise = posterior.predict(far), posterior.likelihood.input_noise
    assert (prediction.aleatoric_variance > 1.5 * noise.floor).any()
    for i in range(4):
        found = posterior.of(lambda f, i=i: f(far[i : i + 1]), observed=True)
        close(found.std, prediction.std[i : i + 1])
    close(posterior.explain(far).noise, prediction.aleatoric_variance)


def noise_by_hand(model: nn.Module, calls: list[Tensor], function: Any, noise: float) -> Tensor:
    """Returns the covariance of a function of the outputs of some calls, with one noise for each measurement."""
    outputs = [model(x).detach().requires_grad_() for x in calls]
    numbers = function(*outputs).flatten()
    slopes = [torch.autograd.grad(number, outputs, retain_graph=True) for number in numbers]
    total: dict[Any, Tensor] = {}
    for i, x in enumerate(calls):
        before: list[Any] = []
        for row, inputs in enumerate(x.tolist()):
            measured = str(inputs), before.count(inputs)
            before.append(inputs)
            for place in range(outputs[i][row].numel()):
                slope = torch.stack([each[i][row].flatten()[place] for each in slopes])
                total[measured, place] = total.get((measured, place), 0) + slope
    return noise * torch.stack([slope.outer(slope) for slope in total.values()]).sum(0)


TWICE = torch.cat([data(4)[0], data(4)[0][:2]])  # rows 0 and 1 are measured twice
CALLS: dict[str, tuple[list[Tensor], Any]] = {
    "the same rows": ([TWICE, TWICE.clone()], lambda one, other: (one - other).sum(0)),
    "another order": ([TWICE, TWICE.flip(0)], lambda one, other: (one.exp() - other.flip(0)).sum(0)),
    "some rows": ([TWICE, TWICE[1:3], TWICE[:1]], lambda one, two, three: one.square().sum(0) - two.sum(0) * three[0]),
    "other rows": ([TWICE[:2], TWICE[2:4]], lambda one, other: one - other),
    "one call": ([TWICE], lambda one: one.sum(0)),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("positions", [False, True])
def test_a_row_has_one_noise_in_all_calls(kind: str, positions: bool) -> None:
    calls, function = CALLS[kind]
    model, (x, y) = network(), data()
    if positions:  # outputs (B, 2, 3), whose positions are measured separately
        model = nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 2, 2, padding=1)).double().eval()
        y = y[..., None].expand(-1, -1, 3)
    posterior = lw.fit(model, (x, y), lw.KFAC(), likelihood=lw.Gaussian(0.3), prior_precision=2.0)
    certain, noisy = (posterior.of(lambda f: function(*map(f, calls)), observed=on) for on in (False, True))
    wanted = noise_by_hand(model, calls, function, 0.3)
    close((noisy.covariance - certain.covariance).reshape(wanted.shape), wanted)
    if kind == "the same rows":
        assert not noisy.covariance.any()


def test_rows_are_the_same_if_all_their_inputs_are_equal() -> None:
    model, (x, y), t = two_inputs(), data(), torch.randn(12, 1, dtype=F64)
    posterior = lw.fit(model, ((x, t), y), lw.KFAC(), likelihood=lw.Gaussian(0.1))
    same, other = (
        posterior.of(lambda f, u=u: (f((x, t)) - f((x.clone(), u))).sum(0), observed=True)
        for u in (t.clone(), t + 1e-9)
    )
    assert not same.std.any()
    close(other.std.square(), torch.full((2,), 2 * 12 * 0.1, dtype=F64), 1e-6)
    fixed = posterior.of(lambda f, batch: f((x[:1], t[:1])) - f(batch[0])[:1], [((x, t), y)] * 2, observed=True)
    assert float(fixed.std.max()) < 1e-12


def test_the_result_has_the_shape_of_the_function() -> None:
    posterior, x = fitted(), data(6, seed=2)[0]
    for shape in ((), (1,), (12, 1), (3, 2, 2)):
        found = posterior.of(lambda f, shape=shape: f(x)[:1, :1].reshape(shape) if shape in ((), (1,))
                             else f(x).reshape(shape), observed=True)  # fmt: skip
        ends = found.interval(0.9)
        assert {found.mean.shape, found.std.shape, ends[0].shape, ends[1].shape} == {torch.Size(shape)}
        assert found.covariance.shape == (*shape, *shape)
        assert found.sample(5).shape == (5, *shape)
        close(found.std, found.covariance.reshape(found.mean.numel(), -1).diagonal().sqrt().reshape(shape))
        assert repr(found).count("±") == min(4, found.mean.numel())


def test_untreated_weights_have_no_error() -> None:
    posterior, x = fitted(params=lw.last_layer), data(4, seed=3)[0]
    found = posterior.of(lambda f: f.weight["0.weight"])
    assert not found.std.any()
    close(posterior.of(lambda f: f(x)).covariance, posterior.latent(x, joint=True).covariance)
    mixed = posterior.of(lambda f: f.weight["0.bias"].sum() + f(x).sum())
    close(mixed.covariance, posterior.of(lambda f: f(x).sum()).covariance)


def two_inputs() -> nn.Module:
    """Two inputs, and a layer that writes in place behind a batch norm with buffers."""
    together = lambda net, x, t: net.last(torch.cat([net.norm(net.first(x)).relu_(), t], 1))  # noqa: E731
    return Net(together, first=nn.Linear(2, 4), norm=nn.BatchNorm1d(4), last=nn.Linear(5, 2)).double().eval()


def test_several_inputs_and_buffers() -> None:
    model, (x, y), t = two_inputs(), data(), torch.randn(12, 1, dtype=F64)
    posterior = lw.fit(model, ((x, t), y), lw.KFAC(), likelihood=lw.Gaussian(0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = posterior.of(lambda f: f((x, t)).sum(0))
    close(found.covariance, posterior.latent((x, t), joint=True).covariance.sum((0, 2)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())


def test_outputs_with_positions_have_their_own_shape() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1)).double().eval()
    x = torch.randn(4, 1, 3, 4, dtype=F64)
    posterior = lw.fit(model, (x, torch.randn(4, 2, 3, 4, dtype=F64)), lw.KFAC(), likelihood=lw.Gaussian(0.3))
    latent = posterior.latent(x[:1])
    found = posterior.of(lambda f: f(x[:1]), observed=True)
    close(found.mean, model(x[:1]).detach())
    close(found.std.square().flatten(), latent.variance.flatten() + 0.3)
    pooled = posterior.of(lambda f: f(x).mean((2, 3)).sum(0))
    close(pooled.mean, model(x).detach().mean((2, 3)).sum(0))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    posterior, x = fitted(lw.KFAC(), network(dtype)), data(6, seed=2)[0].to(dtype)
    found = posterior.of(lambda f: f(x).sum(0))
    assert found.mean.dtype == found.covariance.dtype == torch.float32
    close(found.covariance, posterior.latent(x, joint=True).covariance.sum((0, 2)), tolerance)


def test_draws_have_the_covariance() -> None:
    posterior, x = fitted(), data(2)[0]
    found = posterior.of(lambda f: f(x))
    draws = found.sample(20_000)
    assert draws.shape == (20_000, 2, 2)
    close(torch.cov(draws.flatten(1).T).reshape(2, 2, 2, 2), found.covariance, 0.03)
    assert torch.equal(draws, found.sample(20_000))
    assert "Quantity(" in repr(found)


@pytest.mark.parametrize("method", [lw.KFAC(), lw.SampledLLA(draws=5)], ids=["KFAC", "SampledLLA"])
def test_draws_of_the_weights_in_parts_have_the_covariance(method: Any) -> None:
    """A covariance that is made of draws is not cut: its parts would be equal."""
    posterior = fitted(method)
    tangent = posterior.tangent
    parts = replace(posterior, tangent=replace(tangent, memory=1500 * 8 * tangent.size * 8))
    drawn = torch.cat([value.flatten(1) for value in parts.sample(4000).values()], 1)
    close(drawn.T.cov(), posterior.of(lambda f: torch.cat([w.flatten() for w in f.weight.values()])).covariance, 0.1)
    if method != lw.KFAC():
        one = replace(posterior, tangent=replace(tangent, memory=1))
        assert len({tuple(row.tolist()) for row in one.sample(5)["0.bias"].abs()}) == 5


def test_inference_mode_and_no_grad() -> None:
    posterior, x = fitted(), data(2)[0]
    wanted = posterior.of(lambda f: f(x)).covariance
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            close(posterior.of(lambda f: f(x)).covariance, wanted)
