"""How many operations a call dispatches: on a GPU each of them waits for Python, and so does one sample on a CPU.

Operations that return views are not counted. Counts depend on the network, the version of torch and the number of
samples in a chunk, and not on the machine. The milliseconds beyond a forward pass are CPU time of one sample, on one
thread. Networks have random weights, batches 50 samples for fits and 4 for predictions. `of` is the error of the sum of
each output over the batch.

The part *laplace-torch* counts the same of laplace-torch 0.3 with curvlinops, in an environment of its own:
`pip install laplace-torch`. Its Diagonal is the diagonal of the GGN. What it refuses has no number.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lapwing as lw
from papers.common.measure import fastest
from papers.common.networks import BasicBlock, Logits, ResNet20, gpt2, logits_vit
from papers.common.tables import grid

SEED, THREADS, PACKAGES = 0, 1, ("transformers",)
COMPARED = ("MLP", "CNN", "ResNet-20 on 8 x 8 pixels")
"""Networks of laplace-torch's counts."""
CALLS = ("fit", "probs", "mutual information", "of")
SECONDS = 3.0
"""How long each call is timed."""

WAYS: dict[str, tuple[lw.Method, dict[str, Any]]] = {
    "last layer": (lw.KFAC(), {"params": lw.last_layer}),
    "Diagonal, all weights": (lw.Diagonal(), {}),
    "KFAC, all weights": (lw.KFAC(), {}),
}


class Operations(TorchDispatchMode):
    """Counts the operations that return no view."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        aliases, name = [each.alias_info for each in function._schema.returns], function._schema.name
        if name != "aten::_unsafe_view" and not any(alias is not None and not alias.is_write for alias in aliases):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def operations(call: Callable[[], Any]) -> int:
    """Returns the number of operations of the second call of a function: the first one fills caches."""
    call()
    with Operations() as mode:
        call()
    return mode.counts.total()


def mlp() -> tuple[nn.Module, Tensor, int]:
    """10-50-50-3."""
    layers = [nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 3)]
    return nn.Sequential(*layers), torch.randn(50, 10), 3


def cnn() -> tuple[nn.Module, Tensor, int]:
    """Two 3x3 convolutions to 8 and 16 channels on 14x14 pixels."""
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(50, 1, 14, 14), 10


def texts() -> tuple[nn.Module, Tensor, int]:
    """GPT-2 of four blocks of width 96 on texts of 16 tokens."""
    return Logits(gpt2(words=200, length=16)), torch.randint(2, 200, (50, 16)), 2


def resnet18() -> tuple[nn.Module, Tensor, int]:
    """ResNet-18: four stages of two blocks with 64 to 512 channels, on 8 x 8 pixels, with shortcuts without weights."""
    pairs = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    blocks = [block for a, b, stride in pairs for block in (BasicBlock(a, b, stride), BasicBlock(b, b, 1))]
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers = [*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(50, 3, 8, 8), 10


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor, int]]] = {
    "MLP": mlp,
    "CNN": cnn,
    "ResNet-20 on 8 x 8 pixels": lambda: (ResNet20(), torch.randn(50, 3, 8, 8), 10),
    "ResNet-18 on 8 x 8 pixels": resnet18,
    "ViT of four blocks": lambda: (logits_vit(), torch.randn(50, 3, 32, 32), 10),
    "GPT-2 of four blocks": texts,
}


def calls_of(model: nn.Module, x: Tensor, classes: int, way: str) -> dict[str, Callable[[], Any]]:
    """Returns the calls that are counted, by name."""
    method, options = WAYS[way]
    loader = [(x, torch.arange(len(x)) % classes)] * 4
    fit = partial(lw.fit, model, loader, method, prior_precision=1.0, progress=False, **options)
    posterior, few = fit(), x[:4]
    return {
        "fit": fit,
        "probs": lambda: posterior.predict(few).probs,
        "mutual information": lambda: posterior.predict(few).mutual_information(),
        "of": lambda: posterior.of(lambda f: f(few).sum(0)).std,
        "probs of one sample": lambda: posterior.predict(x[:1]).probs,
    }


def peer_operations(name: str, way: str) -> dict[str, int]:
    """Returns the operations of laplace-torch's fit and prediction; nothing where it refuses."""
    from laplace import Laplace

    torch.manual_seed(SEED)
    model, x, classes = NETWORKS[name]()
    pairs = [(x, torch.arange(len(x)) % classes)] * 4
    rows = [(a, b) for xs, ys in pairs for a, b in zip(xs, ys, strict=True)]
    loader = torch.utils.data.DataLoader(rows, batch_size=50)  # type: ignore[arg-type]
    subset = "last_layer" if way == "last layer" else "all"
    structure = "diag" if way.startswith("Diagonal") else "kron"
    found: dict[str, int] = {}

    def fitted() -> Any:
        posterior: Any = Laplace(
            model.eval(), "classification", subset_of_weights=subset, hessian_structure=structure, prior_precision=1.0
        )
        posterior.fit(loader)
        return posterior

    try:
        posterior = fitted()
        found["probs"] = operations(lambda: posterior(x[:4]))
        found["fit"] = operations(fitted)
    except Exception as error:
        print(name, way, str(error)[:100], file=sys.stderr)
    return found


def measured(name: str) -> dict[str, Any]:
    """Returns the operations of each call, and the milliseconds of one sample beyond a forward pass."""
    torch.manual_seed(SEED)
    model, x, classes = NETWORKS[name]()
    model.eval()

    @torch.no_grad()
    def forward() -> Any:
        return model(x[:1])

    rows: dict[str, Any] = {"forward": operations(forward)}
    for way in WAYS:
        calls = calls_of(model, x, classes, way)
        found: dict[str, float] = {each: operations(call) for each, call in calls.items()}
        plain, probs = fastest([forward, calls["probs of one sample"]], SECONDS)
        rows[way] = found | {"milliseconds beyond": probs - plain, "milliseconds forward": plain}
        print(name, way, rows[way], file=sys.stderr)
    return rows


def parts() -> dict[str, Callable[[], dict[str, Any]]]:
    """One part for each network, and one for laplace-torch."""

    def peers() -> dict[str, Any]:
        return {name: {way: peer_operations(name, way) for way in WAYS} for name in COMPARED}

    return {**{name: partial(measured, name) for name in NETWORKS}, "laplace-torch": peers}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The operations and the milliseconds of all networks."""
    peers = results["laplace-torch"]
    rows = []
    for name in NETWORKS:
        for way in WAYS:
            found, peer = results[name][way], peers.get(name, {}).get(way, {})
            pairs = [
                f"{found[call]:,.0f} ({peer[call]:,.0f})" if call in peer else f"{found[call]:,.0f}" for call in CALLS
            ]
            rows.append((name, [way, *pairs, f"{found['milliseconds beyond']:.1f}"]))
    head = [
        "weights",
        "fit of four batches",
        "`.probs`",
        "mutual information",
        "`of`",
        "ms of one sample beyond forward",
    ]
    return {"operations": grid(head, rows, corner="network")}
