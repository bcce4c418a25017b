"""The picture of the README: the first network of `benchmarks.ood`, alone and with lapwing.

`python -m benchmarks.readme_picture` draws it. It needs Fashion-MNIST and MNIST in the folder that LAPWING_DATA names.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import torch

import lapwing as lw
from benchmarks.ood import logits_of, trained
from lapwing.evaluation import plots
from papers.common.data import batched, images, random_rows

mpl.use("Agg")
from matplotlib import pyplot as plt

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "readme.png"


def main() -> None:
    """Trains the network of the first repeat, fits it, and draws."""
    torch.set_num_threads(1)
    data, foreign = images("fashion_mnist"), images("mnist").x_test[:3000]
    rows = random_rows(data.x_train, 3300, 0)
    x, y = data.x_train[rows], data.y_train[rows]
    model = trained(x[:3000], y[:3000], 0)
    posterior = lw.fit(model, batched(x[:3000], y[:3000]), validation=(x[3000:], y[3000:]))
    test, labels = data.x_test[:5000], data.y_test[:5000]
    known, unknown = posterior.predict(test), posterior.predict(foreign)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    plots.reliability_diagram(logits_of([model], test)[0].softmax(-1), labels, left, **plots.NETWORK)
    plots.reliability_diagram(known, labels, left).set_title("Confidence and accuracy")
    plots.ood_scores(known, unknown, right).set_title("Garments it knows, digits it does not")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
