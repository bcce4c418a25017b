"""Products by oneDNN are `F.linear`'s, in every layout, and are taken where they can be."""

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.linalg import large_products, linear, matmul

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
B, I, O = 96, 257, 193  # 4.7 million multiply-adds: enough


@pytest.fixture(params=["here", pytest.param("oneDNN", marks=pytest.mark.skipif(not HAS_ONEDNN, reason="no oneDNN"))])
def way(request, monkeypatch):
    """Products as this machine takes them, and by oneDNN whoever made it."""
    if request.param == "oneDNN":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        monkeypatch.setattr(large_products, "_maker", lambda: "AuthenticAMD")
        large_products.onednn.cache_clear()
        assert large_products.onednn() is not None
    yield
    large_products.onednn.cache_clear()


def _layouts(rows, columns):
    """The same numbers in several layouts."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    wide = torch.zeros(rows + 3, columns + 5)
    wide[2:-1, 1:-4] = x
    parts = {"part": wide[2:-1, 1:-4], "part of columns": wide.T.contiguous().T[2:-1, 1:-4]}
    return {"contiguous": x, "transposed": x.T.contiguous().T, **parts}


@pytest.mark.parametrize("weight", _layouts(2, 2))
def test_every_layout_gives_the_product(way, weight):
    w, b = _layouts(O, I)[weight], torch.randn(2 * O)[::2]  # oneDNN alone would read the first O numbers of b
    for x in _layouts(B, I).values():
        wanted, before = x.double() @ w.double().T, (x.clone(), w.clone())
        for found in (linear(x, w), linear(x, w, b) - b, matmul(x, w.T)):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
        assert torch.equal(x, before[0])
        assert torch.equal(w, before[1])


def test_leading_dimensions_and_repeated_rows(way):
    w = _layouts(O, I)["contiguous"]
    x = torch.randn(4, B, I)
    for given in (x, x.transpose(0, 1), x[:, :1].expand(4, B, I), x[:0]):
        torch.testing.assert_close(linear(given, w), given @ w.T, rtol=1e-5, atol=1e-4)
        assert matmul(given, w.T).shape == (*given.shape[:-1], O)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_kept(way, dtype):
    x, w = _layouts(B, I)["contiguous"].to(dtype), _layouts(O, I)["contiguous"].to(dtype)
    assert torch.equal(linear(x, w), nn.functional.linear(x, w))


def test_derivatives_are_those_of_the_product(way):
    x, w = _layouts(B, I)["contiguous"].requires_grad_(), _layouts(O, I)["contiguous"].requires_grad_()
    mine = torch.autograd.grad(linear(x, w).square().sum(), (x, w))
    theirs = torch.autograd.grad((x @ w.T).square().sum(), (x, w))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-2)
    with torch.no_grad():
        assert not linear(x, w).requires_grad


def test_what_is_not_finite_stays_so(way):
    x, w = _layouts(B, I)["contiguous"].clone(), _layouts(O, I)["contiguous"]
    x[3, 4], x[5, 6] = torch.nan, torch.inf
    found = linear(x, w)
    assert found[3].isnan().all()
    assert not found[5].isfinite().any()
    assert found.isfinite().sum() == (B - 2) * O


def _lacking(*_):
    raise RuntimeError("no such operator")


def test_torch_alone_where_the_operator_is_missing_or_wrong_or_no_faster(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(large_products, "_maker", lambda: "GenuineIntel")
    assert large_products.onednn.__wrapped__() is None
    monkeypatch.setattr(large_products, "_maker", lambda: "AuthenticAMD")
    for operator in (_lacking, lambda x, *_: x):
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", operator, raising=False)
        assert large_products.onednn.__wrapped__() is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert large_products.onednn.__wrapped__() is None


class Product(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x):
        return linear(x, self.weight)


def test_what_is_exported_or_compiled_keeps_to_public_operators(way):
    module, x = Product(_layouts(O, I)["contiguous"]), _layouts(B, I)["contiguous"]
    exported = torch.export.export(module, (x,), strict=False)
    assert "mkldnn" not in str(exported.graph)
    assert "aten.linear" in str(exported.graph)
    graphs = []
    compiled = torch.compile(module, backend=lambda graph, _: graphs.append(str(graph.graph)) or graph.forward)
    torch.testing.assert_close(compiled(x), x @ module.weight.T, rtol=1e-5, atol=1e-4)
    assert len(graphs) == 1
    assert "mkldnn" not in graphs[0]


@pytest.mark.parametrize("samples", [100, 800])
@pytest.mark.parametrize("method", [lw.Diagonal(), lw.KFAC()])
def test_large_products_of_fits_and_predictions_suit(monkeypatch, method, samples):
    seen = []
    monkeypatch.setattr(
        large_products,
        "suits_onednn",
        lambda x, w, suits=large_products.suits_onednn: seen.append(suits(x, w)) or seen[-1],
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    x, y = torch.randn(samples, 784), torch.randint(10, (samples,))
    loader = list(zip(x.split(100), y.split(100), strict=True))
    posterior = lw.fit(model, loader, method, params=lw.everything, prior_precision=1.0)
    posterior.latent(x[:100])
    assert len(seen) > 1
    assert all(seen)
