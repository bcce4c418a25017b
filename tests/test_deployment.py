"""Deployed networks give the numbers of the posterior: in eager mode, exported, compiled, and in onnxruntime."""

from __future__ import annotations

import copy
import logging
import math
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.data.inputs import Inputs
from lapwing.deployment import Predictor, _default_way
from lapwing.tangent.features import features_at
from lapwing.tuning.scale_factor import _as_new
from papers.common.networks import MnistCNN, ResNet20
from tests.full_disk import full_disk
from tests.input_noise import with_input_noise
from tests.prediction.test_streamlined_networks import bert, tokens
from tests.quick import others_slow
from tests.refused import refused
from tests.zoo import ZOO
from tests.zoo_modules import Net

SIZES = (1, 3, 7)


def real(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    return lambda samples: torch.randn(samples, *shape, generator=torch.Generator().manual_seed(samples)).to(dtype)


def texts(samples: int, length: int = 6) -> dict[str, Tensor]:
    return tokens(samples, length, seed=samples)


class Encoder(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, activation="gelu")
        self.encoder, self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def mlp(outputs: int = 3, activation: type[nn.Module] = nn.GELU) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), activation(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, outputs)).eval()


def normed(model: nn.Module) -> nn.Module:
    """Moves batch-norm statistics away from their defaults."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (mlp, real(5)),
    "one output": (lambda: mlp(1), real(5)),
    "mnist_cnn": (lambda: normed(MnistCNN()), real(1, 28, 28)),
    "resnet20": (lambda: normed(ResNet20()), real(3, 32, 32)),
    "encoder": (lambda: Encoder().eval(), real(4, 8)),
    "one": (lambda: Encoder(1).eval(), real(4, 8)),
    "bert": (lambda: bert().float(), texts),
    "gpt2": (lambda: ZOO["gpt2"].build().float(), texts),
}
CLASSIFIERS = [name for name in NETWORKS if not name.startswith("one")]


@cache
def deployed(name: str, outputs: str) -> tuple[lw.Posterior, Predictor]:
    """Returns a diagonal posterior of all layers, and its predictor; do not change them."""
    posterior, inputs = fitted(name)
    return posterior, lw.deploy(posterior, inputs(4), outputs=outputs)  # type: ignore[arg-type]


def fitted(
    name: str, method: Any = None, params: Any = lw.everything, likelihood: Any = None
) -> tuple[lw.Posterior, Callable[[int], Any]]:
    """Returns a posterior of a network, and the function that makes its inputs."""
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    model, x = make(), inputs(4)
    outputs = 10 if name in ("mnist_cnn", "resnet20") else 3
    y = torch.arange(4) % outputs if name != "one output" else torch.randn(4, 1)
    if isinstance(likelihood, lw.Bernoulli):
        y = torch.nn.functional.one_hot(y, outputs)
    batch = {**x, "labels": y} if isinstance(x, dict) else (x, y)
    method = method or lw.Diagonal()
    return lw.fit(model, [batch], method, params=params, likelihood=likelihood, prior_precision=30.0), inputs


def assert_same(
    found: Any, posterior: lw.Posterior, x: Any, via: Any, outputs: str, tolerance: float = 1e-6, link: Any = None
) -> None:
    """Compares with `posterior`, variances relative to the largest."""
    found = [torch.as_tensor(part) for part in (found if isinstance(found, (tuple, list)) else (found,))]
    if outputs == "latent":
        latent = posterior.latent(x, via=via)
        wanted: list[Tensor] = [latent.mean, latent.variance]
    else:
        prediction: Any = posterior.predict(x, via=via, link=link)
        wanted = [prediction.probs] if hasattr(prediction, "probs") else [prediction.mean, prediction.variance]
        if outputs == "scores":
            wanted += [prediction.entropy(), prediction.mutual_information()]
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1e-3)


def in_onnx(predictor: Predictor, folder: Path, example: Any) -> Callable[[Any], list[Any]]:
    """Writes the network as a file, and returns the function that runs the file."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(predictor.to_onnx(folder / "network.onnx", example), options)

    def run(x: Any) -> list[Any]:
        given = x if isinstance(x, dict) else {"x": x}
        return session.run(None, {key: value.numpy() for key, value in given.items()})

    return run


# ---- the same numbers


