"""What VaLLA costs: time and memory against the number of training points, and networks it runs on."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common import drawing
from papers.common.data import Batches, batched
from papers.common.measure import LiveBytes
from papers.common.networks import ResNet20, mlp
from papers.common.results import Rows, once
from papers.common.tables import grid, shown
from papers.common.training import seeded
from papers.valla.figure4 import table
from papers.valla.training import TABLE, trained

COUNTS = (1000, 10_000, 50_000, 200_000)


def run() -> dict[str, Any]:
    """Returns seconds and memory of one fit over N, of one step, and on larger networks."""
    rows = Rows(__file__, {"batch": 100, "network": "3 x 200 tanh MLP on taxi rows"})

    @once
    def setup() -> Any:
        data = table("nyc_green_taxi_2023q1", 0)
        model = trained((8, 200, 200, 200, 1), data.train, TABLE, 0, data.name)
        parts = (data.train, data.val, data.test)
        return model, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def one_fit(method: Any, count: int) -> dict[str, float]:
        model, x, y = setup()
        loader = batched(x[:count], y[:count], 100)
        spent, _ = fit_seconds(model, loader, method, likelihood=lw.Gaussian(0.2))
        with LiveBytes() as live:
            fit_seconds(model, loader, method, likelihood=lw.Gaussian(0.2))
        return {"seconds": spent, "peak MiB": live.peak / 2**20}

    methods: dict[str, tuple[Any, int]] = {
        "VaLLA 100, natural gradient, 20 steps": (lw.VaLLA(100, lw.NaturalGradient(20)), 200_000),
        "VaLLA 100, α-divergence, 10 steps": (lw.VaLLA(100, lw.AlphaDivergence(steps=10)), 200_000),
        "VaLLA 100, closed form": (lw.VaLLA(100), 10_000),
        "KFAC": (lw.KFAC(), 50_000),
        "ELLA, K = 20, M = 100": (lw.ELLA(rank=20, rows=100), 10_000),
    }
    for name, (method, most) in methods.items():
        for count in COUNTS:
            if count <= most:
                rows.add("fit over N", f"{name}, N = {count}", one_fit, method, count)
    fits = {
        "natural gradient": lambda steps: lw.VaLLA(50, lw.NaturalGradient(steps)),
        "variational bound": lambda steps: lw.VaLLA(50, lw.VariationalBound(steps, then=lw.NaturalGradient(1))),
        "α-divergence": lambda steps: lw.VaLLA(50, lw.AlphaDivergence(steps=steps)),
    }
    for name, fit in fits.items():
        rows.add(
            "step, 74 000 weights, M = 50, batch 100, 1 thread", name,
            lambda fit: {"seconds": step_seconds(fit, "MLP of 74 000 weights")}, fit,
        )  # fmt: skip
    for name, points in (("ResNet-20", 100), ("ViT", 20), ("GPT-2", 20)):
        rows.add("networks", f"{name}, M = {points}", _alone, f"runs_at_all({name!r}, {points})")
    return rows.all()


def _alone(call: str) -> dict[str, float]:
    """Returns what a function of this file returns in a process of its own."""
    program = f"import json; from papers.valla.cost import *; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


class TinyViT(nn.Module):
    """A vision transformer for 32 x 32 images: 4 x 4 patches, width 256, 4 layers; 3.2 million weights."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn(1, 64, width))
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, 10)."""
        tokens = self.patches(x).flatten(2).mT + self.places  # (B, 64, width)
        return self.head(self.encoder(tokens).mean(1))


def tiny_gpt2() -> nn.Module:
    """Returns a GPT-2 that classifies 32 tokens: width 256, 4 layers; 3.4 million weights; needs transformers."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(vocab_size=1000, n_positions=64, n_embd=256, n_layer=4, n_head=4)
    config.num_labels, config.pad_token_id = 2, 0
    return GPT2ForSequenceClassification(config)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "ResNet-20": (ResNet20, (3, 32, 32), 10),
    "ViT": (TinyViT, (3, 32, 32), 10),
    "GPT-2": (tiny_gpt2, (32,), 2),
    "MLP of 74 000 weights": (lambda: mlp(784, 90, 30, 10), (784,), 10),
}
"""Name -> network, shape of an input (token numbers where it has one axis of 32), outputs."""


