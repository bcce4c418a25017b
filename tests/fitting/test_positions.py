"""Outputs with positions (tokens, pixels), against dense oracles and against the same network on single positions."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.evaluation import compare
from lapwing.likelihoods.predictions import PSEUDO_WEIGHT
from lapwing.methods import problem as problem_module
from lapwing.methods.problem import FisherRoot
from lapwing.network.positions import Positions
from lapwing.tangent import EVERY_OUTPUT, Reading, Tangent
from lapwing.tangent.at_positions import _stride
from lapwing.tuning.held_out import sample_scores, spread_costs
from tests import oracle
from tests.conformance import close
from tests.zoo_modules import Net

F64 = torch.float64
CLASSES = 3


class Tagger(nn.Module):
    """A label for each token, by that token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(10, 4), nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))

    def features(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.hidden(self.embedding(tokens)))


class Transformer(Tagger):
    """A label for each token, by all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, CLASSES)


def segmentation(kernel: int) -> nn.Module:
    """A label for each pixel."""
    trunk, head = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, CLASSES, kernel, padding=kernel // 2)
    return Net(lambda net, images: net.head(torch.tanh(net.trunk(images))), trunk=trunk, head=head)


NETWORKS = {
    "tagger": Tagger,
    "transformer": Transformer,
    "1x1": lambda: segmentation(1),
    "3x3": lambda: segmentation(3),
    "transposed": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.ConvTranspose2d(4, 3, 3, 1, 1)),
}


def case(name: str, ignored: bool = True) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Tensor]:
    """Return a network, two batches with other positions, some of whose labels do not count, and inputs to predict."""
    torch.manual_seed(1)
    model = NETWORKS[name]().to(F64).eval()
    if name in ("tagger", "transformer"):
        inputs = [torch.randint(10, (4, 4)), torch.randint(10, (3, 2))]
    else:
        inputs = [torch.randn(3, 2, 3, 4, dtype=F64), torch.randn(2, 2, 2, 3, dtype=F64)]
    targets = [torch.randint(CLASSES, (len(x), *(x.shape[1:] if x.ndim == 2 else x.shape[2:]))) for x in inputs]
    if ignored:
        for y in targets:
            y.flatten()[::3] = -100
    return model, list(zip(inputs, targets, strict=True)), inputs[1][:2]


def rows(values: Tensor) -> Tensor:
    """Return outputs (B, T, C) or (B, C, H, W) as (B T, C)."""
    return values.reshape(-1, CLASSES) if values.ndim == 3 else values.movedim(1, -1).reshape(-1, CLASSES)


def dense(model: nn.Module, loader: list[tuple[Tensor, Tensor]], names: list[str]) -> Tensor:
    """Return the generalised Gauss-Newton matrix over the positions that count."""
    total: Tensor = torch.zeros((), dtype=F64)
    for x, y in loader:
        J = jacobian(model, x, names)
        keep = (y != -100).flatten()
        total = total + oracle.ggn(J[keep], oracle.softmax_fisher(rows(model(x).detach())[keep]))
    return total


def jacobian(model: nn.Module, x: Tensor, names: list[str]) -> Tensor:
    """Return the Jacobian (B T, C, P) of every position's outputs."""
    parameters = {name: dict(model.named_parameters())[name].detach() for name in names}

    def outputs(values: dict[str, Tensor]) -> Tensor:
        return rows(torch.func.functional_call(model, values, (x,)))

    with oracle.reference_kernels():
        parts = torch.func.jacrev(outputs)(parameters)
    return torch.cat([parts[name].flatten(2) for name in names], -1).detach()


@pytest.mark.quick(3)
@pytest.mark.parametrize("params", [lw.last_layer, lw.everything])
@pytest.mark.parametrize("method", [lw.Diagonal(), lw.Full()])
@pytest.mark.parametrize("name", NETWORKS)
def test_latents_and_evidence_are_the_dense_oracles(name, method, params):
    model, loader, x = case(name)
    posterior = lw.fit(model, loader, method, params=params, prior_precision=2.0, tune=None)
    names = list(posterior.tangent.parameters)
    G, J = dense(model, loader, names), jacobian(model, x, names)
    G = torch.diag(G.diagonal()) if method == lw.Diagonal() else G
    covariance = oracle.output_covariance(J, oracle.laplace_covariance(G, 2.0))
    latent = posterior.latent(x)
    shape = model(x).shape
    assert latent.mean.shape == latent.variance.shape == shape
    close(latent.mean, model(x).detach())
    close(latent.covariance.flatten(0, -3), covariance)
    close(rows(latent.variance), covariance.diagonal(dim1=1, dim2=2))
    data = torch.cat([rows(model(x).detach())[(y != -100).flatten()] for x, y in loader])
    labels = torch.cat([y[y != -100] for _, y in loader])
    fit = oracle.categorical_log_likelihood(data, labels).sum()
    weights = oracle.flat_parameters(model, names)
    wanted = fit - weights.square().sum() - 0.5 * torch.logdet(torch.eye(len(G), dtype=F64) + G / 2)
    assert posterior.log_marginal_likelihood() == pytest.approx(float(wanted), rel=1e-9)
    assert posterior.samples == sum(len(x) for x, _ in loader)