@pytest.mark.parametrize("outputs", ["latent", pytest.param("prediction", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", others_slow(CLASSIFIERS, ("mlp", "mnist_cnn")))
def test_eager(name: str, outputs: str) -> None:
    posterior, predictor = deployed(name, outputs)
    make, inputs = NETWORKS[name]
    for size in SIZES:
        assert_same(predictor(inputs(size)), posterior, inputs(size), lw.Streamlined(), outputs, 2e-6)
    torch.manual_seed(0)
    fresh = make().state_dict()
    assert all(torch.equal(fresh[key], value) for key, value in posterior.model.state_dict().items())


@pytest.mark.parametrize("name", others_slow(CLASSIFIERS, ["mlp"]))
def test_exported(name: str) -> None:
    posterior, predictor = deployed(name, "latent")
    inputs = NETWORKS[name][1]
    x = inputs(4)
    module = torch.export.export(predictor, (x,), dynamic_shapes=predictor.dynamic_shapes).module()
    for size in SIZES:
        assert_same(module(inputs(size)), posterior, inputs(size), lw.Streamlined(), "latent", 2e-6)


def test_an_onnx_file_appears_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    (_, predictor), x, path = deployed("mlp", "prediction"), NETWORKS["mlp"][1](2), tmp_path / "network.onnx"
    path.write_text("old")
    with full_disk(), pytest.raises(lw.LapwingError, match="network.onnx cannot be written: File too large"):
        predictor.to_onnx(path, x)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr("torch.onnx.export", lambda *_, **__: pytest.fail("it exports before it looks at the path"))
    refused(lambda: predictor.to_onnx(tmp_path / "missing" / "network.onnx", x), "Create its folder")


ONNX = [("mlp", "prediction"), ("mlp", "scores"), *((name, "latent") for name in CLASSIFIERS if name != "mlp")]


@pytest.mark.parametrize("case", others_slow(ONNX, ONNX[1:2]), ids=str)
def test_onnx(case: tuple[str, str], tmp_path: Path) -> None:
    name, outputs = case
    inputs = NETWORKS[name][1]
    posterior, predictor = deployed(name, outputs)
    run = in_onnx(predictor, tmp_path, inputs(1))
    for size in SIZES:
        found = run(inputs(size))
        if name == "resnet20":  # 200 000 ReLUs a sample, of which one at its kink may fall on either side
            latent = posterior.latent(inputs(size), via=lw.Streamlined())
            means, variances = (torch.as_tensor(part) for part in found)
            assert (means - latent.mean).abs().max() <= 1e-5 * latent.mean.abs().max()
            off = (variances - latent.variance).abs().amax(1) / latent.variance.max()
            assert off.median() <= 1e-5
            assert off.max() <= 1e-3
        else:
            tolerance = 1e-4 if outputs == "scores" else 1e-5
            assert_same(found, posterior, inputs(size), lw.Streamlined(), outputs, tolerance)


@pytest.mark.parametrize("name", others_slow(["mlp", "mnist_cnn", "gpt2"], ["mlp"]))
def test_compiled(name: str) -> None:
    """A compiled call is one graph."""
    posterior, predictor = deployed(name, "latent")
    inputs = NETWORKS[name][1]
    backend = "eager" if name == "mlp" else "inductor" if shutil.which("g++") else "aot_eager"
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(predictor, backend=backend, fullgraph=True)
        found = [compiled(inputs(size)) for size in SIZES]
    torch._dynamo.reset()
    for size, part in zip(SIZES, found, strict=True):
        assert_same(part, posterior, inputs(size), lw.Streamlined(), "latent", 5e-6)


@pytest.mark.parametrize("labels", ["classes", "answers"])
def test_scores_without_variance_in_onnx(labels: str, tmp_path: Path) -> None:
    """Without a bias, an input of zeros has the logits 0 with variance 0."""
    x = torch.cat([torch.randn(20, 4), torch.zeros(1, 4)])
    layers = [nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False)]
    targets = x.argmax(1) % 2 if labels == "classes" else x[:, :2] > 0
    posterior = lw.fit(nn.Sequential(*layers).eval(), [(x, targets)], prior_precision=1.0)
    found = in_onnx(lw.deploy(posterior, x, outputs="scores"), tmp_path, x)(x)
    assert_same(found, posterior, x, lw.Streamlined(), "scores", 1e-4)
    assert found[-1][-1] == 0.0  # mutual information


def test_functions_that_onnx_lacks(tmp_path: Path) -> None:
    x, layers = torch.randn(5, 4), [nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4), nn.Mish(), nn.Linear(4, 3)]
    posterior = lw.fit(nn.Sequential(*layers).eval(), [(x, torch.arange(5) % 3)], lw.Diagonal(), prior_precision=30.0)
    run = in_onnx(lw.deploy(posterior, x, outputs="latent"), tmp_path, x)
    assert_same(run(x[:3]), posterior, x[:3], lw.Streamlined(), "latent", 1e-5)


def test_a_mask_that_multiplies_in_onnx(tmp_path: Path) -> None:
    x = {"tokens": torch.randint(9, (5, 6)), "mask": torch.arange(6) < torch.arange(2, 7)[:, None]}
    data = [{**x, "labels": torch.arange(5) % 3}]
    mean = lambda net, tokens, mask: (net.table(tokens) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)  # noqa: E731
    model = Net(lambda net, **x: net.layer(mean(net, **x)), table=nn.Embedding(9, 4), layer=nn.Linear(4, 3)).eval()
    posterior = lw.fit(model, data, lw.Diagonal(), params=lw.everything, prior_precision=30.0)
    predictor = lw.deploy(posterior, x)
    assert_same(in_onnx(predictor, tmp_path, x)(x), posterior, x, predictor.via, "prediction", 1e-5)


@pytest.mark.parametrize("method", [None, lw.KFAC()], ids=repr)
@pytest.mark.parametrize("link", [lw.LaplaceBridge(), lw.Probit(scale="class")], ids=repr)
def test_the_link_that_held_out_data_chose_is_deployed(link: Any, method: Any) -> None:
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    posterior = lw.fit(model, (x[:40], y[:40]), method, tune=lw.Validation((x[40:], y[40:]), link=link))
    predictor = lw.deploy(posterior, x)
    assert posterior.aim.link == link
    assert_same(predictor(x), posterior, x, predictor.via, "prediction", 1e-5)
    assert not torch.allclose(predictor(x), lw.deploy(posterior, x, link=lw.Probit())(x), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("length", [4, 9])
def test_texts_of_other_lengths(length: int) -> None:
    posterior, predictor = deployed("bert", "latent")
    assert_same(predictor(texts(3, length)), posterior, texts(3, length), lw.Streamlined(), "latent", 2e-6)


@pytest.mark.parametrize("name", ["residual_block", pytest.param("groupnorm_rms", marks=pytest.mark.slow)])
def test_zoo_in_double_precision(name: str) -> None:
    case = ZOO[name]
    x, y = case.inputs(4, 0), case.targets(4, 0)
    likelihood = None if case.classification else lw.Gaussian(0.2)
    posterior = lw.fit(case.build(), [(x, y)], lw.KFAC(), likelihood=likelihood, prior_precision=30.0)
    predictor = lw.deploy(posterior, x)
    for size in SIZES:
        assert_same(
            predictor(case.inputs(size, 5)), posterior, case.inputs(size, 5), lw.Streamlined(), "prediction", 1e-11
        )


# ---- posteriors, ways, likelihoods

METHODS = {
    "diagonal": lw.Diagonal(), "kfac": lw.KFAC(), "ekfac": lw.EKFAC(), "full": lw.Full(), "ella": lw.ELLA(3),
    "residual": lw.ELLA(3, residual="prior"), "subset": lw.SubsetOfData(3),
}  # fmt: skip


LAST = {"params": lw.last_layer}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        f"last layer, {name}": ({"method": method, **LAST}, {"via": lw.Linearized()})
        for name, method in METHODS.items()
    },
    **{f"all layers, {name}": ({"method": method}, {"outputs": "latent"}) for name, method in METHODS.items()},
    **{
        f"only {part}": ({"method": lw.Full(), "params": lw.matching(part)}, {"outputs": "latent"})
        for part in ("4.bias", "4.weight", "2.bias", "0.*")
    },
    **{
        f"quadrature, {name}": ({"method": method, **LAST}, {"via": lw.Linearized(), "link": lw.Quadrature()})
        for name, method in METHODS.items()
    },
    "latent by linearized": (LAST, {"via": lw.Linearized(), "outputs": "latent"}),
    "scaled": (LAST, {"via": lw.Scaled(lw.Scaled(lw.Streamlined(), 0.5), 0.3)}),
    "scaled, linearized": (LAST, {"via": lw.Scaled(lw.Linearized(), 0.15)}),
    "moments": ({}, {"via": lw.Streamlined(activations="moments")}),
    "scores": ({"name": "one"}, {"via": lw.Streamlined(attention="scores")}),
    "weighted probit": ({"method": lw.KFAC()}, {"link": lw.Probit(scale="weighted")}),
    "probit": ({"method": lw.KFAC(), **LAST}, {"link": lw.Probit()}),
    "bridge": ({"method": lw.KFAC(), **LAST}, {"link": lw.LaplaceBridge()}),
    "bernoulli": ({"likelihood": lw.Bernoulli()}, {}),
    "bernoulli, probit": ({"likelihood": lw.Bernoulli()}, {"link": lw.Probit()}),
    "scores of the last layer": (
        {"method": lw.KFAC(), "likelihood": lw.Categorical(logit_temperature=1.5), **LAST},
        {"via": lw.Linearized(), "outputs": "scores"},
    ),
    "scores of all layers": ({"method": lw.KFAC()}, {"via": lw.Scaled(lw.Streamlined(), 2.0), "outputs": "scores"}),
    "scores of answers": (
        {"method": lw.KFAC(), "likelihood": lw.Bernoulli(), **LAST},
        {"via": lw.Linearized(), "outputs": "scores"},
    ),
    "one output": ({"name": "one output", "method": lw.KFAC()}, {}),
    "one output, linearized": ({"name": "one output", "method": lw.KFAC(), **LAST}, {"via": lw.Linearized()}),
}
QUICK_CASES = "last layer, kfac", "all layers, ella", "scaled"


