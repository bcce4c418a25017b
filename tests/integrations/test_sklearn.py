"""The estimators do what scikit-learn asks, and their predictions are those of `lw.fit`."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import lapwing as lw

pytest.importorskip("sklearn")

from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from lapwing.integrations.sklearn import LaplaceClassifier, LaplaceRegressor
from tests.refused import refused
from tests.zoo_modules import Net


def network(features: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(60, 3))
    return X, X @ [1.0, -2.0, 0.5] + 0.1 * generator.normal(size=60)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the checks warn of themselves
@pytest.mark.parametrize("kind", [LaplaceClassifier, LaplaceRegressor])
def test_scikit_learns_own_checks(kind) -> None:
    """In float64: the checks ask for seven equal digits."""
    results = check_estimator(kind(network, epochs=50, random_state=0), on_fail=None, on_skip=None)
    assert [result["check_name"] for result in results if result["status"] == "failed"] == []
    assert sum(result["status"] == "passed" for result in results) > 40


def test_a_trained_network_gives_the_posterior_of_lw_fit(data) -> None:
    X, y = data
    labels = np.where(y > 1, "high", np.where(y > -1, "middle", "low"))
    trained = network(3, 3).eval()
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    classifier = LaplaceClassifier(trained, epochs=0).fit(X, labels)
    assert classifier.classes_.tolist() == ["high", "low", "middle"]
    x, codes = torch.tensor(X), torch.tensor(np.searchsorted(classifier.classes_, labels))
    plain = lw.fit(trained, [(x, codes)]).predict(x).probs
    assert classifier.predict_proba(X) == pytest.approx(plain.numpy(), rel=1e-6)
    assert (classifier.predict(X) == classifier.classes_[plain.argmax(1).numpy()]).all()

    trained = network(3, 1).eval()
    mean, std = LaplaceRegressor(trained, epochs=0, random_state=0).fit(X, y).predict(X, return_std=True)
    plain = lw.fit(trained, [(x, torch.tensor(y)[:, None])]).predict(x)
    assert mean == pytest.approx(plain.mean[:, 0].numpy(), rel=1e-6)
    assert std == pytest.approx(plain.std[:, 0].numpy(), rel=1e-6)
    assert all((before[name] == value).all() for name, value in classifier.module.state_dict().items())


def test_predictions_are_in_the_units_of_y(data) -> None:
    """An affine map of y maps predictions alike; a column is predicted as a column, and two as two."""
    X, y = data
    fits = [
        LaplaceRegressor(network, epochs=50, learning_rate=1e-2, random_state=0).fit(X, values)
        for values in (y, 1000 + 50 * y)
    ]
    (mean, std), (moved, wider) = (fit.predict(X, return_std=True) for fit in fits)
    assert moved == pytest.approx(1000 + 50 * mean, rel=1e-6)
    assert wider == pytest.approx(50 * std, rel=1e-5)
    assert abs(mean - y).mean() < 0.5
    assert 0.5 < (abs(mean - y) < 1.645 * std).mean() < 1
    column = LaplaceRegressor(network, epochs=50, learning_rate=1e-2, random_state=0).fit(X, y[:, None])
    assert column.predict(X) == pytest.approx(mean[:, None])
    both = LaplaceRegressor(network, epochs=5, random_state=0).fit(X, np.stack([y, 100 * y], 1))
    assert [part.shape for part in both.predict(X, return_std=True)] == [(60, 2), (60, 2)]
    assert LaplaceRegressor(network, epochs=1).fit(X, np.full(60, 7.0)).predict(X) == pytest.approx(7, abs=2)


def test_quantiles_have_the_noise_and_the_tails_of_each_input() -> None:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(500, 2))
    y = 100 + 20 * (X[:, 0] + np.exp(X[:, 1]) * generator.standard_t(3, size=500))
    regressor = LaplaceRegressor(network, epochs=30, learning_rate=1e-2, batch_size=100, random_state=0)
    regressor = regressor.fit(X[:, :2], y)
    prediction = regressor.posterior_.predict(torch.tensor(X))
    assert prediction.df < 10
    assert prediction.std.amax() > 3 * prediction.std.amin()
    low, high = (regressor.predict_quantile(X, probability) for probability in (0.05, 0.95))
    mean, std = regressor.predict(X, return_std=True)
    assert low.shape == high.shape == (500,)
    assert (high + low) / 2 == pytest.approx(mean)
    assert np.median((high - low) / std) < 2 * 1.6  # of a normal: 2 * 1.645
    wanted = prediction.scaled(float(regressor.shift_), float(regressor.scale_)).interval(0.9)
    assert np.stack([low, high]) == pytest.approx(torch.stack(wanted)[..., 0].numpy())
    assert std == pytest.approx(prediction.std[:, 0].numpy() * float(regressor.scale_))
    column = LaplaceRegressor(network, epochs=1, random_state=0).fit(X, y[:, None])
    assert column.predict_quantile(X, 0.3).shape == (500, 1)
    refused(lambda: regressor.predict_quantile(X, 5), "a number between 0 and 1")


def test_one_logit_serves_two_classes(data) -> None:
    X, y = data
    labels = np.where(y > 0, 5, -5)
    options = {"learning_rate": 1e-2, "random_state": 0, "validation_fraction": 0.2}
    classifier = LaplaceClassifier(network(3, 1), **options).fit(X, labels)
    probs = classifier.predict_proba(X)
    assert probs.shape == (60, 2)
    assert probs.sum(1) == pytest.approx(1, abs=1e-12)
    assert classifier.score(X, labels) > 0.9
    assert classifier.posterior_.samples == 48


def test_the_module_and_the_random_state_of_the_caller_stay(data) -> None:
    X, y = data
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)).train()
    before, state = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    fits = [LaplaceRegressor(module, epochs=3, batch_size=59, random_state=0).fit(X, y) for _ in range(2)]
    assert (fits[0].predict(X) == fits[1].predict(X)).all()
    assert module.training
    assert all((before[name] == value).all() for name, value in module.state_dict().items())
    assert (torch.get_rng_state() == state).all()
    assert all(weight.grad is None for weight in fits[0].module_.parameters())


def test_warnings_name_the_option_of_the_estimator(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = np.eye(3).repeat(20, 0)
    labels = X.argmax(1)
    monkeypatch.setattr("lapwing.integrations.sklearn._ADVISED", set())
    estimator = LaplaceClassifier(network(3, 3), epochs=200, learning_rate=0.1)
    GridSearchCV(estimator, {"weight_decay": [0.0, 1e-6]}, cv=2).fit(X, labels)  # five networks
    (text,) = [record.getMessage() for record in caplog.records if "almost sure" in record.getMessage()]
    assert text.endswith("hold data out, and write validation_fraction=0.2.")
    filters = list(logging.getLogger("lapwing").filters)
    refused(lambda: LaplaceClassifier(network(3, 3), method="KFAC").fit(X, labels), "method")
    assert logging.getLogger("lapwing").filters == filters  # also after an error


def test_pipelines_searches_clones_and_files(data) -> None:
    pandas = pytest.importorskip("pandas")
    X, y = data
    frame, labels = pandas.DataFrame(X, columns=list("abc")), pandas.Series(np.where(y > 0, "yes", "no"))
    pipeline = make_pipeline(StandardScaler(), LaplaceClassifier(network, epochs=5, random_state=0))
    grid = {"laplaceclassifier__method": [None, lw.Diagonal()]}
    search = GridSearchCV(pipeline, grid, scoring="neg_log_loss", cv=2).fit(frame, labels)
    probs = search.predict_proba(frame)
    assert search.best_estimator_[0].feature_names_in_.tolist() == ["a", "b", "c"]
    assert (pickle.loads(pickle.dumps(search)).predict_proba(frame) == probs).all()
    estimator = LaplaceClassifier(network(3, 2), epochs=3, params=lw.last_layer, method=lw.Full())
    again = clone(estimator).set_params(epochs=4)
    assert (again.epochs, again.method, estimator.epochs) == (4, lw.Full(), 3)
    assert again.module is not estimator.module


@pytest.mark.quick(3)
@pytest.mark.parametrize("epochs", [0, 20])
@pytest.mark.parametrize("method", [None, lw.KFAC(), lw.Diagonal()])
@pytest.mark.parametrize(("kind", "outputs"), [(LaplaceClassifier, 3), (LaplaceClassifier, 1), (LaplaceRegressor, 1)])
def test_a_weight_counts_rows(kind, outputs: int, method: lw.Method | None, epochs: int, data) -> None:
    """Weights 0 to 3 give the fit of rows left out and repeated: in one batch gradients and posterior are equal."""
    X, y = data
    if kind is LaplaceClassifier:
        y = np.digitize(y, [-1, 1] if outputs == 3 else [0])
    weights = np.arange(60) % 4
    options = {"epochs": epochs, "batch_size": 200, "learning_rate": 1e-2, "method": method, "random_state": 0}
    module = network(3, outputs)
    weighted = kind(module, **options).fit(X, y, sample_weight=weights)
    repeated = kind(module, **options).fit(X.repeat(weights, 0), y.repeat(weights, 0))
    ours, theirs = (fit.posterior_.predict(torch.tensor(X)) for fit in (weighted, repeated))
    for one, other in zip(ours.latent.mean, theirs.latent.mean, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours.latent.covariance, theirs.latent.covariance, rtol=1e-9, atol=1e-12)
    assert weighted.predict(X) == pytest.approx(repeated.predict(X), rel=1e-9)


def test_a_class_of_weight_zero_is_left_out(data) -> None:
    X, y = data
    labels = np.where(y > 1, "high", np.where(y > -1, "middle", "low"))
    classifier = LaplaceClassifier(network, epochs=1).fit(X, labels, (labels != "high").astype(int))
    assert classifier.classes_.tolist() == ["low", "middle"]
    assert classifier.posterior_.samples == (labels != "high").sum()
    refused(lambda: classifier.fit(X, labels, labels == "low"), "The rows of positive sample_weight have one class")
    with pytest.raises(NotFittedError):
        classifier.predict(X)


def test_weights_reach_the_estimator(data) -> None:
    """By the name of a step, and by scikit-learn's metadata routing, where a float32 network has them too."""
    X, y = data
    weights = np.arange(60) % 3
    regressor = LaplaceRegressor(network(3, 1).float(), epochs=0, random_state=0)
    alone = clone(regressor).fit(StandardScaler().fit_transform(X), y, weights).posterior_
    pipeline = make_pipeline(StandardScaler(), regressor).fit(X, y, laplaceregressor__sample_weight=weights)
    assert pipeline[-1].posterior_.prior_precision == alone.prior_precision
    with config_context(enable_metadata_routing=True):
        routed = make_pipeline(StandardScaler(), clone(regressor).set_fit_request(sample_weight=True))
        routed[0].set_fit_request(sample_weight=False)
        assert routed.fit(X, y, sample_weight=weights)[-1].posterior_.prior_precision == alone.prior_precision
        routed[-1].set_score_request(sample_weight=True)
        pytest.importorskip("sklearn", "1.8", reason="pipelines of scikit-learn 1.7 do not hand weights to their score")
        scores = cross_validate(routed, X, y, cv=2, params={"sample_weight": weights}, error_score="raise")
    assert np.isfinite(scores["test_score"]).all()