@pytest.mark.parametrize("method", [lw.KFAC(), lw.EKFAC(), lw.Diagonal(), lw.Full(form="primal")])
def test_a_last_layer_is_that_of_single_positions(method):
    """The head alone, on the features of every position that counts: factors, tuning and predictions are the same."""
    model, loader, x = case("transformer")
    features = [model.features(x).detach() for x, _ in loader]
    plain = [(f[y != -100], y[y != -100]) for f, (_, y) in zip(features, loader, strict=True)]
    mine = lw.fit(model, loader, method, params=lw.last_layer, tune=lw.Evidence())
    single = lw.fit(model.head, plain, method, tune=lw.Evidence())
    assert mine.prior_precision == pytest.approx(single.prior_precision, rel=1e-6)
    single = single.with_prior(mine.prior_precision)
    alone = single.predict(model.features(x).detach().flatten(0, 1))
    prediction = mine.predict(x)
    close(prediction.probs.flatten(0, 1), alone.probs)
    close(prediction.entropy().flatten(), alone.entropy())
    close(prediction.mutual_information().flatten(), alone.mutual_information())
    assert mine.log_marginal_likelihood() == pytest.approx(single.log_marginal_likelihood(), rel=1e-9)


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", [lw.last_layer, lw.everything])
@pytest.mark.parametrize("name", ["transformer", "3x3"])
def test_subspaces_of_all_rows_or_weights_are_the_whole(name, params):
    """The rows of every position, of which the second batch has more, or all weights as a subset."""
    model, loader, x = case(name)
    loader.reverse()
    posterior = lw.fit(model, loader, lw.Full(), params=params, prior_precision=2.0)
    wanted, size = posterior.latent(x).covariance, posterior.tangent.size
    for method in (
        lw.ELLA(rank=1000, rows="all", residual="prior"), lw.SubsetOfWeights(size),
        lw.OptimalSubspace(size, "prior", rows="all", residual="prior"), lw.VaLLA(1000, lw.ClosedForm(), "data"),
        lw.VaLLA(1000, lw.NaturalGradient(steps=3), "kmeans"),
    ):  # fmt: skip
        close(lw.fit(model, loader, method, params=params, prior_precision=2.0).latent(x).covariance, wanted, 1e-6)


@pytest.mark.parametrize("method", [lw.KFAC(), lw.Full(form="primal")])
def test_weights_of_samples_and_classes_count_at_every_position(method):
    model, loader, x = case("transformer")
    features, weights = [model.features(x).detach() for x, _ in loader], [torch.rand(len(x)) for x, _ in loader]
    data = [(x, y, w) for (x, y), w in zip(loader, weights, strict=True)]
    plain = [
        (f[y != -100], y[y != -100], w[:, None].expand(y.shape)[y != -100])
        for f, (_, y), w in zip(features, loader, weights, strict=True)
    ]
    options = {"likelihood": lw.Categorical(class_weights=(1.0, 3.0, 0.5)), "sample_weights": True}
    mine = lw.fit(model, data, method, params=lw.last_layer, **options)
    single = lw.fit(model.head, plain, method, **options, prior_precision=mine.prior_precision)
    close(mine.latent(x).variance.flatten(0, 1), single.latent(model.features(x).detach().flatten(0, 1)).variance)
    assert mine.log_marginal_likelihood() == pytest.approx(single.log_marginal_likelihood(), rel=1e-9)
    everything = lw.fit(model, data, lw.Diagonal(), **options, prior_precision=1.0)
    whole = torch.cat([s.eigenvalues for s in everything.covariance.structures.values()])
    repeated = [(x[i : i + 1], y[i : i + 1], w[i : i + 1]) for x, y, w in data for i in range(len(x))]
    again = lw.fit(model, repeated, lw.Diagonal(), **options, prior_precision=1.0)
    close(torch.cat([s.eigenvalues for s in again.covariance.structures.values()]), whole)