@pytest.mark.parametrize("case", others_slow(CASES, QUICK_CASES))
def test_posteriors_ways_links_and_likelihoods(case: str) -> None:
    of_fit, options = CASES[case]
    posterior, inputs = fitted(**{"name": "mlp", **of_fit})
    predictor = lw.deploy(posterior, inputs(2), **options)
    assert options.get("outputs") != "scores" or predictor.returns == ("probabilities", "entropy", "mutual_information")
    via, outputs = options.get("via", lw.Streamlined()), options.get("outputs", "prediction")
    tolerance = 1e-4 if outputs == "scores" or isinstance(options.get("link"), lw.Quadrature) else 5e-6
    for size in SIZES:
        assert_same(predictor(inputs(size)), posterior, inputs(size), via, outputs, tolerance, options.get("link"))


def test_scores_are_for_labels() -> None:
    x = torch.randn(20, 5)
    real, many = torch.randn(20, 1), torch.arange(20) % 101
    for outputs, y in ((1, real), (101, many)):
        posterior = lw.fit(mlp(outputs), [(x, y)], lw.KFAC(), params=lw.last_layer, prior_precision=1.0)
        refused(partial(lw.deploy, posterior, x, outputs="scores"), "for labels … Write lw.deploy(posterior, x)")


def test_a_function_after_the_last_layer() -> None:
    x, y = torch.randn(9, 5), torch.arange(9) % 3
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.Tanh()).eval()
    posterior = lw.fit(model, [(x, y)], lw.Diagonal(), prior_precision=30.0)
    predictor = lw.deploy(posterior, x, lw.Streamlined(), outputs="latent")
    assert_same(predictor(x[:7]), posterior, x[:7], lw.Streamlined(), "latent")
    posterior = lw.fit(model, [(x, y)], lw.KFAC(), params=lw.matching("2.*"), prior_precision=30.0)
    predictor = lw.deploy(posterior, x, lw.Linearized())
    assert_same(predictor(x[:7]), posterior, x[:7], lw.Linearized(), "prediction")


AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "another order": lambda f: f[:, [3, 1, 0, 2]],
    "turned": lambda f: f.flip(1).roll(1, 1),
    "some": lambda f: f[:, 1:3],
    "others": lambda f: f.index_select(1, torch.tensor([2, 0])).narrow(1, 0, 2),
    "log softmax": lambda f: f.log_softmax(1),
    "log softmax of some": lambda f: f[:, [2, 0, 1]].log_softmax(-1)[:, :2],
}


@pytest.mark.parametrize("outputs", ["prediction", "latent", "scores"])
@pytest.mark.parametrize("name", AFTER)
def test_picked_logits_and_log_softmaxes_keep_their_covariances(name: str, outputs: Any) -> None:
    x = torch.randn(20, 5)
    y = torch.arange(20) % AFTER[name](torch.zeros(1, 4)).shape[1]
    posterior = lw.fit(
        mlp(4), [(x, y)], lw.KFAC(), params=lw.last_layer, prior_precision=0.1,
        forward=lambda model, x: AFTER[name](model(x)),
    )  # fmt: skip
    for via in (lw.Linearized(), lw.Streamlined()):
        predictor = lw.deploy(posterior, x, via, outputs=outputs)
        assert_same(predictor(x[:7]), posterior, x[:7], lw.Linearized(), outputs, 1e-4)


class TwoHeads(nn.Module):
    """Three logits of two layers, and one that is always 0."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x).tanh()
        return torch.cat([self.first(h), 0 * h[:, :1], self.second(h)], 1)[:, [0, 3, 2, 1]]


@pytest.mark.parametrize("outputs", ["prediction", "latent", "scores"])
def test_joined_layers_keep_their_covariances(outputs: Any) -> None:
    x, params = torch.randn(20, 5), lw.matching("first.*", "second.*")
    posterior = lw.fit(TwoHeads().eval(), [(x, torch.arange(20) % 4)], lw.KFAC(), params=params, prior_precision=0.1)
    predictor = lw.deploy(posterior, x, lw.Streamlined(), outputs=outputs)
    assert_same(predictor(x[:7]), posterior, x[:7], lw.Linearized(), outputs, 1e-4)
    refused(partial(lw.deploy, posterior, x, lw.Linearized()), "one linear layer at the end … or other calls after")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_output_of_several_has_its_own_variance(dtype: torch.dtype) -> None:
    x = torch.randn(20, 5).to(dtype)
    posterior = lw.fit(
        mlp(4).to(dtype), [(x, x[:, :1])], lw.KFAC(), params=lw.last_layer, prior_precision=1.0,
        likelihood=lw.Gaussian(0.1), forward=lambda model, x: model(x)[:, 2:3],
    )  # fmt: skip
    predictor = lw.deploy(posterior, x, lw.Linearized(), outputs="latent")
    for rows in (x[:1], x[:7]):
        assert_same(
            predictor(rows), posterior, rows, lw.Linearized(), "latent", 1e-4 if dtype == torch.float32 else 0.02
        )


def test_picks_and_a_log_softmax_in_onnx(tmp_path: Path) -> None:
    x = torch.randn(20, 5)
    forward = AFTER["log softmax of some"]
    posterior = lw.fit(
        mlp(4), [(x, torch.arange(20) % 2)], lw.KFAC(), params=lw.last_layer, prior_precision=0.1,
        forward=lambda model, x: forward(model(x)),
    )  # fmt: skip
    found = in_onnx(lw.deploy(posterior, x), tmp_path, x)(x[:7])
    assert_same(found, posterior, x[:7], lw.Linearized(), "prediction", 1e-4)


def test_outputs_that_are_joined_twice_have_no_covariances() -> None:
    """Their parts are not uncorrelated."""
    x = torch.randn(20, 5)
    posterior = lw.fit(
        mlp(2), (x, torch.arange(20) % 4), params=lw.last_layer, prior_precision=0.1,
        forward=lambda model, x: torch.cat([model(x)] * 2, 1),
    )  # fmt: skip
    refused(partial(lw.deploy, posterior, x, lw.Linearized()), "other calls after that layer")


def test_logits_without_covariances_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(20, 5)
    posterior = lw.fit(
        mlp(4), [(x, torch.arange(20) % 4)], params=lw.last_layer, prior_precision=0.1,
        forward=lambda model, x: (lambda f: f - f.mean(1, keepdim=True))(model(x)),
    )  # fmt: skip
    lw.deploy(posterior, x)
    assert "Let one layer give all outputs" in said(caplog)[-1]
    refused(partial(lw.deploy, posterior, x, lw.Linearized()), "4, or other calls … Write via=lw.Streamlined()")


# ---- the level of the variances


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns lapwing's warnings."""
    return [text for name, level, text in caplog.record_tuples if (name, level) == ("lapwing", logging.WARNING)]


