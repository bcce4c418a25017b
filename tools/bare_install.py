"""What lapwing does without any extra; `tools/release_check.py` runs it where the wheel is installed alone."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lapwing as lw

EXTRAS = ("sklearn", "scipy", "matplotlib", "onnx", "onnxscript", "transformers")


def main() -> None:
    """Fits, predicts, saves and loads; then asks for what needs an extra."""
    assert Path(lw.__file__).is_relative_to(sys.prefix), f"lapwing comes from {lw.__file__}"
    present = [name for name in EXTRAS if importlib.util.find_spec(name)]
    assert not present, f"the environment is not bare: {present}"

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).eval()
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    posterior = lw.fit(model, [(x, y)], lw.VaLLA(6))
    posterior.save("posterior.safetensors")
    loaded = lw.load("posterior.safetensors", model)
    for way in (lw.Linearized(), lw.MonteCarlo(5), lw.Streamlined()):
        assert torch.equal(loaded.predict(x, via=way).probs, posterior.predict(x, via=way).probs), way

    print(lw.compare({"VaLLA": posterior}, [(x, y)], repeats=1))
    refused("lw.compare", lambda: lw.compare({"VaLLA": posterior}, [(x, y)], {"far": 9 * x}, repeats=1))
    refused("auroc", lambda: lw.evaluation.metrics.auroc(torch.rand(5), torch.rand(5)))
    refused("ONNX", lambda: lw.deploy(posterior, x).to_onnx("network.onnx", x))


def refused(name: str, use: Callable[[], Any]) -> None:
    """Runs what needs an extra, which must say so in one sentence with the line to type."""
    said = "nothing: it ran without its extra"
    try:
        use()
    except lw.LapwingError as error:
        said = str(error)
    assert 'is not installed. Run pip install "lapwing-torch[' in said, f"{name} said {said}"
    print(f"{name}: {said}")


main()
