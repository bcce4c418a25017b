"""`lw.novelty`: scores against dense oracles, files, `lw.compare` and `lw.deploy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from lapwing.evaluation import metrics
from lapwing.fitting.novelty import RIDGE, features_of
from tests.refused import refused
from tests.zoo_modules import Net

SEED = torch.Generator().manual_seed(0)
X, Y = torch.randn(90, 5, generator=SEED).double(), torch.arange(90) % 3
FAR = 3 * torch.randn(17, 5, generator=SEED).double() + 1


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, outputs)).double().eval()


def relative_distance(z: Tensor, y: Tensor, far: Tensor) -> Tensor:
    """The relative Mahalanobis distance (n,) of features; with one class the plain distance."""
    total = torch.zeros_like(y)
    within = [z - torch.stack([z[kind == c].mean(0) for c in kind]) for kind in (y, total)]
    ridge = RIDGE * (within[1].square().mean() + RIDGE * z.square().mean()) * torch.eye(z.shape[1])

    def distances(kind: Tensor, rest: Tensor) -> Tensor:
        precision = (rest.T @ rest / len(z) + ridge).inverse()
        moved = [far - z[kind == c].mean(0) for c in kind.unique()]
        return torch.stack([torch.einsum("nd,de,ne->n", m, precision, m) for m in moved])

    nearest, background = distances(y, within[0]).amin(0), distances(total, within[1])[0]
    return nearest - background if len(y.unique()) > 1 else background


class Segmented(nn.Module):
    """A last layer at every position, and a mean over positions."""

    def __init__(self, convolution: bool) -> None:
        super().__init__()
        self.body = nn.Conv1d(2, 4, 3, padding=1)
        self.last = nn.Conv1d(4, 3, 1) if convolution else nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return self.last(h).mean(2) if isinstance(self.last, nn.Conv1d) else self.last(h.mT).mean(1)


LABELS = {"classes": Y, "a column": Y[:, None] + 4, "bool": Y > 0, "real": Y.double()}


@pytest.mark.parametrize("kind", LABELS)
def test_mahalanobis_is_the_difference_of_two_distances(kind: str) -> None:
    model, labels = network(), LABELS[kind]
    y = labels.flatten().long() if kind != "real" else torch.zeros(90).long()
    z, far = model[:2](X).detach(), model[:2](FAR).detach()
    detector = lw.novelty(model, [(X[:40], labels[:40]), (X[40:], labels[40:])])
    assert torch.allclose(detector(FAR), relative_distance(z, y, far), rtol=1e-7, atol=1e-7)
    assert torch.equal(detector([FAR[:5], (FAR[5:], Y[5:17])]), torch.cat([detector(FAR[:5]), detector(FAR[5:])]))


def test_features_that_are_never_active_do_not_count() -> None:
    model = network()
    with torch.no_grad():
        model[0].bias[:3] = -100.0
    scores, z = lw.novelty(model, (X, Y))(X), model[:2](X).detach()[:, 3:]
    assert torch.allclose(scores, relative_distance(z, Y, z), rtol=1e-3, atol=1e-3)
    assert lw.novelty(model, (X[:4], Y[:4]))(X).isfinite().all()  # fewer samples than features


@pytest.mark.parametrize("labels", [Y[:8], torch.arange(90)], ids=["few samples", "as many classes as samples"])
def test_a_warning_if_the_samples_do_not_give_the_covariance(labels: Tensor, caplog: Any) -> None:
    lw.novelty(network(), (X, Y))
    assert not caplog.records
    lw.novelty(network(), (X[: len(labels)], labels))
    assert "below the number of features" in caplog.text


def test_samples_without_a_label_do_not_count() -> None:
    labelled = Y > 0
    model, labels = network(), Y.masked_fill(~labelled, -100)
    expected = lw.novelty(model, (X[labelled], Y[labelled]))(FAR)
    assert torch.allclose(lw.novelty(model, (X, labels))(FAR), expected, atol=1e-9)


def test_knn_scores_of_a_network_in_half_precision_have_no_ties() -> None:
    model, x = network().bfloat16(), X.bfloat16()
    detector = lw.novelty(model, (x, Y), "knn")
    assert len(detector(x).unique()) > 70  # two inputs that are each other's 50th neighbour have the same score
    assert repr(detector) == "Novelty(by='knn', network=Sequential)"


@pytest.mark.parametrize("count", [90, 20])
def test_knn_is_the_distance_to_the_50th_neighbour(count: int) -> None:
    model = network()
    rows, far = (F.normalize(model[:2](x).detach()) for x in (X[:count], FAR))
    expected = torch.cdist(far, rows).sort(1).values[:, min(50, count) - 1]
    assert torch.allclose(lw.novelty(model, (X[:count], Y[:count]), "knn")(FAR), expected, atol=1e-7)


@pytest.mark.parametrize("convolution", [True, False])
def test_features_at_positions_are_averaged(convolution: bool) -> None:
    model, x = Segmented(convolution).double().eval(), X.reshape(45, 2, 5)
    detector = lw.novelty(model, (x, Y[:45]))
    expected = model.body(x).tanh().mean(2)
    assert torch.allclose(features_of(detector.tangent, x), expected, atol=1e-12)


@pytest.mark.parametrize("by", ["mahalanobis", "knn"])
def test_files(by: Any, tmp_path: Path) -> None:
    model = network()
    detector, path = lw.novelty(model, (X, Y), by), tmp_path / "detector.safetensors"
    detector.save(path)
    again = lw.Novelty.load(path, model)
    assert torch.equal(again(FAR), detector(FAR))
    refused(lambda: lw.load(path, model), "lw.Novelty.load(path, model)")
    other = network()
    with torch.no_grad():
        other[0].weight.mul_(2)
    refused(lambda: lw.Novelty.load(path, other), "other values than in the fit")
    lw.fit(model, (X, Y), prior_precision=1.0).save(path)
    refused(lambda: lw.Novelty.load(path, model), "holds no detector. lw.load(path, model) reads posteriors")
    with torch.no_grad():
        model[0].weight.mul_(2)
    refused(lambda: detector(FAR), "has changed since")


def test_padding_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).eval()
    x, y = torch.randn(80, 5, 3), torch.randint(3, (80, 5))
    lw.novelty(model, (x, y))
    assert "padding" not in caplog.text
    y[:, 3:] = -100
    lw.novelty(model, (x, y))
    assert "padded to the lengths of the held-out ones" in caplog.text


def test_labels_of_a_dict_are_left_out() -> None:
    named = Net(lambda net, x: net.inner(x), inner=network()).eval()
    detector = lw.novelty(named, [{"x": X, "labels": Y}])
    assert torch.equal(detector({"x": FAR, "labels": Y[:17]}), detector({"x": FAR}))


def test_a_network_in_training_mode_is_refused_and_an_empty_batch_is_skipped() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(), nn.Linear(7, 3)).double().eval()
    detector, mean = lw.novelty(model, (X, Y)), model[1].running_mean.clone()
    assert torch.equal(detector([X, X[:0]]), detector(X))
    model.train()
    refused(lambda: detector(X), "model.eval()")
    assert torch.equal(model[1].running_mean, mean)


@pytest.mark.parametrize("targets", [Y, X[:, :3]], ids=["classes", "regression"])
def test_compare_ranks_by_the_detector(targets: Tensor) -> None:
    model = network()
    detector = lw.novelty(model, (X, targets))
    posterior = lw.fit(model, (X, targets), prior_precision=1.0)
    table = lw.compare({"Full": posterior}, [(X, targets)], {"far": FAR}, score=detector, repeats=1)
    for name in table.rows:
        assert table[name]["far: AUROC by detector"] == float(metrics.auroc(detector(X), detector(FAR)))
    assert table["network"]["far: FPR95"] == table["Full"]["far: FPR95"]
    assert "FPR95 and AUPR use detector" in " ".join(table.notes)
    plain = lw.compare({"Full": posterior}, [(X, targets)], {"far": FAR}, repeats=1)
    assert plain["Full"]["far: AUROC by MI"] == table["Full"]["far: AUROC by MI"]
    assert "far: AUROC by detector" not in plain.columns


@pytest.mark.parametrize("kind", ["mlp", pytest.param("linear", marks=pytest.mark.slow)])
def test_a_deployed_network_returns_the_score(kind: str) -> None:
    model = network() if kind == "mlp" else Segmented(False).double().eval()
    x, y, far = (X, Y, FAR) if kind == "mlp" else (X.reshape(45, 2, 5), Y[:45], FAR[:16].reshape(8, 2, 5))
    detector, posterior = lw.novelty(model, (x, y), "knn"), lw.fit(model, (x, y), prior_precision=1.0)
    predictor = lw.deploy(posterior, x, novelty=detector)
    assert predictor.returns == ("probabilities", "novelty")
    probabilities, score = predictor(far)
    assert torch.allclose(score, detector(far), atol=1e-7)
    assert torch.allclose(probabilities, posterior.predict(far, via=lw.Streamlined()).probs, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", ["prediction", "scores", "latent"])
@pytest.mark.parametrize("by", ["mahalanobis", "knn"])
def test_a_deployed_network_returns_what_it_returns_without_the_score(by: Any, outputs: Any, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = network().float()
    x, far = X.float(), FAR.float()
    detector, posterior = lw.novelty(model, (x, Y), by), lw.fit(model, (x, Y), prior_precision=1.0)
    predictor = lw.deploy(posterior, x, lw.Linearized(), outputs, novelty=detector)
    plain = lw.deploy(posterior, x, lw.Linearized(), outputs)
    assert predictor.returns == (*plain.returns, "novelty")
    alone = plain(far) if isinstance(plain(far), tuple) else (plain(far),)
    assert all(map(torch.equal, predictor(far), alone))
    session = onnxruntime.InferenceSession(predictor.to_onnx(tmp_path / "network.onnx", x))
    (score,) = session.run(["novelty"], {"x": far.numpy()})
    assert torch.allclose(torch.from_numpy(score), detector(far).float(), rtol=1e-4, atol=1e-4)
