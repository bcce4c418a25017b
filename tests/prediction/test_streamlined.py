"""Streamlined prediction against dense covariances, explicit loops over weights, and weight draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lapwing import tangent as tn
from lapwing.covariance import (
    Blockwise,
    DenseBlock,
    DenseCovariance,
    DiagonalBlock,
    ExplicitBasis,
    KroneckerBlock,
    LowRank,
    LowRankWithResidual,
)
from lapwing.errors import LapwingError
from lapwing.prediction.linearized import Linearized
from lapwing.prediction.streamlined import Streamlined
from lapwing.prediction.streamlined.elementwise import ACTIVATIONS
from lapwing.prediction.streamlined.moments import Moments
from lapwing.prediction.streamlined.propagate import RULES

F64 = torch.float64
KINDS = ("kronecker", "diagonal", "dense block", "dense", "low rank", "low rank with residual")
DRAWS = 20_000


def psd(size: int) -> Tensor:
    root = torch.randn(size, size, dtype=F64)
    return root @ root.T


def structure(block, kind):
    groups, outputs, inputs = block.matrix_shape
    if kind == "diagonal":
        return DiagonalBlock(torch.rand(block.size, dtype=F64))
    if kind == "dense block":
        return DenseBlock(*torch.linalg.eigh(psd(block.size)))
    bases = [torch.linalg.qr(torch.randn(groups, n, n, dtype=F64))[0] for n in (inputs, outputs)]
    return KroneckerBlock(torch.rand(groups, outputs, inputs, dtype=F64), *bases)


def build(tangent, kind, scale=3.0):
    """A random covariance over the tangent's blocks, a prior of its own for each."""
    blocks = tangent.blocks
    precision = 1.0 + torch.rand(len(blocks), dtype=F64)
    if kind in ("kronecker", "diagonal", "dense block"):
        return Blockwise(blocks, {block.name: structure(block, kind) for block in blocks}, precision, scale)
    curvature = psd(tangent.size)
    if kind == "dense":
        return DenseCovariance(blocks, curvature, precision, scale)
    rows = torch.randn(4, tangent.size, dtype=F64)
    parts = rows.split([block.size for block in blocks], -1)
    basis = ExplicitBasis({block.name: part for block, part in zip(blocks, parts, strict=True)})
    cls = LowRank if kind == "low rank" else LowRankWithResidual
    traces = curvature.diagonal().sum().expand(len(blocks))  # not looked at
    return cls(blocks, basis, rows @ curvature @ rows.T, traces, precision, scale)


def weight_covariances(tangent, covariance) -> dict[str, Tensor]:
    """Dense Cov[W_ji, W_j'i'] of each block, (O, I, O, I), the bias the last input."""
    dense, out, start = covariance.to_dense(), {}, 0
    for block in tangent.blocks:
        part, start = slice(start, start + block.size), start + block.size
        out[block.name] = dense[part, part].reshape(*block.matrix_shape[1:], *block.matrix_shape[1:])
    return out