def wide(outputs: int = 1, **options: Any) -> tuple[lw.Posterior, Tensor]:
    """Returns a posterior of all weights whose streamlined variances are far too large, and its inputs."""
    torch.manual_seed(0)
    x = torch.randn(40, 5)
    y = x[:, :1].sin() if outputs == 1 else torch.arange(40) % outputs
    model = nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, outputs)).eval()
    likelihood = lw.Gaussian(0.01) if outputs == 1 else None
    return lw.fit(model, [(x, y)], lw.Full(), likelihood=likelihood, prior_precision=1.0, **options), x


@pytest.mark.parametrize(("outputs", "results"), [(1, "prediction"), pytest.param(3, "scores", marks=pytest.mark.slow)])
def test_the_default_has_the_level_of_predict(
    outputs: int, results: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    posterior, x = wide(outputs)
    predictor = lw.deploy(posterior, x[:30], outputs=results)
    assert not said(caplog)
    new = torch.randn(200, 5)  # to which the training rows x, of which the posterior is surer, say nothing
    found = posterior.latent(new, via=predictor.via).variance.mean()
    assert found == pytest.approx(float(posterior.latent(new).variance.mean()), rel=0.3)
    assert posterior.latent(new, via=lw.Streamlined()).variance.mean() > 2 * found
    assert posterior.latent(x[:30], via=predictor.via).variance.mean() > posterior.latent(x[:30]).variance.mean()
    assert_same(predictor(x[:7]), posterior, x[:7], predictor.via, results, 1e-4)
    module = torch.export.export(predictor, (x,), dynamic_shapes=predictor.dynamic_shapes).module()
    assert_same(module(x[:7]), posterior, x[:7], predictor.via, results, 1e-4)
    assert_same(in_onnx(predictor, tmp_path, x)(x[:7]), posterior, x[:7], predictor.via, results, 1e-4)
    raw = lw.deploy(posterior, x, via=lw.Streamlined(), outputs=results)
    assert raw.via == lw.Streamlined()
    assert_same(raw(x[:7]), posterior, x[:7], lw.Streamlined(), results, 1e-4)


def test_outputs_of_other_units_have_their_own_levels(tmp_path: Path) -> None:
    x = torch.randn(80, 5)
    y = torch.stack([x[:, 0].sin() + 0.2 * torch.randn(80), 100 * x[:, 1] + 30 * torch.randn(80)], 1)
    model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2))
    with torch.no_grad():
        model[4].weight[1] *= 100
    posterior = lw.fit(model.eval(), (x, y), lw.KFAC(), prior_precision=1.0)
    predictor = lw.deploy(posterior, x[:60])
    wanted = posterior.latent(x[:60]).variance.mean(0)
    torch.testing.assert_close(posterior.latent(x[:60], via=predictor.via).variance.mean(0), wanted, rtol=1e-4, atol=0)
    assert_same(predictor(x[:7]), posterior, x[:7], predictor.via, "prediction", 1e-4)
    module = torch.export.export(predictor, (x,), dynamic_shapes=predictor.dynamic_shapes).module()
    assert_same(module(x[:7]), posterior, x[:7], predictor.via, "prediction", 1e-4)
    assert_same(in_onnx(predictor, tmp_path, x)(x[:7]), posterior, x[:7], predictor.via, "prediction", 1e-4)
    again = lw.deploy(posterior, x[:60], via=lw.Scaled(predictor.via, (2.0, 3.0)), outputs="latent")
    torch.testing.assert_close(again(x)[1], posterior.latent(x, via=predictor.via).variance * torch.tensor([2.0, 3.0]))
    half = lw.deploy(posterior, x[:60], via=lw.Scaled(predictor.via, 0.5), outputs="latent")
    torch.testing.assert_close(half(x)[1], posterior.latent(x, via=predictor.via).variance / 2)
    torch.save(predictor, tmp_path / "network.pt")
    loaded = torch.load(tmp_path / "network.pt", weights_only=False)
    assert loaded.via.factor == predictor.via.factor  # type: ignore[union-attr]
    torch.testing.assert_close(loaded(x), predictor(x))