def test_kfac_of_all_weights_is_that_of_single_tokens():
    model, loader, x = case("tagger", ignored=False)
    mine = lw.fit(model, loader, lw.KFAC(), prior_precision=2.0)
    plain = [(tokens.reshape(-1), y.reshape(-1)) for tokens, y in loader]
    single = lw.fit(model, plain, lw.KFAC(), prior_precision=2.0)
    close(mine.latent(x).covariance.flatten(0, 1), single.latent(x.flatten()).covariance)


@pytest.mark.parametrize("name", ["transformer", "3x3"])
def test_ignored_padding_changes_nothing(name):
    """Labels that do not count, whatever stands there, and other batches of the same data, give one posterior."""
    model, loader, x = case(name)
    some = [(x[:1], y[:1]) for x, y in loader] + [(x[1:], y[1:]) for x, y in loader]
    one, other = (lw.fit(model, data, prior_precision=1.0) for data in (loader, some))
    close(one.predict(x).probs, other.predict(x).probs)
    uncounted = loader[1][0], torch.full_like(loader[1][1], -100)
    assert lw.fit(model, [loader[0], uncounted]).samples == sum(len(x) for x, _ in loader)
    renamed = [(x, torch.where(y == -100, 7, y)) for x, y in loader]
    again = lw.fit(model, renamed, likelihood=lw.Categorical(ignore_index=7), prior_precision=1.0)
    close(one.predict(x).probs, again.predict(x).probs)


def test_shapes_of_predictions_for_pixels_and_tokens():
    for name in ("tagger", "3x3"):
        model, loader, x = case(name)
        posterior = lw.fit(model, loader)
        y = torch.zeros(rows(model(x)).shape[0], dtype=torch.long).reshape(
            model(x).shape[:2] if name == "tagger" else (len(x), *x.shape[2:])
        )
        y.flatten()[0] = -100
        p = posterior.predict(x)
        assert p.probs.shape == model(x).shape
        assert torch.allclose(p.probs.sum(p.latent.places.axis), torch.ones((), dtype=F64))
        for one in (p.confidence, p.classes, p.entropy(), p.mutual_information(), p.log_prob(y), p.uncertainty()):
            assert one.shape == y.shape
        assert p.sample(3).shape == (3, *y.shape)
        assert p.log_prob(y).flatten()[0] == 0
        close(p.log_prob(y).flatten()[1:], rows(p.probs)[1:, 0].log())
        close(p.log_prob(y.unsqueeze(p.latent.places.axis)), p.log_prob(y))
        drawn = posterior.predict(x, via=lw.MonteCarlo(20))
        assert drawn.probs.shape == p.probs.shape
        assert posterior.latent(x, via=lw.Scaled(lw.Linearized(), 4.0)).std.shape == p.probs.shape


@pytest.mark.parametrize("name", ["transformer", "3x3"])
def test_batches_of_unequal_lengths_predict_a_list(name):
    """Texts that are padded to the longest of their batch, and images of several sizes."""
    model, loader, x = case(name)
    posterior = lw.fit(model, loader, lw.KFAC())
    for data in (loader, [inputs for inputs, _ in loader]):
        parts = posterior.predict(data)
        assert len(parts) == 2
        for part, (inputs, targets) in zip(parts, loader, strict=True):
            torch.testing.assert_close(part.probs, posterior.predict(inputs).probs)
            assert part.log_prob(targets).shape == targets.shape
        assert [part.mean.shape for part in posterior.latent(data)] == [part.probs.shape for part in parts]
        ensemble = lw.mixture([posterior, posterior]).predict(data)
        torch.testing.assert_close([part.probs for part in ensemble], [part.probs for part in parts])
    assert posterior.predict([x, x]).probs.shape[0] == 2 * len(x)  # equal lengths are one prediction