def mlp(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def survey(model, x, params=None):
    return tn.Tangent.survey(model.eval(), x, params or tn.matching("*"))


def linear_by_loops(mean: Tensor, cov: Tensor, weight: Tensor, S: Tensor | None) -> Tensor:
    """Cov[h] (O, O) of one sample by equations 3 and 4; mean and cov with the bias as a last, certain input of one."""
    outputs, inputs = weight.shape
    out = torch.zeros(outputs, outputs, dtype=F64)
    for j in range(outputs):
        for k in range(outputs):
            for i in range(inputs):
                for l in range(inputs):
                    out[j, k] += weight[j, i] * weight[k, l] * cov[i, l]
                    if S is not None:
                        out[j, k] += (mean[i] * mean[l] + cov[i, l]) * S[j, i, k, l]
    return out


def mlp_by_loops(model, S: dict[str, Tensor], x: Tensor, diagonal: bool) -> Tensor:
    """Output covariances (B, C, C) of linear layers with tanh between them, one sample at a time."""
    results, last = [], str(len(model) - 1)
    for mean in x:
        cov = torch.zeros(len(mean), len(mean), dtype=F64)
        for name, module in model.named_children():
            if isinstance(module, nn.Tanh):
                mean = mean.tanh()
                cov = (1 - mean**2)[:, None] * cov * (1 - mean**2)
                continue
            joined = torch.cat([module.weight, module.bias[:, None]], 1).detach()
            mean = torch.cat([mean, torch.ones(1, dtype=F64)])
            padded = torch.zeros(len(mean), len(mean), dtype=F64)
            padded[:-1, :-1] = cov
            cov = linear_by_loops(mean, padded, joined, S.get(name))
            mean = joined @ mean
            if diagonal and name != last:
                cov = cov.diagonal().diag()
        results.append(cov)
    return torch.stack(results)


def draw_outputs(model, tangent, covariance, x) -> Tensor:
    """Outputs (S, B, C) under weight draws."""
    vectors = covariance.sample(DRAWS, torch.Generator().manual_seed(1))
    moved = {n: value + d for (n, d), value in zip(
        tn.split(tangent.blocks, vectors).items(), tangent.parameters.values(), strict=True
    )}  # fmt: skip
    call = lambda parameters: torch.func.functional_call(model, parameters, (x,))  # noqa: E731
    return torch.vmap(call)({n: m.detach() for n, m in moved.items()})


def assert_within_monte_carlo_error(draws: Tensor, mean: Tensor, covariance: Tensor, errors: float = 5.0) -> None:
    """Compares two moments with the draws', within `errors` standard errors estimated from the same draws."""
    centred = draws - mean
    products = centred[..., :, None] * centred[..., None, :]  # (S, B, C, C)
    for found, wanted in ((draws, mean), (products, covariance)):
        error = found.std(0) / len(found) ** 0.5
        assert ((found.mean(0) - wanted).abs() <= errors * error).all()


# ---- the covariance's side


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("uncertain", ["certain", "variances", "covariances"])
@pytest.mark.parametrize("kind", KINDS)
def test_push_equals_dense_sum(kind, uncertain, full):
    x = torch.randn(6, 4, dtype=F64)
    tangent = survey(mlp(), x)
    covariance = build(tangent, kind)
    S = weight_covariances(tangent, covariance)["2"]  # (O, I, O, I)
    mean = torch.randn(6, S.shape[1], dtype=F64)
    root = torch.randn(6, S.shape[1], S.shape[1], dtype=F64)
    variance = {"certain": None, "variances": mean.square() + 0.1, "covariances": root @ root.mT}[uncertain]
    M = mean[:, :, None] * mean[:, None, :]
    if variance is not None:
        M = M + (variance if variance.ndim == 3 else torch.diag_embed(variance))
    expected = torch.einsum("bil,jikl->bjk", M, S)
    found = covariance.layer_block("2").push(mean, variance, full)
    torch.testing.assert_close(found, expected if full else expected.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=1e-10)


# ---- exact limits


@pytest.mark.parametrize("mode", ["diagonal", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_last_layer_streamlined_is_linearised(kind, mode):
    x = torch.randn(6, 4, dtype=F64)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 3)).double()
    tangent = survey(model, x, tn.last_layer)
    covariance = build(tangent, kind)
    latent = Streamlined(mode).latent(tangent, covariance, x, joint=False)
    J = tangent.record(x).rows()
    torch.testing.assert_close(latent.covariance, J @ covariance.to_dense() @ J.mT, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(latent.mean, model(x).detach())
    torch.testing.assert_close(latent.variance, Linearized().latent(tangent, covariance, x, joint=False).variance)


@pytest.mark.parametrize("mode", ["diagonal", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_layer_equals_loops(kind, mode):
    x = torch.randn(3, 4, dtype=F64)
    model = mlp()
    tangent = survey(model, x)
    covariance = build(tangent, kind)
    latent = Streamlined(mode).latent(tangent, covariance, x, joint=False)
    expected = mlp_by_loops(model, weight_covariances(tangent, covariance), x, mode == "diagonal")
    torch.testing.assert_close(latent.covariance, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(latent.mean, model(x).detach())
    assert latent.terms[0].matrix.shape == (3, 3, 3)


@pytest.mark.parametrize("mode", ["diagonal", "full"])
@pytest.mark.parametrize("patterns", [("*",), ("0.*",), ("0.*", "4.*")])
@pytest.mark.parametrize("kind", KINDS)
def test_two_hidden_layers_equal_loops(kind, patterns, mode):
    x = torch.randn(2, 3, dtype=F64)
    layers = (nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model = nn.Sequential(*layers).double()
    tangent = survey(model, x, tn.matching(*patterns))
    covariance = build(tangent, kind)
    latent = Streamlined(mode).latent(tangent, covariance, x, joint=False)
    expected = mlp_by_loops(model, weight_covariances(tangent, covariance), x, mode == "diagonal")
    torch.testing.assert_close(latent.covariance, expected, rtol=1e-10, atol=1e-10)


def deep_linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6, bias=False), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("layer", ["0", "1", "2"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_of_a_deep_linear_network_is_exact_in_full_mode(kind, layer):
    x = torch.randn(4, 4, dtype=F64)
    model = deep_linear()
    tangent = survey(model, x, tn.matching(f"{layer}.*"))
    covariance = build(tangent, kind)
    latent = Streamlined("full").latent(tangent, covariance, x, joint=False)
    J = tangent.record(x).rows()
    torch.testing.assert_close(latent.covariance, J @ covariance.to_dense() @ J.mT, rtol=1e-10, atol=1e-10)
    assert_within_monte_carlo_error(draw_outputs(model, tangent, covariance, x), latent.mean, latent.covariance)


@pytest.mark.parametrize("kind", ["kronecker", "diagonal", "dense block"])
def test_product_of_two_independent_layers_is_exact_in_full_mode(kind):
    x = torch.randn(4, 4, dtype=F64)
    model = deep_linear()
    tangent = survey(model, x, tn.matching("0.*", "1.*"))
    covariance = build(tangent, kind, scale=0.3)
    latent = Streamlined("full").latent(tangent, covariance, x, joint=False)
    S = weight_covariances(tangent, covariance)
    W, V, U = (model[k].weight.detach() for k in (0, 1, 2))
    a = torch.cat([x, torch.ones(4, 1, dtype=F64)], 1)
    b = x @ W.T + model[0].bias.detach()
    hh = b[:, :, None] * b[:, None, :] + torch.einsum("bi,bl,jikl->bjk", a, a, S["0"])  # E[h hᵀ]
    VV = torch.einsum("ji,kl->jikl", V, V) + S["1"]  # E[V_ji V_kl]
    mean = b @ V.T
    cov = torch.einsum("jikl,bil->bjk", VV, hh) - mean[:, :, None] * mean[:, None, :]
    torch.testing.assert_close(latent.covariance, U @ cov @ U.T, rtol=1e-10, atol=1e-10)
    assert_within_monte_carlo_error(draw_outputs(model, tangent, covariance, x), latent.mean, latent.covariance)


# ---- which parameters, which networks


@pytest.mark.parametrize("mode", ["diagonal", "full"])
@pytest.mark.parametrize("patterns", [("*.weight",), ("*.bias",), ("0.weight", "2.bias"), ("0.*",), ("2.weight",)])
def test_part_of_the_parameters_equals_loops(patterns, mode):
    x = torch.randn(2, 4, dtype=F64)
    model = mlp()
    tangent = survey(model, x, tn.matching(*patterns))
    covariance = build(tangent, "kronecker")
    found = weight_covariances(tangent, covariance)
    S = {}
    for layer in ("0", "2"):
        outputs, inputs = model[int(layer)].weight.shape
        S[layer] = torch.zeros(outputs, inputs + 1, outputs, inputs + 1, dtype=F64)
        for block in tangent.blocks:
            if block.parameters[0].startswith(layer):
                columns = slice(0 if block.has_weight else inputs, inputs + block.bias)
                S[layer][:, columns, :, columns] = found[block.name]
    latent = Streamlined(mode).latent(tangent, covariance, x, joint=False)
    expected = mlp_by_loops(model, S, x, mode == "diagonal")
    torch.testing.assert_close(latent.covariance, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["diagonal", "full"])
def test_nested_sequentials_single_layers_and_one_output(mode):
    x = torch.randn(5, 2, 2, dtype=F64)
    torch.manual_seed(3)
    flat = mlp(1)
    inner = nn.Sequential(flat[1], nn.Flatten(), nn.Dropout(0.5))
    nested = nn.Sequential(nn.Flatten(), nn.Sequential(flat[0], inner), nn.Identity(), flat[2])
    latents = []
    for model, inputs in ((flat, x.flatten(1)), (nested, x)):
        tangent = survey(model, inputs)
        torch.manual_seed(4)
        latents.append(Streamlined(mode).latent(tangent, build(tangent, "kronecker"), inputs, joint=False))
    torch.testing.assert_close(latents[0].covariance, latents[1].covariance, rtol=1e-12, atol=1e-12)
    assert latents[0].variance.shape == (5, 1)

    single = nn.Linear(4, 1).double()
    tangent = survey(single, x.flatten(1))
    covariance = build(tangent, "dense")
    J = tangent.record(x.flatten(1)).rows()
    latent = Streamlined(mode).latent(tangent, covariance, x.flatten(1), joint=False)
    torch.testing.assert_close(latent.covariance, J @ covariance.to_dense() @ J.mT)


def test_any_module_may_come_before_the_first_treated_layer():
    x = torch.randn(4, 1, 6, 6, dtype=F64)
    trunk = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(trunk, nn.LayerNorm(8), nn.Linear(8, 3)).double()
    tangent = survey(model, x, tn.last_layer)
    covariance = build(tangent, "kronecker")
    latent = Streamlined().latent(tangent, covariance, x, joint=False)
    J = tangent.record(x).rows()
    torch.testing.assert_close(latent.covariance, J @ covariance.to_dense() @ J.mT)


def test_module_after_the_last_linear_layer_keeps_covariances():
    x = torch.randn(4, 4, dtype=F64)
    model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()).double()
    tangent = survey(model, x)
    covariance = build(tangent, "kronecker")
    J = tangent.record(x).rows()
    latent = Streamlined().latent(tangent, covariance, x, joint=False)
    torch.testing.assert_close(latent.covariance, J @ covariance.to_dense() @ J.mT)


@pytest.mark.parametrize("kind", ACTIVATIONS, ids=lambda kind: kind.__name__)
def test_activation_slopes_equal_autograd(kind):
    module = nn.Threshold(0.1, 20.0) if kind is nn.Threshold else kind()
    module = module.double()
    mean = torch.randn(5, 7, dtype=F64).mul_(3).requires_grad_()
    variance = torch.rand(5, 7, dtype=F64)
    out = module(mean)
    (slope,) = torch.autograd.grad(out.sum(), mean, create_graph=True)
    found = RULES[kind].apply(module, Moments(mean, variance), None, False)
    torch.testing.assert_close(found.mean, out)
    torch.testing.assert_close(found.variance, slope.square() * variance)
    root = torch.randn(5, 7, 7, dtype=F64)
    full = RULES[kind].apply(module, Moments(mean, root @ root.mT), None, True)
    torch.testing.assert_close(full.variance, slope[:, :, None] * (root @ root.mT) * slope[:, None, :])
    if slope.requires_grad and kind is not nn.Hardsigmoid:  # torch has no second derivative of it
        wanted = torch.autograd.grad((slope.square() * variance).sum(), mean)
        torch.testing.assert_close(torch.autograd.grad(found.variance.sum(), mean), wanted)


def test_inputs_and_model_are_left_alone():
    x = torch.randn(3, 4, dtype=F64)
    layers = (nn.Linear(4, 4), nn.Linear(4, 5), nn.ELU(inplace=True), nn.PReLU(), nn.Linear(5, 2))
    model = nn.Sequential(nn.ReLU(inplace=True), *layers).double()
    tangent = survey(model, x.clone(), tn.matching("2.*"))
    before = x.clone().requires_grad_()
    latent = Streamlined().latent(tangent, build(tangent, "kronecker"), before, joint=False)
    torch.testing.assert_close(before.detach(), x)
    latent.variance.sum().backward()
    assert before.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    moments = Moments(x.clone(), x.square())
    RULES[nn.ReLU].apply(nn.ReLU(inplace=True), moments, None, False)
    torch.testing.assert_close(moments.mean, x)


@pytest.mark.parametrize("mode", ["diagonal", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_differentiable_in_inputs(kind, mode):
    x = torch.randn(2, 4, dtype=F64)
    tangent = survey(mlp(2), x)
    covariance = build(tangent, kind)
    way = Streamlined(mode)
    assert not way.latent(tangent, covariance, x, joint=False).mean.requires_grad

    def moments(inputs):
        latent = way.latent(tangent, covariance, inputs, joint=False)
        return latent.mean, latent.covariance

    assert torch.autograd.gradcheck(moments, (x.requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_models(dtype):
    x = torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3)).to(dtype)
    tangent = survey(model, x.to(dtype), tn.matching("0.*", "2.*"))
    covariance = build(tangent, "low rank with residual")
    latent = Streamlined().latent(tangent, covariance, x.to(dtype), joint=False)
    model = model.double()
    tangent = survey(model, x.to(dtype).double(), tn.matching("0.*", "2.*"))
    expected = Streamlined().latent(tangent, covariance, x.to(dtype).double(), joint=False)
    assert latent.mean.dtype == torch.float32
    torch.testing.assert_close(latent.mean, expected.mean.float())
    torch.testing.assert_close(latent.covariance, expected.covariance.float())


def test_chunks_give_the_same_result():
    x = torch.randn(64, 4, dtype=F64)
    model = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 3)).double()
    whole = survey(model, x)
    parts = tn.Tangent.survey(model, x, tn.matching("*"), memory=2**24)
    covariance = build(whole, "kronecker")
    results = [Streamlined("full").latent(tangent, covariance, x, joint=False).covariance for tangent in (whole, parts)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


# ---- errors


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.inner(x)


def refuse(model, x, message, params=None, **options):
    tangent = tn.Tangent.survey(model.double().eval(), x, params or tn.matching("*"), **options)
    covariance = DenseCovariance(tangent.blocks, psd(tangent.size), torch.ones(len(tangent.blocks), dtype=F64), 1.0)
    with pytest.raises(LapwingError, match=message) as caught:
        Streamlined().latent(tangent, covariance, x, joint=False)
    assert "lw.Linearized()" in str(caught.value)


def test_modules_without_a_rule_are_named():
    x = torch.randn(3, 4, dtype=F64)
    refuse(Residual(), x, r"the network itself \(Residual\) with treated parameters inner.weight, inner.bias")
    head = nn.Linear(4, 2)
    refuse(nn.Sequential(nn.Sequential(nn.Linear(4, 4), Residual()), head), x, r"'0.1' \(Residual\) with treated")
    after = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.LayerNorm(4)), head)
    refuse(after, x, r"'1.1' \(LayerNorm\) after the treated layer '0'", tn.matching("0.*"))
    refuse(nn.Sequential(nn.LayerNorm(4), head), x, r"'0' \(LayerNorm\) with treated parameters 0.weight, 0.bias")
    refuse(nn.Sequential(head, nn.Softmax(-1)), x, r"'1' \(Softmax\) after the treated layer '0'")
    refuse(nn.Sequential(nn.Linear(4, 2), nn.PReLU()), x, r"'1' \(PReLU\) with treated parameters 1.weight")
    refuse(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), x, r"'1' \(Flatten\) after the treated layer '0'")


def test_altered_modules_and_shared_weights_are_named():
    x = torch.randn(3, 4, dtype=F64)
    hooked = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    hooked[1].register_forward_hook(lambda module, args, out: 2 * out)
    refuse(hooked, x, r"'1' \(Tanh\) with forward hooks")
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3).double()))
    refuse(normed, x, r"'0' \(ParametrizedLinear\) with treated parameters 0.bias, 0.parametrizations")
    generic = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    refuse(generic, x.clone(), r"'1' \(Linear\) with .* \(in the generic family: its layer's input is modified")
    layer = nn.Linear(4, 4)
    refuse(nn.Sequential(layer, nn.Tanh(), layer), x, "'2' and '0' share the treated parameters 0.weight, 0.bias")


def test_positions_and_other_inputs_are_refused():
    tokens = torch.randn(3, 2, 4, dtype=F64)
    model = nn.Sequential(nn.Linear(4, 2), nn.Flatten())
    refuse(model, tokens, r"'0' \(Linear\) sees activations of shape \(3, 2, 4\)")
    x = torch.randn(3, 4, dtype=F64)
    refuse(nn.Sequential(nn.Linear(4, 2)), x, "called by forward=", forward=lambda model, inputs: model(inputs))
    refuse(nn.Sequential(nn.Linear(4, 2)), (x,), r"at tuple\(Tensor \(3, 4\) float64\)")
    refuse(nn.Linear(4, 2), {"input": x}, r"at dict\(input=Tensor \(3, 4\) float64\)")


def test_options_are_checked():
    x = torch.randn(3, 4, dtype=F64)
    tangent = survey(mlp(), x)
    covariance = build(tangent, "kronecker")
    with pytest.raises(LapwingError, match="Streamlined\\(covariance='dense'\\)"):
        Streamlined("dense")
    with pytest.raises(LapwingError, match="joint=True via lw.Streamlined"):
        Streamlined().latent(tangent, covariance, x, joint=True)
    with pytest.raises(LapwingError, match="NaN"):
        Streamlined().latent(tangent, covariance, x / 0 * 0, joint=False)
    tangent = survey(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double(), x)
    covariance = build(tangent, "kronecker")
    tangent.model.train()
    with pytest.raises(LapwingError, match=r"model.eval\(\)"):
        Streamlined().latent(tangent, covariance, x, joint=False)