def test_the_level_comes_from_data_if_the_example_is_short_or_a_warning_does(caplog: pytest.LogCaptureFixture) -> None:
    posterior, x = wide()
    y, wanted = torch.zeros(40, 1), lw.scale_factor(posterior, x, lw.Streamlined(), to=lw.Linearized()).factor
    for data in ((x, y), [(x, y), (100 * x, y)], torch.utils.data.TensorDataset(x, y)):
        assert _default_way(posterior, x[:7], data).factor == wanted  # type: ignore[attr-defined]
    assert _default_way(posterior, x, (100 * x, y)).factor == wanted  # type: ignore[attr-defined]
    assert lw.deploy(posterior, x[:2], data=(x, y)).via.factor == wanted
    assert not said(caplog)
    assert lw.deploy(posterior, x[:7]).via == lw.Streamlined()
    (message,) = said(caplog)
    assert "lw.deploy(posterior, x) with at least 8 inputs x, or with data=(x_train, y_train)" in message


def test_the_size_of_a_batch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program for 8 inputs has one slice of the weights' covariance, and predictions of 40 have several."""
    posterior, x = wide()
    predictor, wanted = lw.deploy(posterior, x[:30], outputs="latent"), _as_new(posterior, posterior.latent(x[:30]))
    monkeypatch.setattr("lapwing.covariance.layer_block.SLICE_BYTES", 4096)
    again = lw.deploy(posterior, x[:30], outputs="latent")
    torch.testing.assert_close(again(x)[1], predictor(x)[1])
    assert wanted.sum() == pytest.approx(float(again(x[:30])[1].sum()), 1e-4)


def test_an_optimised_einsum_does_not_fix_the_number_of_samples() -> None:
    pytest.importorskip("opt_einsum")  # BoTorch brings it
    posterior, x = wide()
    assert lw.deploy(posterior, x[:30])(x)[0].shape == (len(x), 1)


def test_a_last_layer_keeps_its_variances_and_does_not_pay(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    posterior, x = wide(3, params=lw.last_layer)
    monkeypatch.setattr("lapwing.deployment.scale_factor", None)
    for rows in (2, 40):
        predictor = lw.deploy(posterior, x[:rows])
        assert predictor.via == lw.Streamlined()
        assert_same(predictor(x), posterior, x, lw.Linearized(), "prediction", 1e-5)
    assert not said(caplog)


def test_a_posterior_without_spread_is_deployed() -> None:
    x, y = torch.randn(20, 5), torch.arange(20) % 3
    for params, via in ((lw.everything, None), (lw.last_layer, lw.Linearized())):
        posterior = lw.fit(mlp(), [(x, y)], lw.TemperatureScaling(), params=params)
        torch.testing.assert_close(lw.deploy(posterior, x, via)(x), posterior.predict(x).probs)


@pytest.mark.parametrize("network", ["convolutions", "linear"])
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_layers_without_a_chosen_weight(network: str, layer: int, tmp_path: Path) -> None:
    if network == "linear":
        model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)), real(4)(12)
    else:
        convolutions = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3)
        model, x = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 2)), real(1, 8, 8)(12)
    with torch.no_grad():
        model[layer].weight.mul_(100)  # the largest weights are chosen
    posterior = lw.fit(model.eval(), (x, torch.randn(12, 2)), lw.SubsetOfWeights(9, by="magnitude"))
    spread = [name for name, std in posterior.weight_std().items() if bool((std > 0).any())]
    assert spread == [f"{layer}.weight"]
    predictor = lw.deploy(posterior, x)
    expected = posterior.predict(x, via=predictor.via)
    torch.testing.assert_close(predictor(x), (expected.mean, expected.variance))
    if layer == 2:
        found = in_onnx(predictor, tmp_path, x)(x)
        torch.testing.assert_close(tuple(map(torch.from_numpy, found)), predictor(x), rtol=1e-4, atol=1e-4)


def test_files_of_older_versions_load(tmp_path: Path) -> None:
    """Their predictors have no way."""
    _, predictor = deployed("mlp", "latent")
    old, x = copy.deepcopy(predictor), NETWORKS["mlp"][1](3)
    for name in ("via", "df"):
        del old.__dict__[name]
    torch.save(old, tmp_path / "old.pt")
    loaded = torch.load(tmp_path / "old.pt", weights_only=False)
    assert loaded.via is loaded.df is None
    assert all(map(torch.equal, loaded(x), predictor(x)))
    torch.save(predictor, tmp_path / "new.pt")
    assert torch.load(tmp_path / "new.pt", weights_only=False).via == predictor.via