def test_images_keep_their_shape(data) -> None:
    images = np.random.default_rng(0).normal(size=(20, 1, 6, 6))
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
    assert LaplaceClassifier(module, epochs=1).fit(images, np.arange(20) % 2).predict_proba(images).shape == (20, 2)


HALF = np.where(np.arange(60) < 2, -1.0, np.nan)
REFUSED = [
    (LaplaceClassifier(network(3, 4)), None, "has 4 outputs and y has 2 classes"),
    (LaplaceRegressor(network(3, 4)), None, "has 4 outputs and y has 1 targets per row"),
    (LaplaceClassifier(network, epochs=-1), None, "epochs=-1"),
    (LaplaceClassifier(network, batch_size=0), None, "batch_size=0"),
    (LaplaceClassifier(network, validation_fraction=20), None, "validation_fraction=20"),
    (LaplaceClassifier(network(3, 2).requires_grad_(False)), None, "requires a gradient. Write epochs=0"),
    (LaplaceClassifier("mlp"), None, "module='mlp' must be a torch.nn.Module"),
    *((estimator(network), weights, f"sample_weight {words}") for weights, words in (
        (np.ones(59), "has the shape (59,), and X has 60 rows. Pass one number for each row."),
        (np.ones((60, 1)), "has the shape (60, 1), and X has 60 rows"),
        (2.0, "has the shape (), and X has 60 rows"), (["heavy"] * 60, "does not hold numbers"),
        (np.zeros(60), "is zero for every row"), (HALF, "is negative, NaN or infinite for 60 rows"))
      for estimator in (LaplaceClassifier, LaplaceRegressor)),
]  # fmt: skip