def test_the_targets_say_which_dimension_holds_the_classes():
    head = nn.Conv1d(2, CLASSES, 1).to(F64).eval()
    x, y = torch.randn(9, 2, 5, dtype=F64), torch.randint(CLASSES, (9, 5))
    posterior = lw.fit(head, [(x, y)], prior_precision=1.0)
    assert posterior.predict(x).entropy().shape == (9, 5)
    linear = nn.Linear(2, CLASSES).to(F64).eval()
    linear.load_state_dict({"weight": head.weight[:, :, 0], "bias": head.bias})
    last = lw.fit(linear, [(x.mT.unsqueeze(2), y.unsqueeze(2))], prior_precision=1.0)  # (B, T, 1, C)
    close(last.predict(x.mT.unsqueeze(2)).probs[:, :, 0].mT, posterior.predict(x).probs)


def test_targets_of_one_pixel_keep_the_outputs_on_their_dimension():
    head = nn.Conv2d(2, CLASSES, 2).to(F64).eval()
    linear = nn.Linear(8, CLASSES).to(F64).eval()
    linear.load_state_dict({"weight": head.weight.flatten(1), "bias": head.bias})
    x, y = torch.randn(5, 2, 2, 2, dtype=F64), torch.randn(5, CLASSES, 1, 1, dtype=F64)
    options = {"likelihood": lw.Gaussian([0.5, 0.4, 0.3]), "prior_precision": 1.0}
    mine = lw.fit(head, [(x, y)], lw.Full(), **options).latent(x)
    plain = lw.fit(linear, [(x.flatten(1), y.flatten(1))], lw.Full(), **options).latent(x.flatten(1))
    close(mine.covariance.flatten(0, 2), plain.covariance)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_maps_of_real_values_and_of_answers(likelihood):
    model, loader, x = case("3x3")
    data = [(x, torch.randn_like(model(x)).detach()) for x, _ in loader]
    if likelihood == "bernoulli":
        data = [(x, y > 0) for x, y in data]
    posterior = lw.fit(model, data, likelihood=likelihood, params=lw.last_layer, prior_precision=2.0)
    f = posterior.latent(x)
    J = jacobian(model, x, ["head.weight", "head.bias"])
    G = torch.zeros((), dtype=F64)
    for inputs, _ in data:
        outputs = rows(model(inputs).detach())
        slope = torch.ones_like(outputs) / (posterior.noise_variance or 1.0)
        slope = outputs.sigmoid() * (1 - outputs.sigmoid()) if likelihood == "bernoulli" else slope
        G = G + oracle.ggn(jacobian(model, inputs, ["head.weight", "head.bias"]), torch.diag_embed(slope))
    full = lw.fit(
        model, data, lw.Full(), likelihood=posterior.likelihood, params=lw.last_layer, prior_precision=2.0
    ).latent(x)
    close(full.covariance.flatten(0, 2), oracle.output_covariance(J, oracle.laplace_covariance(G, 2.0)))
    prediction, y = posterior.predict(x), data[1][1][: len(x)]
    assert prediction.log_prob(y).shape == (len(x), *x.shape[2:])
    if likelihood == "gaussian":
        assert prediction.variance.shape == prediction.interval(0.9)[0].shape == model(x).shape
        close(prediction.variance, f.variance + posterior.noise_variance)
    else:
        assert prediction.probs.shape == prediction.sample(2)[0].shape == model(x).shape


def test_a_column_of_the_sampled_root_covers_all_positions(monkeypatch):
    monkeypatch.setattr(problem_module, "EXACT_FISHER_OUTPUTS", 5)
    outputs = torch.randn(2, 2 * CLASSES, dtype=F64)
    root = FisherRoot(lw.Categorical(), CLASSES, torch.Generator().manual_seed(0), positions=2)
    assert root.columns == root(outputs).shape[2] == 8
    mean = torch.stack([r @ r.mT for r in (root(outputs) for _ in range(1000))]).mean(0)
    monkeypatch.undo()
    exact = FisherRoot(lw.Categorical(), CLASSES, torch.Generator(), positions=2)(outputs)
    blocks = oracle.softmax_fisher(outputs.reshape(-1, CLASSES)).reshape(2, 2, CLASSES, CLASSES)
    wanted = torch.stack([torch.block_diag(*pair) for pair in blocks])
    close(exact @ exact.mT, wanted)
    assert (mean - wanted).abs().max() < 0.04