# ---- noise that depends on the input

NOISES: dict[str, dict[str, Any]] = {
    "all layers": {},
    "last layer": {"params": lw.last_layer, "df": math.inf},
    "two outputs": {"outputs": 2, "method": lw.Diagonal()},
    "by the outputs": {"layer": ""},
    "double": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
}


def with_noise(
    layer: str = "4",
    df: float = 4.0,
    outputs: int = 1,
    dtype: torch.dtype = torch.float32,
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[lw.Posterior, Callable[[int], Tensor]]:
    """Returns a regression whose noise depends on the inputs of a layer, and is bounded at about half of 40 inputs."""
    torch.manual_seed(0)
    model = (model or mlp(outputs)).to(dtype)
    x = real(next(model.parameters()).shape[1], dtype=dtype)
    options = {"method": lw.KFAC(), "params": lw.everything, "prior_precision": 30.0, **options}
    batch = x(20), torch.randn(20, outputs, dtype=dtype)
    posterior = lw.fit(model, batch, likelihood=lw.Gaussian(0.01), **options)
    return with_input_noise(posterior, x(40), layer, df), x


@pytest.mark.parametrize("case", NOISES)
def test_noise_that_depends_on_the_input(case: str) -> None:
    """In eager mode and through `torch.export`, for any batch, with noise that is bounded at some inputs."""
    posterior, inputs = with_noise(**NOISES[case])
    predictor = lw.deploy(posterior, inputs(9))
    tails = NOISES[case].get("df", 4.0) < math.inf
    assert predictor.df == (4.0 if tails else None)
    assert predictor.returns == ("mean", "variance", *["df"] * tails)
    exported = torch.export.export(predictor, (inputs(4),), dynamic_shapes=predictor.dynamic_shapes).module()
    tolerance = 1e-2 if case == "bfloat16" else 1e-6
    noise = posterior.likelihood.input_noise
    far = noise.is_far(features_at(posterior.tangent, noise.layer, Inputs.of(inputs(40))))
    assert 5 < far.sum() < 35
    for size in (*SIZES, 40):
        x = inputs(size)
        for found in (predictor(x), exported(x)):
            assert_same(found[:2], posterior, x, predictor.via, "prediction", tolerance)
            assert [float(part) for part in found[2:]] == [4.0] * tails
            assert all(part.shape == () and part.dtype == found[0].dtype for part in found[2:])
    aleatoric = posterior.predict(inputs(40), via=predictor.via).aleatoric_variance
    assert aleatoric.amax() > 5 * aleatoric.amin()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_noise_in_onnx(dtype: torch.dtype, tmp_path: Path) -> None:
    """With tanh: onnxruntime has no erf in double precision."""
    posterior, inputs = with_noise(model=mlp(1, nn.Tanh), dtype=dtype)
    predictor = lw.deploy(posterior, inputs(9))
    run = in_onnx(predictor, tmp_path, inputs(1))
    for size in (*SIZES, 40):
        *found, df = run(inputs(size))
        assert_same(found, posterior, inputs(size), predictor.via, "prediction", 1e-6)
        assert float(df) == 4.0


def test_noise_beside_novelty_and_latents() -> None:
    posterior, inputs = with_noise()
    detector = lw.novelty(posterior.model, (inputs(30), inputs(30)[:, :1]))
    predictor = lw.deploy(posterior, inputs(9), novelty=detector)
    assert predictor.returns == ("mean", "variance", "df", "novelty")
    *moments, _, novelty = predictor(inputs(7))
    assert_same(moments, posterior, inputs(7), predictor.via, "prediction", 1e-6)
    torch.testing.assert_close(novelty, detector(inputs(7)).float())
    latent = lw.deploy(posterior, inputs(9), outputs="latent")
    assert (latent.returns, latent.df) == (("mean", "variance"), None)
    assert_same(latent(inputs(7)), posterior, inputs(7), latent.via, "latent", 1e-6)


def test_heads_with_the_doubt_of_their_posterior() -> None:
    heads = {"kind": lw.Categorical(), "size": lw.Gaussian(0.1)}
    joint = lw.Joint(heads, outputs={"kind": slice(0, 3), "size": slice(3, 4)})
    y = {"kind": torch.arange(60) % 3, "size": torch.randn(60, 1)}
    x, model = torch.randn(60, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    posterior = lw.fit(model, (x, y), lw.KFAC(), params=lw.last_layer, prior_precision=3.0, likelihood=joint)
    held_out = torch.randn(40, 4), {"kind": torch.arange(40) % 3, "size": torch.randn(40, 1)}
    detector = lw.novelty(posterior, (x, y), held_out=held_out, via=lw.deploy(posterior, x).via)
    predictor = lw.deploy(posterior, x, novelty=detector)
    assert torch.equal(predictor(x)[-1], detector.p_value(x))
    refused(lambda: lw.deploy(posterior, x, outputs="scores"), "is for labels")


def test_a_student_t_of_given_tails_is_deployed() -> None:
    x, y = real(5)(20), torch.randn(20, 1)
    likelihood = lw.StudentT(df=5.0, noise_variance=0.3)
    posterior = lw.fit(mlp(1), (x, y), lw.KFAC(), likelihood=likelihood, prior_precision=30.0)
    predictor = lw.deploy(posterior, x)
    assert predictor.df == 5.0
    assert_same(predictor(x)[:2], posterior, x, predictor.via, "prediction", 1e-6)


def test_features_are_those_after_a_relu_that_is_idle_at_the_example() -> None:
    """At the example the inputs and outputs of the ReLU are equal; elsewhere only its outputs are the features."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.zero_()
    posterior, _ = with_noise("2", model=model)
    x = torch.rand(9, 2) + 0.1
    predictor = lw.deploy(posterior, x)
    assert_same(predictor(-x)[:2], posterior, -x, predictor.via, "prediction", 1e-6)


# ---- a module like any other


def test_it_stands_alone(tmp_path: Path) -> None:
    """Weights are copies, the state is complete, gradients in x pass through, and `to` leaves the network alone."""
    posterior, inputs = fitted("mlp")
    x = inputs(3)
    predictor = lw.deploy(posterior, x)
    wanted = predictor(x)
    assert not list(predictor.parameters())
    stores = {value.untyped_storage().data_ptr() for value in posterior.model.state_dict().values()}
    assert stores.isdisjoint(buffer.untyped_storage().data_ptr() for buffer in predictor.buffers())

    other = lw.deploy(posterior, x)
    state = {key: value.clone() for key, value in predictor.state_dict().items()}
    for buffer in other.buffers():
        buffer.zero_()
    assert not torch.equal(other(x), wanted)
    other.load_state_dict(state)
    assert torch.equal(other(x), wanted)

    leaf = x.clone().requires_grad_()
    predictor(leaf)[:, 0].sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().max() > 0
    with torch.no_grad():
        posterior.model[0].weight.zero_()
    assert torch.equal(predictor(x), wanted)


@pytest.mark.slow
def test_moving_to_another_device() -> None:
    """The meta device represents any other: buffers, and tensors that calls create, move with the module."""
    predictor = copy.deepcopy(deployed("bert", "latent")[1]).to("meta")
    x = {key: value.to("meta") for key, value in texts(3).items()}
    assert all(part.device.type == "meta" for part in predictor(x))


def test_its_dtype_stays() -> None:
    predictor, inputs = deployed("mlp", "latent")[1], NETWORKS["mlp"][1]
    wanted = predictor(inputs(3))
    for change in (predictor.double, predictor.half, lambda: nn.Sequential(predictor).to(torch.bfloat16)):
        refused(change, "cannot be turned into")
    assert all(map(torch.equal, predictor.float().to("cpu", torch.float32)(inputs(3)), wanted))


@pytest.mark.slow
def test_two_tensors() -> None:
    case = ZOO["frozen_trunk"]

    x = (case.inputs(5, 0).float(), torch.randn(5, 6))
    parts = {"one": nn.Linear(4, 6), "two": nn.Linear(6, 3)}
    model = Net(lambda net, a, b: net.two(torch.tanh(net.one(a) + b)), **parts).eval()
    posterior = lw.fit(model, [(*x, torch.arange(5) % 3)], lw.Diagonal(), prior_precision=30.0)
    predictor = lw.deploy(posterior, x)
    one = (x[0][:1], x[1][:1])
    assert_same(predictor(one), posterior, one, lw.Streamlined(), "prediction")


def test_predictions_and_deployments_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x, way = nn.Linear(5, 3).eval(), real(5)(8), lw.Streamlined(attention="features")
    for method in (lw.KFAC(), lw.Diagonal()):
        posterior = lw.fit(model, (x, torch.arange(8) % 3), method, prior_precision=1.0)
        posterior.predict(x, via=way)
        lw.deploy(posterior, x, via=way)
    assert len([message for message in caplog.messages if "scaled_dot_product_attention" in message]) == 1


# ---- bad input


def test_inputs_of_another_form() -> None:
    (posterior, predictor), inputs = deployed("mlp", "latent"), NETWORKS["mlp"][1]
    for x in (torch.randn(3, 6), inputs(3).double(), (inputs(3),), {"x": inputs(3)}, torch.randn(5), inputs(3)[:0]):
        refused(lambda x=x: predictor(x), "another form than the inputs Tensor (batch, 5) float32")
    refused(lambda: lw.deploy(posterior, [inputs(3)]), "neither a tensor nor a flat tuple or dict of tensors")


@pytest.mark.slow
def test_texts_of_another_form() -> None:
    _, texts_of = deployed("bert", "latent")
    ids = texts(3)["input_ids"]
    for given in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": [[1] * 6] * 3}, ids):
        refused(lambda given=given: texts_of(given), "dict(input_ids=Tensor (batch, length1) int64")
