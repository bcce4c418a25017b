"""What users see: names in tab completion, results in notebooks, and warnings, each once for a network."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.network.entry import outside_modes
from tests.trained import small_network

X, LABELS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


network = partial(small_network, 8)


def public(result: object) -> set[str]:
    return {name for name in dir(result) if not name.startswith("_")}


def test_tab_completion_offers_what_users_call():
    posterior = lw.fit(network(), [(X, LABELS)], prior_precision=1.0)
    assert {"predict", "latent", "with_prior", "prior_precision", "model", "tuned", "samples"} <= public(posterior)
    assert not {"at", "with_noise", "with_defaults", "stamp", "statistics", "scale", "noise_fixed"} & public(posterior)
    tokens = lw.fit(nn.Linear(4, 3), [(X[:, None].expand(-1, 2, -1), LABELS[:, None].expand(-1, 2))])
    for prediction in (posterior.predict(X), tokens.predict(X[:, None].expand(-1, 2, -1))):
        assert {"probs", "entropy", "mutual_information", "log_prob"} <= public(prediction)
        assert not {"for_metrics", "summary", "uncertainty", "point"} & public(prediction)
    assert public(lw.plan(network(), [(X, LABELS)])) == {
        "advice", "kept_bytes", "method", "outputs", "parameters", "passes", "peak_bytes", "seconds",
    }  # fmt: skip


def test_a_quantity_of_another_kind_of_prediction_is_refused_with_those_that_there_are():
    classes = lw.fit(network(), [(X, LABELS)], prior_precision=1.0).predict(X)
    numbers = lw.fit(network(1), [(X, X[:, :1])], prior_precision=1.0).predict(X)
    with pytest.raises(AttributeError, match=r"ClassPrediction has no interval. It has classes, .* probs"):
        classes.interval(0.9)
    with pytest.raises(AttributeError, match=r"RegressionPrediction has no probs. It has aleatoric_variance, .* mean"):
        _ = numbers.probs
    assert not hasattr(numbers, "mutual_information")


def test_a_prediction_prints_the_numbers_of_the_first_inputs():
    classes = lw.fit(network(), [(X, LABELS)], prior_precision=1.0).predict(X)
    head, labels, chances = str(classes).splitlines()
    assert head == repr(classes)
    assert labels == f"  classes: {', '.join(map(str, classes.classes[:4].tolist()))}, ..."
    assert chances == f"  confidence: {', '.join(f'{value:.4g}' for value in classes.confidence[:4].tolist())}, ..."
    numbers = lw.fit(network(6), [(X, X[:, :1].expand(-1, 6))], prior_precision=1.0).predict(X[:2])
    _, mean, std = str(numbers).splitlines()
    first = ", ".join(f"{value:.4g}" for value in numbers.mean[0, :4].tolist())
    assert mean.startswith(f"  mean: [{first}, ...], [")
    assert mean.endswith("...]")
    assert std.startswith("  std: [")


def test_an_error_within_a_property_is_the_one_that_is_shown():
    class Broken(type(lw.fit(network(1), [(X, X[:, :1])], prior_precision=1.0).predict(X))):
        @property
        def ratio(self):
            return self.mean.no_such_name

    base = lw.fit(network(1), [(X, X[:, :1])], prior_precision=1.0).predict(X)
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'no_such_name'"):
        _ = Broken(base.latent, base.noise_variance).ratio


def test_results_show_what_print_shows():
    posterior = lw.fit(network(), [(X, LABELS)])
    plans = lw.plan(network(), [(X, LABELS)], [lw.KFAC(), lw.Diagonal()])
    for result in (posterior, plans, plans[0], posterior.tangent.coverage, posterior.diagnose()):
        assert repr(result) == str(result)
        assert result._repr_html_().startswith("<pre")
        assert "<Posterior" not in result._repr_html_()
    assert "weights     passes" in repr(plans[0])
    assert "prior precision" in repr(posterior.diagnose())


def test_tuned_says_whether_a_tuning_chose_a_number():
    data, noisy = [(X, LABELS)], [(X, X[:, :3])]
    assert lw.fit(network(), data).tuned
    assert lw.fit(network(), noisy, prior_precision=1.0).tuned
    assert not lw.fit(network(), data, tune=None).tuned
    assert not lw.fit(network(), data, prior_precision=1.0).tuned
    assert not lw.fit(network(), noisy, prior_precision=1.0, likelihood=lw.Gaussian(0.1)).tuned
    assert lw.fit(network(), data, prior_precision=1.0, validation=data).tuned  # the logit temperature
    assert not lw.fit(network(), data).with_prior(1.0).tuned
    assert lw.fit(network(), noisy).with_prior(1.0).tuned  # the noise variance
    assert not lw.fit(network(), noisy).with_prior(1.0, noise_variance=0.1).tuned


def test_a_grid_over_priors_warns_once(caplog: pytest.LogCaptureFixture):
    model, y = network(), 1e-3 * X[:, :3]
    wide = [(1e4 * X.square(), y)]

    def warned() -> list[str]:
        return [message for message in caplog.messages if "rounding noise" in message]

    with caplog.at_level(logging.WARNING, "lapwing"):
        for exponent in range(-9, -6):
            lw.fit(model, wide, lw.KFAC(), params=lw.everything, prior_precision=10.0**exponent,
                   likelihood=lw.Gaussian(0.1))  # fmt: skip
        (first,) = warned()
        assert "Scale the inputs" not in first
        lw.fit(model, wide, lw.Full(), prior_precision=1e-9, likelihood=lw.Gaussian(0.1))
        assert len(warned()) == 2  # of another method
        with torch.no_grad():
            model[2].bias += 1
        lw.fit(model, wide, lw.KFAC(), params=lw.everything, prior_precision=1e-9, likelihood=lw.Gaussian(0.1))
        assert len(warned()) == 3  # other weights


def test_a_prior_that_a_tuning_chose_is_not_said_to_be_too_weak(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "lapwing"):
        lw.fit(network(), [(1e4 * X.square(), 1e-3 * X[:, :3])], lw.KFAC(), tune=lw.Evidence())
    assert not [r for r in caplog.records if r.levelno == logging.WARNING and "rounding noise" in r.message]


def test_warnings_without_a_network_and_other_levels_are_always_logged(caplog: pytest.LogCaptureFixture):
    log = logging.getLogger("lapwing")
    with caplog.at_level(logging.INFO, "lapwing"):
        for model in (network(), None):
            for number in (120, 120, 2e-7):
                outside_modes(lambda model, number: log.warning("%g, here", number))(model, number)
                outside_modes(lambda model, number: log.info("%g, there", number))(model, number)
    of_network, of_none = caplog.messages[:5], caplog.messages[5:]
    assert of_network == ["120, here", "120, there", "120, there", "2e-07, here", "2e-07, there"]
    assert of_none == [f"{number:g}, {place}" for number in (120, 120, 2e-7) for place in ("here", "there")]


def test_a_second_mistake_is_warned_of_as_the_first_one(caplog: pytest.LogCaptureFixture):
    """The texts differ only in their numbers. Silence would say that the second data are right."""
    model, y = network(), X[:, :3]

    def warnings(rows: int, shift: float) -> list[str]:
        caplog.clear()
        lw.fit(model, (X[20:], y[20:] + shift), validation=(X[:rows], y[:rows] + shift))
        return [message for message in caplog.messages if "too few" in message or "worse than their mean" in message]

    for rows, shift in ((5, 50.0), (12, 50.0), (12, 80.0)):
        before, after = warnings(rows, shift), warnings(rows, shift)
        assert before
        assert not after