def network(name: str, samples: int = 200, batch: int = 50) -> tuple[nn.Module, Batches]:
    """Returns a network of `NETWORKS` with random weights, and random data: cost does not depend on either."""
    build, shape, outputs = NETWORKS[name]
    with seeded(0):
        model = build().eval()
        x = torch.randint(1, 1000, (samples, *shape)) if shape == (32,) else torch.randn(samples, *shape)
        y = torch.randint(outputs, (samples,))
    return model, batched(x, y, batch)


def forward_of(name: str) -> Any:
    """Returns what `lw.fit(forward=...)` needs for a network of `NETWORKS`."""
    return (lambda model, x: model(x).logits) if name == "GPT-2" else None


def fit_seconds(model: nn.Module, loader: Batches, method: lw.Method, **options: Any) -> tuple[float, lw.Posterior]:
    """Returns the processor seconds of a fit at a given prior and noise, and the posterior."""
    start = time.process_time()
    posterior = lw.fit(model, loader, method, prior_precision=1.0, tune=None, progress=False, **options)
    return time.process_time() - start, posterior


def step_seconds(fit: Callable[[int], lw.VaLLA], name: str, rounds: int = 5, few: int = 2, many: int = 12) -> float:
    """Returns the seconds of one step: the fastest long fit less the fastest short one, over the steps between.

    Args:
        fit: steps -> method.
        name: of a network of `NETWORKS`.
        rounds: of both.
        few: steps of the short fit.
        many: steps of the long one.
    """
    model, loader = network(name, 1200, 100)
    best = {few: float("inf"), many: float("inf")}
    for _ in range(rounds):
        for steps in best:
            start = time.perf_counter()
            lw.fit(model, loader, fit(steps), prior_precision=1.0, tune=None, progress=False)
            best[steps] = min(best[steps], time.perf_counter() - start)
    return (best[many] - best[few]) / (many - few)


def runs_at_all(name: str, points: int = 100, batch: int = 20) -> dict[str, float]:
    """Fits VaLLA to a network of `NETWORKS` by natural gradients and by the α-divergence; run it in its own process.

    Returns:
        weights, processor seconds of both fits and of a prediction of one batch, peak GiB of the process.
    """
    model, loader = network(name, 200, batch)
    options = {"forward": forward_of(name)}
    natural, posterior = fit_seconds(model, loader, lw.VaLLA(points, lw.NaturalGradient(2)), **options)
    start = time.process_time()
    variance = posterior.latent(loader[0][0]).variance
    predicted = time.process_time() - start
    if not bool((variance > 0).all()):
        raise RuntimeError(f"{name}: variances that are not positive")
    published, _ = fit_seconds(model, loader, lw.VaLLA(points, lw.AlphaDivergence(steps=1)), **options)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "weights": posterior.tangent.size, "natural gradient, 2 steps": natural, "prediction of a batch": predicted,
        "alpha-divergence, 1 step": published, "peak GiB": peak,
    }  # fmt: skip


def draw(results: Mapping[str, Any]) -> None:
    """Draws the seconds of one fit over the number of training points."""
    rows = results["runs"]["fit over N"]
    figure, ((axis,),) = drawing.panels(1, 1, (5, 4.2))
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, row in rows.items():
        method, _, count = name.rpartition(", N = ")
        curves.setdefault(method, []).append((int(count), row["seconds"]))
    for method, points in curves.items():
        axis.plot(*zip(*sorted(points), strict=True), ".-", label=method)
    axis.set(xscale="log", yscale="log", xlabel="N", ylabel="processor seconds of a fit", title="one fit each, seed 0")
    drawing.legend_below(figure, 2)
    drawing.save(figure, __file__)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns seconds of a fit over the number of training rows."""
    fits = (
        "VaLLA 100, natural gradient, 20 steps",
        "VaLLA 100, α-divergence, 10 steps",
        "VaLLA 100, closed form",
        "KFAC",
    )
    of = results["runs"]["fit over N"]
    rows = {fit: [shown(of.get(f"{fit}, N = {n}", {}).get("seconds"), 2) for n in COUNTS] for fit in fits}
    return {"seconds": grid([f"N = {n}" for n in COUNTS], rows)}
