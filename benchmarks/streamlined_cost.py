"""What deployed networks cost, in plain forward passes of the same batch run in the same way.

Means and variances of the outputs, in eager mode, by `torch.compile`, and in onnxruntime, beside the count of products
that the method must do: one a layer before the first treated one, two after it, and one more at a treated layer, each
weighted by the layer's FLOPs. One thread, its CPU time, the fastest of many. Random weights and inputs: cost does not
depend on them. Tables 13 and 17 of Li et al., Streamlining Prediction in Bayesian Deep Learning, report 1.01 (last
layer of a ViT), 1.16 (a ViT without covariances) and 7.9 (an MLP) on a GPU at a batch of one.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import lapwing as lw
from benchmarks.cost import mlp
from lapwing.data.inputs import Inputs
from lapwing.prediction.streamlined.graph import execute, read
from lapwing.prediction.streamlined.schedule import schedule
from papers.common.measure import fastest
from papers.common.networks import ResNet20, logits_vit

SEED = 0
WAY = lw.Streamlined(positions="independent")


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "mlp": (mlp, (784,), ("4.*",)),
    "resnet20": (lambda: ResNet20().eval(), (3, 32, 32), ("layer3.2.*", "linear.*")),
    "vit": (logits_vit, (3, 32, 32), ("*layers.3.*", "*classifier.*")),
}
"""Name -> what makes it, the shape of a sample, the patterns of its last block."""


def products(posterior: lw.Posterior, x: Tensor) -> float:
    """Returns how many products of its size the method does for each layer, averaged by FLOPs."""
    tangent, inputs = posterior.tangent, Inputs(x)
    graph = read(tangent, inputs)
    treated = {name for name, parameter in graph.parameters.items() if parameter in tangent.parameters}
    planned = schedule(graph, frozenset(treated), frozenset(), "values")
    uncertain = planned.uncertain
    values: dict[str, Any] = graph.bind(inputs)
    plain = needed = 0
    with torch.no_grad():
        for node in graph.nodes:
            with FlopCounterMode(display=False) as counter:
                values[node.name] = execute(node, values)
            flops, sources = counter.get_total_flops(), [source.name for source in node.all_input_nodes]
            attention = "attention" in str(node.target)
            if attention:  # its kernel on a CPU is not counted
                flops = sdpa_flop_count(*(values[name].shape for name in sources[:3]))
            if not flops:
                continue
            plain += flops
            if attention:  # one of its two products carries the variances of the values
                needed += 1.5 * flops if node.name in uncertain else flops
            else:
                needed += flops * (1 + (sources[0] in uncertain) + bool(treated & set(sources[1:2])))
    return needed / plain


def session(path: Path) -> Callable[[Tensor], Any]:
    """Returns what runs an ONNX file on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    loaded = onnxruntime.InferenceSession(path, options)
    return lambda x: loaded.run(None, {"x": x.numpy()})


def exported(model: nn.Module, x: Tensor, path: Path) -> Callable[[Tensor], Any]:
    """Writes a plain network as ONNX."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model, (x,), input_names=["x"], dynamic_shapes=({0: "batch"},), dynamo=True, verbose=False
        )
    assert program is not None
    program.save(path)
    return session(path)


def row(model: nn.Module, shape: tuple[int, ...], method: Any, params: Any, folder: Path, via: Any = WAY) -> dict:
    """Returns the costs of one posterior, at batches of 1 and 100."""
    x = torch.randn(100, *shape)
    posterior = lw.fit(model, [(x, torch.arange(100) % 10)], method, params=params, prior_precision=100.0)
    predictor = lw.deploy(posterior, x, via, "latent")
    results: dict[str, Any] = {"products": products(posterior, x)}
    plain_onnx = exported(model, x, folder / "plain.onnx")
    ours_onnx = session(predictor.to_onnx(folder / "predictor.onnx", x))
    for batch in (1, 100):
        z = torch.randn(batch, *shape)
        torch._dynamo.reset()
        with torch.no_grad():
            plain, ours = torch.compile(model), torch.compile(predictor)
            runs = (model, predictor, plain, ours, plain_onnx, ours_onnx)
            best = fastest([lambda run=run, z=z: run(z) for run in runs], 3.0)
        runtimes = enumerate(("eager", "compiled", "onnxruntime"))
        results[f"batch {batch}"] = {name: best[2 * i + 1] / best[2 * i] for i, name in runtimes}
    return results


def costs(name: str, method: lw.Method, params: Any, via: Any) -> dict[str, Any]:
    """Returns the costs of one posterior of a network."""
    make, shape, _ = NETWORKS[name]
    with tempfile.TemporaryDirectory() as folder:
        return row(make(), shape, method, params, Path(folder), via)


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the posteriors of each network."""
    found = {}
    for name, (_, _, block) in NETWORKS.items():
        cases = {
            "diagonal": (lw.Diagonal(), lw.everything, WAY),
            "last block, diagonal": (lw.Diagonal(), lw.matching(*block), WAY),
            "last layer, KFAC": (lw.KFAC(), lw.last_layer, lw.Linearized()),
            "KFAC": (lw.KFAC(), lw.everything, WAY),
            "diagonal, positions correlated": (lw.Diagonal(), lw.everything, lw.Streamlined()),
        }
        found |= {f"{name}: {label}": partial(costs, name, *case) for label, case in cases.items()}
    del found["mlp: diagonal, positions correlated"]
    return found
