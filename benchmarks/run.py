"""`make bench`: the cost benchmarks, and the trained networks where the data folder is at hand."""

from __future__ import annotations

from benchmarks import cost, real_networks, regression, streamlined_cost
from papers.common.data import available


def main() -> None:
    """Runs all benchmarks."""
    cost.main()
    streamlined_cost.main(["mlp", "resnet20", "vit"])
    if available(*(f"uci_{name}.npz" for name in regression.TABLES)):
        regression.main()
    if available("mnist.npz", "mnist_cnn_ella.safetensors"):
        real_networks.main(["mnist"])
    if available("cifar10.npz", "cifar10_resnet20_optionA.safetensors"):
        real_networks.main(["cifar10"])


if __name__ == "__main__":
    main()