def test_too_many_positions_for_all_weights_are_sampled(caplog):
    model = segmentation(1).to(F64).eval()
    x, y = torch.randn(2, 2, 19, 18, dtype=F64), torch.randint(CLASSES, (2, 19, 18))
    with caplog.at_level(logging.INFO, "lapwing"):
        posterior = lw.fit(model, [(x, y)], lw.Diagonal())
    assert "1026 outputs at 342 positions" in caplog.text
    exact = torch.diag(dense(model, [(x, y)], list(posterior.tangent.parameters)))
    found = torch.cat([s.eigenvalues for s in posterior.covariance.structures.values()])
    assert float(found.sum()) == pytest.approx(float(exact.sum()), rel=0.5)
    with pytest.raises(lw.LapwingError, match=r"lw.Linearized\(draws=64\)"):
        posterior.predict(x, via=lw.Linearized())
    assert posterior.predict(x).probs.shape == (2, CLASSES, 19, 18)  # by 64 draws
    assert lw.fit(model, [(x, y)]).predict(x).probs.shape == (2, CLASSES, 19, 18)  # the last layer


def test_held_out_scores_leave_out_labels_that_do_not_count():
    model, loader, _ = case("tagger")
    posterior = lw.fit(model, loader[:1], prior_precision=1.0)
    scores = sample_scores([posterior], lambda one: [one], loader)[0, 0, 0]
    wanted = torch.cat([posterior.predict(x).log_prob(y)[y != -100] for x, y in loader])
    uniform = torch.cat([posterior.predict(x).probs.log().mean(-1)[y != -100] for x, y in loader])
    close(scores, wanted + PSEUDO_WEIGHT * uniform.mean() / len(wanted))
    certain = torch.cat(
        [torch.log_softmax(model(x), -1)[y != -100].gather(1, y[y != -100][:, None]) for x, y in loader]
    )
    (cost,) = spread_costs([posterior], loader)[0]  # two batches
    assert cost == pytest.approx(float((certain.sum() - wanted.sum()).detach()) / len(wanted), rel=1e-9)


def test_plain_labels_that_do_not_count_are_left_out():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).to(F64).eval()
    x, y = torch.randn(12, 4, dtype=F64), torch.randint(CLASSES, (12,))
    y[::4] = -100
    keep = y != -100
    loaders = [(x[:5], y[:5]), (x[5:], y[5:])], [(x[keep], y[keep])]
    for method in (lw.KFAC(), lw.EKFAC(), lw.Full(), lw.Full(form="dual"), lw.Diagonal()):
        one, other = (lw.fit(model, data, method, prior_precision=1.0) for data in loaders)
        close(one.latent(x).covariance, other.latent(x).covariance)
        assert one.log_marginal_likelihood() == pytest.approx(other.log_marginal_likelihood(), rel=1e-9)
        assert one.samples == 12
    none = lw.fit(model, [(x[:2], y[:2]), (x[4:5], y[4:5]), (x[5:], y[5:])], lw.KFAC(), prior_precision=1.0)
    assert none.predict(x).log_prob(y)[0] == 0
    for method in (lw.ELLA(rank=40, rows="all", residual="prior"), lw.SubsetOfWeights(size=20)):
        one, other = (lw.fit(model, data, method, prior_precision=1.0) for data in loaders)
        close(one.latent(x).covariance, other.latent(x).covariance, 1e-7)


@pytest.mark.parametrize("name", ["tagger", "3x3"])
def test_differentiable_in_inputs_and_small_chunks(name):
    model, loader, x = case(name)
    whole = lw.fit(model, loader, params=lw.last_layer, prior_precision=1.0)
    if name == "3x3":
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(whole.latent(x).variance.sum(), x)
        step = torch.randn_like(x)
        ends = [whole.latent((x + h * step).detach()).variance.sum() for h in (1e-5, -1e-5)]
        assert float((slope * step).sum()) == pytest.approx(float(ends[0] - ends[1]) / 2e-5, rel=1e-5)
    large = loader[0][0].repeat(40, *[1] * (loader[0][0].ndim - 1))
    tight = lw.fit(model, loader, params=lw.last_layer, prior_precision=1.0, memory=2**24)
    close(tight.latent(large).variance, whole.latent(large).variance)


@pytest.mark.parametrize("name", ["transformer", "3x3"])
def test_draws_of_linearised_outputs(name):
    model, loader, x = case(name)
    posterior = lw.fit(model, loader, lw.KFAC(), prior_precision=2.0)
    exact, drawn = posterior.latent(x), posterior.latent(x, via=lw.Linearized(draws=1000))
    close(drawn.mean, exact.mean)
    assert (drawn.variance / exact.variance - 1).abs().max() < 6 * (2 / 1000) ** 0.5
    assert drawn.covariance.shape == exact.covariance.shape
    close(drawn.standard_error, drawn.variance * (2 / 1000) ** 0.5)
    assert (drawn.covariance - exact.covariance).abs().max() < 0.25 * exact.covariance.abs().max()
    assert posterior.predict(x, via=lw.Linearized(draws=8)).entropy().shape == posterior.predict(x).entropy().shape


