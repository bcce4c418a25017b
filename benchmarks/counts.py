"""Fits and exact predictions of real convolution networks beside the multiply-adds that they cannot do without.

One batch on one thread: CPU seconds of the passes of a fit, eigendecompositions left out, and of the covariances of a
prediction, in forward passes of the same batch run in turns. The *floor* counts multiply-adds a sample in those of a
forward pass, by layer (T positions, a weight of O x I; R is C - 1 in a fit to C classes, and C in a prediction):

- a forward pass, and R backward passes to the inputs of all layers but the first;
- squares: the rows of the Jacobian, `R T O I`, or products of pairs of positions, `T (T + 1) / 2 O I`;
- a prediction: the same, and the Gram matrix of the rows, `R (R + 1) / 2 O I`, of which pairs need none;
- Kronecker factors: `T I (I + 1) / 2` and `R T O (O + 1) / 2`;
- into their eigenbasis: `min(T, R O) I²` and `min(T, I) R O²`;
- K directions: `R K O I` beside the rows, or `K T (O I + R O)` without them.

What is copied, squared or added one number at a time is no part of a floor, and neither are ELLA's rows.

The table is in benchmarks/README.md. Needs the data sets that LAPWING_DATA names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from benchmarks.large import resnet18
from lapwing.covariance import Blockwise, Covariance, DiagonalBlock, KroneckerBlock
from lapwing.data.inputs import Inputs
from lapwing.methods.passes import Batch
from lapwing.methods.prior import Prior
from lapwing.methods.problem import FisherRoot, Problem, Seen
from lapwing.methods.state import DataSummary
from lapwing.prediction.uncertain import prepared
from lapwing.tangent import Tangent
from papers.common.data import images
from papers.common.networks import cifar_resnet20
from papers.common.tables import grid

SEED, RANK = 0, 20
METHODS: dict[str, lw.Method] = {
    "Diagonal": lw.Diagonal(), "KFAC": lw.KFAC(), "EKFAC": lw.EKFAC(), "ELLA": lw.ELLA(rank=RANK, rows=200)
}  # fmt: skip
CASES = [f"resnet20-{method}" for method in METHODS] + ["resnet18-Diagonal", "resnet18-KFAC"]


def network(name: str) -> tuple[nn.Module, Tensor]:
    """Returns the network of the data folder and 50 images, or ResNet-18 with random weights and 16 of 64 x 64."""
    if name == "resnet20":
        return cifar_resnet20().eval(), images("cifar10").x_train[:50].clone()
    return resnet18().eval(), torch.randn(16, 3, 64, 64)


@dataclass(frozen=True)
class Layer:
    """One block of weights as its contractions see it.

    Attributes:
        size: number of weights.
        positions: number of positions T of a sample at which the weights are used.
        shape: (G, O, I), or None if no Kronecker product covers the block.
        is_output: whether the layer gives the outputs.
    """

    size: int
    positions: int
    shape: tuple[int, int, int] | None
    is_output: bool

    @property
    def single(self) -> bool:
        """Whether each row is one outer product."""
        return self.shape is not None and self.positions == 1

    def turned(self, columns: int) -> float:
        """Returns the multiply-adds that turn R rows into the eigenbasis of the factors."""
        assert self.shape is not None
        groups, outputs, inputs = self.shape
        left = min(self.positions, columns * outputs) * inputs**2
        right = 0 if self.is_output else min(self.positions, inputs) * columns * outputs**2
        return groups * (left + right)


def layers_of(tangent: Tangent) -> dict[str, Layer]:
    """Returns block name -> its layer."""
    plan, layers = tangent.plan, {}
    for block in tangent.blocks:
        uses = [i for i, _, _ in plan.uses.get(block.name, ())]
        shape = None if block.name in plan.explicit or block.matrix is None else block.matrix_shape
        positions = sum(plan.order[i].out for i in uses) // (shape[0] * shape[1]) if shape else 1
        layers[block.name] = Layer(block.size, max(1, positions), shape, plan.last in uses)
    return layers


def floors(tangent: Tangent, name: str) -> dict[str, float]:
    """Returns the multiply-adds of a fit's passes and of a prediction, in those of a forward pass."""
    every = layers_of(tangent)
    layers = [layer for layer in every.values() if layer.shape is not None]
    forward = sum(layer.positions * layer.size for layer in layers)
    entry = every[min(tangent.plan.uses, key=lambda block: tangent.plan.uses[block][0][0])]

    def total(counts: tuple[Callable[[Layer, int], float], ...], rows: int) -> float:
        return sum(count(layer, rows) for count in counts for layer in layers) / forward

    def squares(layer: Layer, rows: int) -> float:
        pairs = (layer.positions + 1) / 2
        return 0 if layer.single else layer.positions * layer.size * min(rows, pairs)

    def covariances(layer: Layer, rows: int) -> float:
        pairs = layer.positions * (layer.positions + 1) / 2
        by_rows = rows * layer.positions + rows * (rows + 1) / 2
        return 0 if layer.single else layer.size * min(by_rows, pairs)

    def factors(layer: Layer, rows: int) -> float:
        assert layer.shape is not None
        _, out, into = layer.shape
        return layer.positions * (into * (into + 1) + rows * out * (out + 1)) / 2

    def directions(layer: Layer, rows: int) -> float:
        by_rows = rows * (layer.positions + RANK) * layer.size
        return min(by_rows, RANK * layer.positions * (layer.size + rows * layer.size / layer.shape[2]))

    def passed(layer: Layer, rows: int) -> float:
        return layer.positions * layer.size * (1 + rows * (layer is not entry))

    fit, predict = {
        "Diagonal": ((passed, squares), (passed, covariances)),
        "KFAC": ((passed, factors), (passed, Layer.turned, covariances)),
        "EKFAC": ((passed, factors, passed, Layer.turned, squares), (passed, Layer.turned, covariances)),
        "ELLA": ((passed, directions), (passed, directions)),
    }[name]
    columns = FisherRoot(lw.Categorical(), tangent.outputs, torch.Generator(tangent.device)).columns
    return {"fit": total(fit, columns), "predict": total(predict, tangent.outputs)}


