"""Figure 1 and Table 5: KL divergence between full LLA and its approximations, on the authors' toy regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common import drawing
from papers.common.measures import gaussian_kl
from papers.common.networks import mlp
from papers.common.scores import averaged
from papers.common.tables import grid, shown
from papers.common.training import seeded, train

PUBLISHED = {"ELLA": 0.83, "KFAC": 0.35, "diagonal": 1.71, "last layer": 2.44}
"""KL(LLA || method), with noise variance 0.01 for ELLA and 0.0001 for all others, LLA included."""

STEPS, NOISE, OTHER_NOISE = 1000, 0.01, 0.0001

SMALLEST = 1e-8
"""Lower bound of the variances of latents, as in the authors' program. ELLA has variance 0 outside its span."""

METHODS: dict[str, tuple[lw.Method, Any]] = {
    "ELLA": (lw.ELLA(rank=5, rows=16), lw.everything),
    "ELLA, 16 directions": (lw.ELLA(rank=16, rows=16), lw.everything),
    "ELLA with residual": (lw.ELLA(rank=5, rows=16, residual="prior"), lw.everything),
    "KFAC": (lw.KFAC(), lw.everything),
    "EKFAC": (lw.EKFAC(), lw.everything),
    "diagonal": (lw.Diagonal(), lw.everything),
    "last layer": (lw.Full(), lw.last_layer),
}

PANELS = ("LLA", "ELLA", "ELLA with residual", "KFAC", "diagonal", "last layer")

FAST = {"seeds": (0, 1)}
"""Arguments of a run for `python -m papers verify`."""


def run(seeds: Sequence[int] = range(5)) -> dict[str, Any]:
    """Returns both divergences at the paper's two noise variances and at one, and the latents of the first seed.

    "mixed" is the authors' program: noise variance 0.01 for ELLA, 0.0001 for LLA and the others. "equal" has 0.01 for
    all.
    """
    runs = [illustrative_regression(seed) for seed in seeds]
    measured = [{key: value for key, value in found.items() if key != "picture"} for found in runs]
    return {**averaged(measured), "picture": runs[0]["picture"]}


def illustrative_regression(seed: int) -> dict[str, Any]:
    """Fits `y = sin 2x + ε` at two clusters of 8 points, as the authors do; returns divergences averaged over inputs.

    Returns:
        Direction -> noise -> method -> mean divergence of the latents at 100 points of [-3, 3], in nats. "picture" has
        data, inputs, mean, and the standard deviation of each method at equal noise.
    """
    x = torch.cat([torch.linspace(-1.5, -0.6, 8), torch.linspace(0.6, 1.5, 8)]).double()[:, None]
    noise = torch.randn(16, 1, generator=torch.Generator().manual_seed(seed)).double()
    y = (2 * x).sin() + 0.2 * noise
    model = trained(x, y, seed)
    grid = torch.linspace(-3, 3, 100).double()[:, None]

    def latent(method: lw.Method, params: Any, variance: float) -> tuple[Tensor, Tensor]:
        posterior = lw.fit(
            model, [(x, y)], method, params=params, prior_precision=1.0, likelihood=lw.Gaussian(variance), seed=seed
        )
        found = posterior.latent(grid)
        return found.mean, found.covariance.clamp_min(SMALLEST)

    exact = {variance: latent(lw.Full(), lw.everything, variance) for variance in (NOISE, OTHER_NOISE)}
    found: dict[str, Any] = {"KL(LLA || method)": {}, "KL(method || LLA)": {}}
    std = {"LLA": _std(exact[NOISE])}
    for name, (method, params) in METHODS.items():
        equal = latent(method, params, NOISE)
        mixed = equal if name.startswith("ELLA") else latent(method, params, OTHER_NOISE)
        std[name] = _std(equal)
        pairs = {"mixed noise": (exact[OTHER_NOISE], mixed), "equal noise": (exact[NOISE], equal)}
        for setting, (full, approximate) in pairs.items():
            for direction, (first, second) in zip(found, ((full, approximate), (approximate, full)), strict=True):
                divergence = gaussian_kl(*first, *second).mean()
                found[direction].setdefault(setting, {})[name] = float(divergence)
    with torch.no_grad():
        found["training error"] = float(nn.functional.mse_loss(model(x), y))
    points = {"x": x, "y": y, "grid": grid, "mean": exact[NOISE][0]}
    return {**found, "picture": {**{name: value[:, 0].tolist() for name, value in points.items()}, "std": std}}


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """Returns the authors' MLP 1-2-32-512-1 without the last bias, trained by their SGD to a MAP estimate."""
    with seeded(seed):
        model = nn.Sequential(*list(mlp(1, 2, 32, 512))[1:], nn.Tanh(), nn.Linear(512, 1, bias=False)).double()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        squares = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        return (outputs - targets).square().sum() / (2 * NOISE) + squares / 2

    optimiser = torch.optim.SGD(model.parameters(), 1e-5, momentum=0.9)
    return train(
        model, (x, y), repeat(slice(None), STEPS), optimiser, loss, lambda step: (1 + cos(pi * step / STEPS)) / 2
    )


def _std(latent: tuple[Tensor, Tensor]) -> list[float]:
    return latent[1][:, 0, 0].sqrt().tolist()


def draw(results: Mapping[str, Any]) -> None:
    """Draws Figure 1: mean and two standard deviations of the latents, of seed 0."""
    picture = results["picture"]
    figure, ((*axes,),) = drawing.panels(1, len(PANELS), (15, 3), sharey=True)
    mean = torch.tensor(picture["mean"])
    full = 2 * torch.tensor(picture["std"]["LLA"])
    for axis, name in zip(axes, PANELS, strict=True):
        std = torch.tensor(picture["std"][name])
        for width, colour in ((2, "#bfdcf2"), (1, "#7fb8e0")):
            axis.fill_between(picture["grid"], mean - width * std, mean + width * std, color=colour, linewidth=0)
        axis.plot(picture["grid"], mean, color="#1f4e79")
        for edge in (mean - full, mean + full):
            axis.plot(picture["grid"], edge, ":", color="#555555", linewidth=1)
        axis.plot(picture["x"], picture["y"], ".", color="#c0392b")
        axis.set(title=name, xlabel="x", ylim=(-4, 4))
    axes[0].set_ylabel("f(x), one and two std (seed 0)\ndotted: two std of LLA")
    drawing.save(figure, __file__, "figure1")


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns the divergences by direction and noise."""
    printed = [shown(PUBLISHED.get(method), 2) for method in METHODS]
    rows = {"published: KL(LLA ‖ method), mixed noise": printed}
    for direction in ("KL(LLA || method)", "KL(method || LLA)"):
        for noise in ("mixed noise", "equal noise"):
            found = results[direction][noise]
            rows[f"{direction.replace('||', '‖')}, {noise}"] = [shown(found[method], 2) for method in METHODS]
    return {"divergence": grid([*METHODS], rows)}