@pytest.mark.parametrize(("estimator", "weights", "words"), REFUSED)
def test_a_fit_is_refused_in_these_words(estimator, weights, words: str, data) -> None:
    X, y = data
    message = refused(lambda: estimator.fit(X, (y > 0).astype(int), weights), words)
    assert message.startswith("sample_weight") or weights is None
    with pytest.raises(NotFittedError):
        estimator.predict(X)


def test_a_frozen_network_is_fitted_without_training(data) -> None:
    X, y = data
    module = network(3, 2).requires_grad_(False)
    classifier = LaplaceClassifier(module, epochs=0).fit(X, y > 0)
    assert classifier.predict_proba(X).shape == (60, 2)
    assert not any(weight.requires_grad for weight in classifier.module_.parameters())
    refused(lambda: classifier.fit(X, np.zeros(60, dtype=int)), "one class")


def of_tokens(outputs: int) -> nn.Module:
    """A mean of embeddings, and a linear layer."""
    return Net(lambda net, x: net.layer(net.table(x).mean(1)), table=nn.Embedding(7, 5), layer=nn.Linear(5, outputs))


@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_integers_stay_integers_if_the_network_accepts_them(dtype: str) -> None:
    rng = np.random.default_rng(0)
    X = rng.integers(7, size=(40, 4)).astype(dtype)
    classifier = LaplaceClassifier(of_tokens(2), epochs=1).fit(X, X[:, 0] % 2, sample_weight=np.linspace(0.5, 1.5, 40))
    assert classifier.predict_proba(X.astype(float)).shape == (40, 2)
    refused(lambda: classifier.predict(X + 0.5), "fitted to integers")
    assert LaplaceRegressor(of_tokens(1), epochs=1).fit(X, X[:, 0]).predict(X).shape == (40,)
    linear = LaplaceRegressor(nn.Linear(4, 1), epochs=1).fit(X, X[:, 0])
    assert linear.posterior_.predict(torch.tensor(X).float()).mean.shape == (40, 1)
    halves = LaplaceClassifier(of_tokens(2), epochs=1)
    refused(lambda: halves.fit(X + 0.5, X[:, 0] % 2), "called as model(x) on Tensor (1, 4) float32")


def test_columns_of_a_frame_in_another_order_are_refused() -> None:
    pd = pytest.importorskip("pandas")
    X = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 2)), columns=["a", "b"])
    regressor = LaplaceRegressor(epochs=1).fit(X, X["a"])
    with pytest.raises(ValueError, match="same order"):
        regressor.predict(X[["b", "a"]])


@pytest.mark.parametrize("kind", [LaplaceRegressor, LaplaceClassifier])
def test_categories_of_a_frame_are_numbers_or_refused_as_by_scikit_learn(kind) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": np.arange(60.0) % 7, "b": pd.Categorical(["4", "6", "8"] * 20)})
    y = np.arange(60) % 2
    estimator = kind(epochs=1, random_state=0).fit(frame, y)
    plain = kind(epochs=1, random_state=0).fit(frame.astype(float), y)
    np.testing.assert_array_equal(estimator.predict(frame), plain.predict(frame.astype(float)))
    words = frame.assign(b=frame.b.cat.rename_categories({"4": "red"}))
    with pytest.raises(ValueError, match="could not convert string to float: 'red'"):
        kind(epochs=1).fit(words, y)
    with pytest.raises(ValueError, match="could not convert string to float: 'red'"):
        estimator.predict(words)