def problem_of(tangent: Tangent, outputs: Tensor, y: Tensor) -> Problem:
    """Returns what `lw.fit` hands to a method, for a single batch."""
    likelihood, summary = lw.Categorical(), DataSummary()
    summary.add(likelihood, outputs=outputs, targets=y, weights=None, samples=len(y))
    root = FisherRoot(likelihood, tangent.outputs, torch.Generator().manual_seed(SEED))
    prior = Prior.read(tangent, 1.0)
    return Problem(tangent, likelihood, root, prior, False, SEED, read=Seen(len(y), summary))


def passes(problem: Problem, method: lw.Method, x: Tensor, y: Tensor, decomposed: bool) -> tuple[float, Covariance]:
    """Returns the CPU seconds of all passes over a batch, and the covariance, or a stand-in of the same shapes."""
    generator, seconds = method.passes(problem), 0.0
    step: Any = next(generator)
    while True:
        state, start = step.init(), time.process_time()
        step.update(state, Batch(problem.tangent, Inputs(x), y, 0))
        seconds += time.process_time() - start
        if not decomposed:
            return seconds, stand_in(problem.tangent)
        try:
            step = generator.send(state)
        except StopIteration as end:
            return seconds, end.value


def stand_in(tangent: Tangent) -> Blockwise:
    """Returns a KFAC posterior whose eigenbases are identities: a prediction takes as long, and no `eigh` is needed."""
    structures: dict[str, Any] = {}
    for block in tangent.blocks:
        groups, outputs, inputs = block.matrix_shape
        if block.matrix is None:
            structures[block.name] = DiagonalBlock(torch.ones(block.size))
            continue
        bases = (torch.eye(size).repeat(groups, 1, 1) for size in (inputs, outputs))
        values = (torch.ones(groups, size, dtype=torch.float64) for size in (inputs, outputs))
        kronecker = KroneckerBlock.of_factors(*bases, *values, torch.ones(1, dtype=torch.int64))
        structures[block.name] = replace(kronecker, eigenvalues=torch.rand(groups, outputs, inputs))
    return Blockwise(tangent.blocks, structures, torch.ones(len(tangent.blocks), dtype=torch.float64), 1.0)


def predict(tangent: Tangent, covariance: Covariance, x: Tensor) -> Tensor:
    """Returns the covariances (B, C, C) of the outputs."""
    latent: Any = lw.Linearized().latent(tangent, covariance, prepared(x), joint=False)
    return latent.covariance


def case(name: str, rounds: int = 5) -> dict[str, Any]:
    """Returns floors, costs and their ratios of one network and method."""
    kind, _, label = name.partition("-")
    torch.manual_seed(SEED)
    model, x = network(kind)
    y, method = torch.arange(len(x)) % 10, METHODS[label]
    tangent = Tangent.survey(model, x)
    decomposed = (kind, label) != ("resnet18", "KFAC")
    least = floors(tangent, label)
    best = {"forward": float("inf"), "fit": float("inf"), "predict": float("inf")}

    def clock(what: str, call: Callable[[], Any]) -> Any:
        start = time.process_time()
        out = call()
        best[what] = min(best[what], time.process_time() - start)
        return out

    with torch.no_grad():
        problem = problem_of(tangent, model(x), y)
        for _ in range(rounds):
            for _ in range(5):
                clock("forward", lambda: model(x))
            seconds, covariance = passes(problem, method, x, y, decomposed)
            best["fit"] = min(best["fit"], seconds)
            clock("predict", partial(predict, tangent, covariance, x))
            clock("predict", partial(predict, tangent, covariance, x))
    row: dict[str, Any] = {"forward_milliseconds": 1e3 * best["forward"]}
    for what, floor in least.items():
        measured = best[what] / best["forward"]
        row[what] = {"floor": floor, "forward_passes": measured, "ratio": measured / floor}
    return row


def parts(rounds: int = 5) -> dict[str, Callable[[], Any]]:
    """Returns the cases, each the fastest of some rounds."""
    return {name: partial(case, name, rounds) for name in CASES}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Returns floors, measurements and ratios."""

    def cell(row: dict[str, float]) -> str:
        return f"{row['floor']:.1f}, {row['forward_passes']:.1f}, {row['ratio']:.2f}"

    columns = {"fit": "fit: floor, measured, ratio", "predict": "prediction: floor, measured, ratio"}
    rows = {name.replace("-", ", "): [cell(row[what]) for what in columns] for name, row in results.items()}
    return {"floors": grid(list(columns.values()), rows, corner="network, method")}
