"""What ELLA costs in time and memory; `benchmarks.papers` runs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import lapwing as lw
from benchmarks.measure import ratio
from lapwing.reproduce import ella_cifar as cifar
from lapwing.reproduce.loaders import batched
from lapwing.reproduce.models import ResNet18
from lapwing.tangent import Anchors, Tangent


def ella_cost(rows: int = 2000, images: int = 2000) -> dict[str, Any]:
    """Cost of ELLA on the ResNet-20 (K = 20): its parts alone, the whole fit, prediction in forward passes."""
    setup = cifar.Cifar.load(0, images, reported=100)
    x = setup.test[0][0]
    tangent = Tangent.survey(setup.model, x[:4], memory=2**32)
    data = torch.cat([part for part, _ in setup.train])
    generator = torch.Generator().manual_seed(0)
    samples, outputs = (torch.randint(high, (rows,), generator=generator) for high in (images, 10))

    def timed(function: Callable[[], Any]) -> tuple[float, Any]:
        start = time.perf_counter()
        value = function()
        return time.perf_counter() - start, value

    def plain_rows() -> None:
        """A tenth of the rows by ordinary backward passes, one image each."""
        weights = [p for p in setup.model.parameters() if p.requires_grad]
        for sample, output in zip(samples.tolist()[: rows // 10], outputs.tolist(), strict=False):
            torch.autograd.grad(setup.model(data[sample : sample + 1])[0, output], weights)

    backward = 10 * timed(plain_rows)[0]
    written, jacobian = timed(lambda: Anchors(tangent, (data,), samples, outputs).rows(torch.float32))
    gram = timed(partial(torch.matmul, jacobian, jacobian.T))[0]
    del jacobian
    method = lw.ELLA(rank=20, rows=rows)
    whole, posterior = timed(
        lambda: lw.fit(setup.model, setup.train, method, prior_precision=1.0, tune=None, memory=2**32)
    )
    projected = cifar.features(posterior, setup.train).seconds
    with torch.no_grad():
        ratios = ratio(lambda: posterior.latent(x).variance, lambda: setup.model(x), rounds=8)
    return {
        "rows": rows, "images": images, "rows by plain backward passes": backward, "rows by the engine": written,
        "gram": gram, "features": projected, "fit": whole, "fit / parts": whole / (backward + gram + projected),
        "prediction of 100 images": ratios, "aim": {"fit / parts": 1.5, "prediction": 1.2 * 41},
    }  # fmt: skip


def ella_memory() -> dict[str, Any]:
    """Peak memory of a process that fits ELLA (K = 20) to a ResNet-18 of 11 million random weights; run it alone."""
    import resource

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ResNet18().eval()
    x = torch.randn(200, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(200) % 10
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start = time.perf_counter()
    posterior = lw.fit(model, batched(x, y, 50), lw.ELLA(rank=20, rows=200), prior_precision=1.0, tune=None)
    seconds = time.perf_counter() - start
    variance = posterior.latent(x[:20]).variance
    assert bool((variance > 0).all())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"weights": posterior.tangent.size, "fit_seconds": seconds, "GiB before": before, "peak GiB": peak, "aim": 6}
