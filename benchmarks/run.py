"""`make bench`: the cost benchmarks, on a GPU too if there is one, and trained networks if the data folder is there."""

from __future__ import annotations

import torch

from benchmarks import cost, gpu, real_networks, regression, streamlined_cost
from papers.common.data import available


def main() -> None:
    """Runs all benchmarks."""
    cost.main()
    streamlined_cost.main(["mlp", "resnet20", "vit"])
    if torch.cuda.is_available():
        gpu.main([])
    if available(*(f"uci_{name}.npz" for name in regression.TABLES)):
        regression.main()
    if available("mnist.npz", "mnist_cnn_ella.safetensors"):
        real_networks.main(["mnist"])
    if available("cifar10.npz", "cifar10_resnet20_optionA.safetensors"):
        real_networks.main(["cifar10"])


if __name__ == "__main__":
    main()
