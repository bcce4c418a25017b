"""A last layer with a tail, such as a temperature, has the posterior that it has as an inner layer."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.network import tracing
from lapwing.tangent import Tangent
from tests.conformance import close, jacobian

BATCHES, CLASSES = (4, 4, 3), 5


class Tailed(nn.Module):
    """A network whose outputs are a function of its last layer's output; `maps` have images as inputs and outputs."""

    def __init__(self, tail, maps=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(2, 4, 3, padding=1) if maps else nn.Linear(3, 6)
        self.head = nn.Conv2d(4, CLASSES, 3, padding=1) if maps else nn.Linear(6, CLASSES)
        self.tail = tail
        self.double().eval()

    def forward(self, x):
        return self.tail(self.head(self.body(x).tanh()))


TAILS = {
    "temperature": lambda h: h / 1.7,
    "temperatures": lambda h: h * torch.linspace(0.5, 2.0, CLASSES, dtype=h.dtype),
    "in place": lambda h: h.mul_(0.7).add_(1.0),
    "softcap": lambda h: 3 * torch.tanh(h / 3),
    "softplus": F.softplus,
    "exp": torch.exp,
    "another shape": lambda h: h.flatten()[:, None].sigmoid().reshape(h.shape),
    "another dtype": lambda h: h.float().double() * 2,
    "gate": lambda h: h * h.sigmoid(),
}
OTHER_STEPS = {
    "log-softmax": lambda h: h.log_softmax(-1),
    "another order": lambda h: h.flip(1),
    "mask": lambda h: h.masked_fill(h < -0.5, -torch.inf),
}
METHODS = {
    "diagonal": lw.Diagonal(), "kfac": lw.KFAC(), "ekfac": lw.EKFAC(), "full": lw.Full(), "ella": lw.ELLA(rank=7),
    "sampled": lw.SampledLLA(draws=3), "subset": lw.SubsetOfWeights(11),
}  # fmt: skip


def without_tails(monkeypatch):
    """Makes lapwing treat a last layer with a tail like an inner layer."""
    monkeypatch.setattr(tracing, "ENTRYWISE", frozenset())


def by_both(monkeypatch, read):
    """Returns what a function gives with the shortcut for tails, and then without it."""
    found = read()
    without_tails(monkeypatch)
    return found, read()


def data(maps=False, tokens=False):
    torch.manual_seed(1)
    shape = (2, 3, 4) if maps else (4, 3) if tokens else (3,)
    places = (3, 4) if maps else (4,) if tokens else ()
    x = torch.randn(sum(BATCHES), *shape, dtype=torch.float64)
    return x, torch.randint(CLASSES, (len(x), *places))


def batches(x, y):
    return list(zip(x.split(BATCHES), y.split(BATCHES), strict=True))


@pytest.mark.parametrize("tail", TAILS)
def test_rows_are_those_of_the_dense_jacobian(tail):
    model, (x, _) = Tailed(TAILS[tail]), data()
    tangent = Tangent.survey(model, x, lw.last_layer)
    assert tangent.plan.tail
    assert tangent.treats_output_alone
    close(tangent.record(x).rows(), jacobian(model, x, tangent.blocks), 1e-6 if "dtype" in tail else 1e-9)


@pytest.mark.parametrize("step", OTHER_STEPS)
def test_other_steps_are_no_tail(step):
    model, (x, _) = Tailed(OTHER_STEPS[step]), data()
    tangent = Tangent.survey(model, x, lw.last_layer, activation="softmax" if step == "mask" else None)
    assert not tangent.plan.tail
    assert not tangent.treats_output_alone
    if step != "mask":  # the oracle has no rule for impossible classes
        close(tangent.record(x).rows(), jacobian(model, x, tangent.blocks))


@pytest.mark.parametrize("method", ["diagonal", "kfac", "full"])
@pytest.mark.parametrize("tuned", ["evidence", "held out"])
def test_tunings_read_the_slopes(method, tuned, monkeypatch):
    model, (x, y) = Tailed(TAILS["temperatures"]), data()
    options = {"tune": lw.Evidence()} if tuned == "evidence" else {"validation": (x, y)}
    fit = partial(lw.fit, model, batches(x, y), METHODS[method], params=lw.last_layer, **options)
    mine, other = by_both(monkeypatch, fit)
    assert mine.prior_precision == pytest.approx(other.prior_precision, rel=1e-6)
    close(mine.predict(x).probs, other.predict(x).probs, 1e-6)


@pytest.mark.parametrize("maps", [False, True], ids=["tokens", "maps"])
@pytest.mark.parametrize("method", ["diagonal", "full"])
def test_positions_are_rows_with_slopes(method, maps, monkeypatch):
    model, (x, y) = Tailed(TAILS["softcap"], maps), data(maps, tokens=not maps)
    y[0, 1] = -100
    fit = lambda: lw.fit(model, batches(x, y), METHODS[method], params=lw.last_layer, prior_precision=0.5)  # noqa: E731
    posterior = fit()
    assert posterior.tangent.positions.rows_are_positions
    assert posterior.tangent.plan.tail
    prediction = posterior.predict(x)
    without_tails(monkeypatch)
    other = fit()
    assert not other.tangent.positions.rows_are_positions
    close(posterior.covariance.diagonal()["head"], other.covariance.diagonal()["head"])
    close(prediction.probs, other.predict(x, via=lw.Linearized()).probs)


def test_gradients_of_inputs_pass_through_the_slopes(monkeypatch):
    model, (x, y) = Tailed(TAILS["softcap"]), data()
    posterior = lw.fit(model, batches(x, y), lw.KFAC(), params=lw.last_layer, prior_precision=0.5)

    def gradient():
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(posterior.latent(leaf).variance.sum(), leaf)[0]

    close(*by_both(monkeypatch, gradient))


def test_a_thousand_classes_behind_a_temperature_need_one_pass():
    model, (x, y), calls = Tailed(TAILS["temperature"]), data(), []
    model.head = nn.Linear(6, 1003).double()
    posterior = lw.fit(model, batches(x, y), lw.KFAC(), params=lw.last_layer, tune=None)
    model.body.register_forward_hook(lambda _, inputs, out: calls.append(len(out)))
    assert posterior.predict(x).probs.shape == (11, 1003)
    assert calls == [11]


class Learned(Tailed):
    """A network with a tail that reads parameters or inputs: the softmax temperature, or a residual connection."""

    def __init__(self, kind):
        super().__init__(None)
        self.log_temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.other = nn.Linear(3, 1).double()
        self.kind = kind

    def forward(self, x):
        h = self.head(self.body(x).tanh())
        if self.kind == "learned":
            return h / self.log_temperature.exp()
        return h + x.sum(-1, keepdim=True) if self.kind == "skip" else h / (1 + self.other(x).square())


@pytest.mark.parametrize("kind", ["learned", "skip", "of the input"])
@pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
def test_tails_that_read_parameters_and_inputs(kind, tokens, monkeypatch):
    model, (x, y) = Learned(kind), data(tokens=tokens)
    params = lw.matching("head.*") if kind == "of the input" else lw.last_layer

    def spread():
        posterior = lw.fit(model, batches(x, y), lw.Diagonal(), params=params, prior_precision=0.5)
        assert posterior.tangent.plan.tail == posterior.tangent.treats_output_alone == bool(tracing.ENTRYWISE)
        leaf = x.clone().requires_grad_()
        variance = posterior.latent(leaf, via=lw.Linearized()).variance
        return variance.detach(), torch.autograd.grad(variance.sum(), leaf)[0]

    for found, wanted in zip(*by_both(monkeypatch, spread), strict=True):
        close(found, wanted)


def test_a_temperature_without_dimensions_among_all_weights_has_draws():
    model, (x, y) = Learned("learned"), data()
    posterior = lw.fit(model, batches(x, y), lw.KFAC(), params=lw.matching("head.*", "log_temperature"), tune=None)
    draws = posterior.latent(x, via=lw.Linearized(draws=4000)).variance
    torch.testing.assert_close(draws, posterior.latent(x).variance, rtol=0.2, atol=1e-3)


class Heads(Tailed):
    """A network whose outputs join several layers entry by entry, as those of distilled image models do."""

    def __init__(self, kind):
        super().__init__(None)
        self.other, self.second = nn.Linear(3, 4).double(), nn.Linear(4, CLASSES).double()
        self.third = nn.Linear(CLASSES, CLASSES).double() if kind == "one feeds another" else None
        self.kind = kind

    def forward(self, x):
        h, k = self.head(self.body(x).tanh()), self.second(self.other(x).tanh())
        return {
            "mean": lambda: (h + k) / 2,
            "product": lambda: h * k.sigmoid(),
            "steps": lambda: torch.tanh(h) + 2 * k / 1.7,
            "one feeds another": lambda: h + k + self.third(h.tanh()),
            "one weight twice": lambda: h + self.head(self.body(2 * x).tanh()) + k,
            "normalised": lambda: h + k.log_softmax(-1),
        }[self.kind]()


HEADS = lw.matching("head.*", "second.*", "third.*")


@pytest.mark.parametrize("kind", ["mean", "product", "steps", "one feeds another", "one weight twice", "normalised"])
@pytest.mark.parametrize("params", [HEADS, lw.everything], ids=["heads", "everything"])
def test_rows_of_joined_heads_are_those_of_the_dense_jacobian(kind, params):
    model, (x, _) = Heads(kind), data()
    params = lw.matching("head.*", "second.*") if params is HEADS and model.third is None else params
    tangent = Tangent.survey(model, x, params)
    joined = kind in ("mean", "product", "steps")
    assert len(tangent.plan.last) == (2 if joined else 0)
    assert tangent.treats_output_alone == (joined and params is not lw.everything)
    close(tangent.record(x).rows(), jacobian(model, x, tangent.blocks))


@pytest.mark.parametrize("likelihood", ["categorical", lw.Gaussian(0.3), "poisson"], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [Tailed(TAILS["softcap"]), Heads("mean")], ids=["tail", "two heads"])
def test_a_posterior_is_the_same_as_without_the_shortcut_and_keeps_it(model, method, likelihood, monkeypatch, reloaded):
    x, y = data()
    loader = batches(x, y if likelihood == "categorical" else F.one_hot(y, CLASSES).double())

    def fitted():
        posterior = lw.fit(
            model, loader, METHODS[method], params=lw.last_layer, likelihood=likelihood, prior_precision=0.5
        )
        loaded = reloaded(posterior)
        for one in (posterior, loaded):
            assert one.tangent.treats_output_alone == one.tangent.plan.tail == bool(tracing.ENTRYWISE)
        return posterior, loaded.latent(x, via=lw.Linearized())

    (posterior, latent), (other, wanted) = by_both(monkeypatch, fitted)
    tolerance = 1e-6 if method == "sampled" else 1e-9  # conjugate gradients stop at a residual
    for found in (latent, posterior.latent(x, via=lw.Linearized())):
        close(found.covariance, wanted.covariance, tolerance)
        close(found.centred_variance, wanted.centred_variance, tolerance)
    if method != "sampled":
        assert posterior.log_marginal_likelihood() == pytest.approx(other.log_marginal_likelihood(), rel=1e-9)


def test_streamlined_variances_of_two_heads_are_not_taken_for_linearised_ones(caplog):
    """They have no covariances between classes, so the level of a deployed network is fitted."""
    model, (x, y) = Heads("mean"), data()
    posterior = lw.fit(model, batches(x, y), lw.KFAC(), params=lw.last_layer, validation=(x, y))
    assert not posterior.tangent.treats_one_layer
    assert isinstance(lw.deploy(posterior, x.repeat(8, 1)).via, lw.Scaled)
    caplog.clear()
    posterior.predict(x, via=lw.Streamlined())
    assert "other predictions than via=lw.Streamlined" in caplog.text


@pytest.mark.parametrize("far", [-1e4, -torch.inf])
def test_masks_that_a_tail_adds_later_exclude_classes(far, monkeypatch):
    """The fit has seen no mask. Its predictions are those of a layer that is not recognised as the last one."""

    class Masked(Tailed):
        def forward(self, x):
            h = super().forward(x)
            return h + torch.where(x[:, :1] > 50, torch.tensor([0.0, 0.0, far, 0.0, far]).to(h), 0.0)

    model, (x, y) = Masked(TAILS["temperature"]), data()
    fit = lambda: lw.fit(model, batches(x, y), lw.KFAC(), params=lw.last_layer, prior_precision=0.5)  # noqa: E731
    masked = torch.cat([x[:2], x[:3] + 100])
    found, wanted = by_both(monkeypatch, lambda: fit().predict(masked).probs)
    assert (found[2:, [2, 4]] == 0).all()
    close(found, wanted)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("method", ["diagonal", "kfac", "full"])
def test_masks_that_a_tail_adds_later_do_not_end_a_fit(heads, method, monkeypatch):
    """The survey has seen no mask. The batch that has one needs backward passes."""

    class Masked(Heads):
        def forward(self, x):
            h = super().forward(x) if heads == 2 else self.head(self.body(x).tanh()) / 2
            never = torch.tensor([False, False, False, True, True])
            return h + torch.zeros_like(h).masked_fill((x[:, :1] > 1) & never, -torch.inf)

    model, (x, _) = Masked("mean"), data()
    x[:7, 0], x[7:, 0], y = 0.0, 2.0, torch.arange(11) % 3
    params = lw.matching("head.*", "second.*") if heads == 2 else lw.matching("head.*")
    fit = lambda: lw.fit(model, batches(x, y), METHODS[method], params=params, prior_precision=0.5)  # noqa: E731
    posterior = fit()
    assert posterior.tangent.treats_output_alone
    found = posterior.predict(x).probs
    assert (found[7:, 3:] == 0).all()
    without_tails(monkeypatch)
    close(found, fit().predict(x).probs)


@pytest.mark.parametrize("batch", [4, 11])
def test_masks_of_tokens_that_a_tail_adds_later_need_backward_passes(batch, monkeypatch):
    """Some texts of a loader have masked classes, and others have none."""

    class Masked(Tailed):
        def forward(self, x):
            h = super().forward(x)
            never = torch.tensor([False, False, False, True, True])
            return h + torch.zeros_like(h).masked_fill((x[..., :1] > 50) & never, -torch.inf)

    model, (x, y) = Masked(TAILS["temperature"]), data(tokens=True)
    fit = lambda: lw.fit(model, batches(x, y), lw.Diagonal(), params=lw.last_layer, prior_precision=0.5)  # noqa: E731
    posterior = fit()
    assert posterior.tangent.positions.rows_are_positions
    new = x.clone()
    new[1, 2] += 100
    new[6, :3] += 100
    found = posterior.predict(list(new.split(batch))).probs
    assert (found[6, :3, 3:] == 0).all()
    without_tails(monkeypatch)
    close(found, fit().predict(new, via=lw.Linearized()).probs)


@pytest.mark.parametrize("rows", [1, 11])
def test_a_tail_with_detach_has_its_own_level_in_a_deployed_network(rows):
    """Linearised predictions obey `detach`, and streamlined ones do not."""
    model, (x, y) = Tailed(lambda h: 0.3 * h + 0.7 * h.detach()), data()
    posterior = lw.fit(model, batches(x, y), lw.KFAC(), params=lw.last_layer, prior_precision=0.5)
    way = lw.deploy(posterior, x[:rows]).via
    assert way.factor == pytest.approx(0.09)
    close(posterior.predict(x, via=way).probs, posterior.predict(x).probs)


def test_a_function_written_in_python_is_no_tail():
    """Its name says nothing: this one mixes the entries."""

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return h.flip(-1).cumsum(-1)

        @staticmethod
        def backward(ctx, g):
            return g.flip(-1).cumsum(-1)

    x, _ = data(tokens=True)
    assert not Tangent.survey(Tailed(Exp.apply), x, lw.last_layer).plan.tail


def test_a_tail_that_overwrites_what_its_gradient_needs_is_named():
    with pytest.raises(lw.LapwingError, match="overwrites a tensor"):
        Tangent.survey(Tailed(lambda h: h.sigmoid().mul_(100)), data()[0], lw.last_layer)


@pytest.mark.parametrize("case", ["bfloat16", "frozen", "one output"])
def test_a_tail_of_other_networks(case, monkeypatch):
    """Half precision has three digits. A frozen network treats its last layer, and one output may have no axis."""
    model, (x, y), options = Tailed(TAILS["temperature"]), data(), {}
    if case == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    elif case == "frozen":
        model.requires_grad_(False)
    else:
        model.head, model.tail = nn.Linear(6, 1).double(), lambda h: 2 * h.squeeze(-1) + 1
        y, options = x[:, 0], {"likelihood": lw.Gaussian(0.3)}

    def variance():
        posterior = lw.fit(model, batches(x, y), lw.KFAC(), params=lw.last_layer, prior_precision=0.5, **options)
        assert posterior.tangent.plan.tail == bool(tracing.ENTRYWISE)
        return posterior.latent(x, via=lw.Linearized()).variance

    found, wanted = by_both(monkeypatch, variance)
    close(found.double(), wanted.double(), 1e-2 if case == "bfloat16" else 1e-9)
