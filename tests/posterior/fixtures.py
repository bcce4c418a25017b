"""The saved posteriors in `tests/posterior/files`, which every version from format 5 on must read.

Never overwrite these files. If a version adds a structure or a key, add a case to `CASES` and run this module, which
writes the missing files.

    python -m tests.posterior.fixtures
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance import ImplicitBasis, LowRank
from lapwing.data.inputs import Inputs
from lapwing.tangent import Anchors

FOLDER = Path(__file__).parent / "files"


class Tokens(nn.Module):
    """Embedding, norm, a scale outside all layers, and a head at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(7, 3), nn.LayerNorm(3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.table(tokens))) * self.scale)


def mlp(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


@dataclass(frozen=True)
class Case:
    """A network, its data, and the posterior of a fit."""

    network: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    fit: Callable[..., lw.Posterior]


def classes() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 3), torch.arange(12) % 3


def numbers() -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 3)
    return x, x[:, :1].sin() + 0.1 * torch.randn(12, 1)


def pairs() -> tuple[Tensor, Tensor]:
    x, y = numbers()
    return x, torch.cat([y, 2 * y + torch.randn(12, 1)], 1)


def fitted(method: lw.Method | None, **options: Any) -> Callable[..., lw.Posterior]:
    return lambda model, x, y: lw.fit(model, [(x, y)], method, **options)


def implicit(model: nn.Module, x: Tensor, y: Tensor) -> lw.Posterior:
    """A subspace whose directions are combinations of Jacobian rows at stored inputs."""
    posterior = lw.fit(model, [(x, y)], lw.ELLA(rank=2, rows=4), prior_precision=1.0)
    old, blocks = posterior.covariance, posterior.tangent.blocks
    anchors = Anchors(posterior.tangent, (Inputs(x),), torch.arange(4), torch.arange(4) % 3)
    basis = ImplicitBasis(anchors, torch.eye(2, 4).double(), {block.name: 1.0 for block in blocks})
    covariance = LowRank(blocks, basis, torch.eye(2).double(), old.traces, old.precision, old.scale)
    return replace(posterior, covariance=covariance)


def swag(model: nn.Module, x: Tensor, y: Tensor) -> lw.Posterior:
    collector = lw.SWAG.collector(model)
    for _ in range(4):
        collector.add({k: v + 0.1 * torch.randn_like(v) for k, v in model.state_dict().items()})
    return lw.SWAG.from_snapshots(collector, [(x, y)])


def mean_field(model: nn.Module, x: Tensor, y: Tensor) -> lw.Posterior:
    variances = {name: torch.rand_like(value) / 100 for name, value in model.named_parameters()}
    return lw.MeanField.from_variances(model, variances, [(x, y)])


def continued(model: nn.Module, x: Tensor, y: Tensor) -> lw.Posterior:
    return lw.fit(model, [(x, y)], prior=lw.fit(model, [(x[:6], y[:6])], lw.Diagonal(), prior_precision=1.0))


def early(model: nn.Module, x: Tensor, y: Tensor) -> lw.Posterior:
    return lw.fit(model, [(x[:8], y[:8])], lw.Diagonal(), tune=lw.EarlyStopping([(x[8:], y[8:])]))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(7, (6, 4)), torch.randint(2, (6, 4))


def sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 2, 5)[..., :3], torch.arange(12) % 3


CASES = {
    "default": Case(mlp(3), classes, fitted(None)),
    "diagonal": Case(mlp(3), classes, fitted(lw.Diagonal())),
    "kfac": Case(mlp(3), classes, fitted(lw.KFAC())),
    "ekfac": Case(mlp(3), classes, fitted(lw.EKFAC())),
    "kfac-groups": Case(conv, sequences, fitted(lw.KFAC("reduce"))),
    "kfac-positions": Case(Tokens, tokens, fitted(lw.KFAC(uncovered="dense"), prior_precision=1.0)),
    "full-primal": Case(mlp(3), classes, fitted(lw.Full("primal"))),
    "full-dual": Case(mlp(1), numbers, fitted(lw.Full("dual"), tune=None)),
    "ella": Case(mlp(3), classes, fitted(lw.ELLA(rank=3, rows=6))),
    "ella-residual": Case(mlp(3), classes, fitted(lw.ELLA(rank=3, rows=6, residual="prior"))),
    "subset-of-weights": Case(mlp(3), classes, fitted(lw.SubsetOfWeights(5, "magnitude"))),
    "implicit": Case(mlp(3), classes, implicit),
    "valla": Case(mlp(1), numbers, fitted(lw.VaLLA(4))),
    "sampled-lla": Case(mlp(3), classes, fitted(lw.SampledLLA(4))),
    "swag": Case(mlp(3), classes, swag),
    "mean-field": Case(mlp(1), numbers, mean_field),
    "temperature": Case(mlp(3), classes, fitted(lw.TemperatureScaling())),
    "weighted": Case(mlp(3), classes, fitted(lw.KFAC(), likelihood=lw.Categorical(class_weights=(1.0, 2.0, 3.0)))),
    "gaussian": Case(mlp(1), numbers, fitted(lw.KFAC(), likelihood=lw.Gaussian(0.1))),
    "noise": Case(mlp(2), pairs, fitted(lw.KFAC(), likelihood=lw.Gaussian(noise="input"))),
    "tails": Case(mlp(1), numbers, fitted(lw.KFAC(), likelihood=lw.StudentT())),
    "former": Case(mlp(3), classes, continued),
    "early-stopping": Case(mlp(3), classes, early),
}


def answers(posterior: lw.Posterior, x: Tensor) -> dict[str, Tensor]:
    """Return the latent mean and variance and the prediction of a posterior."""
    latent, prediction = posterior.latent(x), posterior.predict(x)
    last = prediction.probs if hasattr(prediction, "probs") else prediction.variance
    return {"mean": latent.mean.detach(), "variance": latent.variance.detach(), "prediction": last.detach()}


def write() -> None:
    """Write the missing files, each with a second file of the network's weights, inputs and answers."""
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        path = FOLDER / f"{name}.safetensors"
        if path.exists():
            continue
        torch.manual_seed(0)
        model, (x, y) = case.network().eval(), case.data()
        posterior = case.fit(model, x, y)
        posterior.save(path)
        stored = {f"weights/{key}": value for key, value in posterior.model.state_dict().items()}
        stored |= {"x": x[:3].contiguous(), **answers(posterior, x[:3])}
        save_file({key: value.clone() for key, value in stored.items()}, path.with_suffix(".expected"))


def stored(name: str) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    """Return the network of a case with its weights, the inputs, and the stored answers."""
    parts = load_file((FOLDER / name).with_suffix(".expected"))
    model = CASES[name].network().eval()
    model.load_state_dict({k.removeprefix("weights/"): v for k, v in parts.items() if k.startswith("weights/")})
    return model, parts["x"], {key: parts[key] for key in ("mean", "variance", "prediction")}


if __name__ == "__main__":
    write()
