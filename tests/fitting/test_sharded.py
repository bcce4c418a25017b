"""Networks that `fully_shard` has spread over processes: the refusal, and the lines of docs/scaling.md to write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import lapwing as lw
from tests import ranks

pytestmark = pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP2 of torch 2.6 needs a GPU")

PAGE = Path(lw.__file__).parents[1] / "docs" / "scaling.md"


class Classifier(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def network() -> nn.Module:
    return Classifier().double().eval()


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model.blocks)
    return fully_shard(model)


def batches() -> tuple[list[ranks.Batches], Tensor]:
    """Returns the batches of each of two ranks, and the inputs of a prediction."""
    return ranks.shares(ranks.data(3, 40, 1), [[12, 9], [10, 9]]), ranks.data(3, 5, 2)[0]


def by_recipe(rank: int, size: int) -> Tensor:
    """Runs the lines of the page on one rank; the network was called before, as in a training."""
    shares, x = batches()
    model = sharded()
    model(x)
    names: dict[str, Any] = {"torch": torch, "lw": lw, "model": model, "loader": shares[rank], "test_inputs": x}
    section = PAGE.read_text(encoding="utf-8").partition("### Sharded networks")[2]
    (lines,) = re.findall(r"^```py\n(.*?)^```", section.partition("\n###")[0], re.MULTILINE | re.DOTALL)
    exec(lines, names)
    return names["probs"]


@pytest.mark.slow
def test_the_recipe_fits_the_last_layer_of_a_sharded_network(tmp_path: Path) -> None:
    shares, x = batches()
    expected = lw.fit(network(), [*shares[0], *shares[1]]).predict(x).probs
    for probs in ranks.run(tmp_path, 2, [(by_recipe,)]):
        assert probs is not None
        torch.testing.assert_close(probs[0], expected, rtol=1e-6, atol=1e-9)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one process, in which `fully_shard` makes DTensors all the same."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_sharded_network_is_refused_also_after_a_call_that_leaves_weights_whole() -> None:
    (shares, x), model = batches(), sharded()
    for _ in range(2):
        with pytest.raises(lw.LapwingError, match=r"FSDPClassifier .* are sharded over processes.* docs/scaling.md"):
            lw.fit(model, shares[0])
        model(x)
