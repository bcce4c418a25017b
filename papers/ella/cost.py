"""What ELLA costs on the ResNet-20: its parts alone, the whole fit, a prediction."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import lapwing as lw
from lapwing.data.inputs import Inputs
from lapwing.tangent import Anchors, Tangent
from papers.common.cifar import Cifar
from papers.common.measure import ratio, timed
from papers.ella.shared import features


def run(rows: int = 2000, images: int = 2000) -> dict[str, Any]:
    """Returns seconds of the fit and of its parts alone, and a prediction's cost in forward passes."""
    setup = Cifar.load(0, images, reported=100)
    x = setup.test[0][0]
    tangent = Tangent.survey(setup.model, x[:4], memory=2**32)
    data = torch.cat([part for part, _ in setup.train])
    generator = torch.Generator().manual_seed(0)
    samples, outputs = (torch.randint(high, (rows,), generator=generator) for high in (images, 10))

    def plain_rows() -> None:
        """A tenth of the rows by ordinary backward passes, one image each."""
        weights = [p for p in setup.model.parameters() if p.requires_grad]
        for sample, output in zip(samples.tolist()[: rows // 10], outputs.tolist(), strict=False):
            torch.autograd.grad(setup.model(data[sample : sample + 1])[0, output], weights)

    backward = 10 * timed(plain_rows)[1]
    jacobian, written = timed(lambda: Anchors(tangent, (Inputs(data),), samples, outputs).rows(torch.float32))
    gram = timed(partial(torch.matmul, jacobian, jacobian.T))[1]
    del jacobian
    method = lw.ELLA(rank=20, rows=rows)
    posterior, whole = timed(
        lambda: lw.fit(setup.model, setup.train, method, prior_precision=1.0, tune=None, memory=2**32)
    )
    projected = timed(lambda: features(posterior, data))[1]
    with torch.no_grad():
        ratios = ratio(lambda: posterior.latent(x).variance, lambda: setup.model(x), rounds=8)
    return {
        "rows": rows, "images": images, "rows by plain backward passes": backward, "rows by the engine": written,
        "gram": gram, "features": projected, "fit": whole, "fit / parts": whole / (backward + gram + projected),
        "prediction of 100 images": ratios, "aim": {"fit / parts": 1.5, "prediction": 1.2 * 41},
    }  # fmt: skip