def test_compare_counts_positions():
    model, loader, _ = case("3x3")
    table = compare({"KFAC": lw.fit(model, loader)}, loader[:1], foreign={"other": loader[1][0]})
    x, y = loader[0]
    keep = y != -100
    right = (model(x).argmax(1) == y)[keep].double().mean()
    assert table["network"]["accuracy"] == pytest.approx(float(right))
    posterior, other = lw.fit(model, loader), loader[1][0]
    inside, outside = (posterior.predict(each).mutual_information().flatten() for each in (x, other))
    inside = inside[keep.flatten()]
    above = (outside[:, None] > inside).double() + 0.5 * (outside[:, None] == inside).double()
    assert table["KFAC"]["other: AUROC by MI"] == pytest.approx(float(above.mean()), abs=1e-6)
    plain = model(x).softmax(1).movedim(1, -1)[keep]
    entropy, far = (
        torch.special.entr(p).sum(-1) for p in (plain, model(other).softmax(1).movedim(1, -1).flatten(0, -2))
    )
    assert table["network"]["other: AUROC by entropy"] == pytest.approx(
        float((far[:, None] > entropy).double().mean()), abs=1e-6
    )


def test_files_keep_their_keys_of_the_layout():
    layout = Positions(-1, 3, outputs=4, count=5, rows_are_positions=True)
    data = {"axis": -1, "dims": 3, "outputs": 4, "count": 5, "direct": True, "joined": False}
    assert layout.to_json() == data
    assert Positions.from_json(data) == Positions.from_json({**data, "a later key": 1}) == layout


@pytest.mark.parametrize("sizes", [(32, 32), (64, 64), (50, 64), (33, 128)], ids=str)
@pytest.mark.parametrize("params", [lw.last_layer, lw.everything], ids=["last", "everything"])
def test_some_positions_are_not_a_column_of_the_map(sizes, params):
    """Every column is as likely, also where the number of positions is a multiple of the width."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Tanh(), nn.Conv2d(2, 2, 1)).eval()
    x = torch.randn(2, 1, *sizes)
    tangent, count = Tangent.survey(model, x, params), sizes[0] * sizes[1]
    most = 1 if params is lw.last_layer else 16  # 64 times as many of a last layer
    records = tangent.records(x, EVERY_OUTPUT, None, Reading(max_positions=most))
    read = torch.cat([torch.arange(2 * count)[rows] for rows, _ in records])
    assert 20 <= len(read) <= 2 * 64
    columns = read % sizes[1] / sizes[1]
    rows = read % count // sizes[1] / sizes[0]
    for part in (columns, rows):
        assert len(part.unique()) >= 10
        assert 0.35 < part.mean() < 0.65


@pytest.mark.parametrize("tuned", ["held out", "training data"])
def test_padding_takes_no_place_of_positions_that_count(tuned):
    """Of many positions some are scored: those whose labels count."""
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
    model[2].weight.data *= 8  # overconfident
    x, y, probabilities = torch.randn(24, 10, 3), torch.randint(3, (24, 10)), []
    y[:, 6] = model(x)[:, 6].argmax(-1)  # the first position that even steps through 110 positions find
    for padding in (0, 100):
        xs = torch.cat([x, torch.zeros(24, padding, 3)], 1)
        ys = torch.cat([torch.full((24, 1), -100), y[:, 1:], torch.full((24, padding), -100)], 1)
        options = {"validation": (xs[12:], ys[12:])} if tuned == "held out" else {}
        posterior = lw.fit(model, (xs[:12], ys[:12]), lw.KFAC(), **options)
        probabilities.append(posterior.predict(xs).probs[:, :10])
    close(probabilities[0], probabilities[1], 1e-2)


def test_steps_through_positions_exist_for_every_width_and_visit_its_columns():
    for width in (1, 2, 3, 8, 9, 10, 12, 30, 64, 210, 1000, 1024):
        for least in (1, 2, width // 2 + 1, width, 3 * width):
            step = _stride(least, width)
            assert least <= step <= least + max(width, 2)
            assert step == 1 or len({i * step % width for i in range(width)}) == width
