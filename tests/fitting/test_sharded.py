"""The last layer of a network that `fully_shard` has spread over processes is that of the same network in one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import lapwing as lw
from tests import ranks, sharded

pytestmark = pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP2 of torch 2.6 needs a GPU")


@pytest.mark.slow
def test_a_sharded_network_has_the_last_layer_of_a_whole_one(tmp_path: Path) -> None:
    every = ranks.run(tmp_path, 2, [(sharded.fit,), (sharded.fail,)])
    for rank, results in enumerate(every):
        assert results is not None
        torch.testing.assert_close(results[0], sharded.fit_alone(rank), rtol=1e-6, atol=1e-9)
    (_, here), (_, there) = every  # type: ignore[misc]
    assert there["while it loads"] == "OSError: the disk is gone"
    assert "The fit has failed in process 1 of 2" in here["while it loads"]
    assert "The prediction has failed in process 1 of 2" in here["while it predicts"]
    assert here["then"] == there["then"] == "no error"


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one process, in which `fully_shard` makes DTensors all the same."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Tokens(nn.Module):
    """Outputs (B, T, C) of an object, whose last layer may be tied to the embedding or called twice."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.embedding, self.lm_head = kind, nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.middle, self.dropout = nn.Linear(5, 5), nn.Dropout()
        if kind == "tied":
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        h = self.dropout(self.middle(self.embedding(tokens)).tanh())
        if self.kind == "conv":
            return nn.functional.conv1d(h.mT, self.lm_head.weight[..., None]).mT
        if self.kind == "scaled":
            return 2 * self.lm_head(h)
        if self.kind == "twice":
            return self.lm_head(h + self.lm_head(h)[..., :5])
        return self.lm_head(h)


def shard(model: nn.Module, precision: torch.dtype | None = None) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = copy.deepcopy(model)
    fully_shard(model.middle, mp_policy=MixedPrecisionPolicy(precision))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(precision, output_dtype=precision and torch.float32))


def tokens(dtype: torch.dtype = torch.float64, kind: str = "") -> tuple[nn.Module, list[Any]]:
    model = Tokens(kind).to(dtype).eval()
    y = torch.randint(7, (10, 4))
    return model, [(torch.randint(7, (6, 4)), y[:6]), (torch.randint(7, (4, 4)), y[6:])]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_outputs_with_positions(dtype: torch.dtype) -> None:
    model, loader = tokens(dtype)
    one, other = lw.fit(shard(model), loader), lw.fit(model, loader)
    assert list(one.tangent.parameters) == list(other.tangent.parameters) == ["lm_head.weight"]
    x = loader[0][0]
    torch.testing.assert_close(one.predict(x).probs, other.predict(x).probs)
    torch.testing.assert_close(one.latent(loader).variance, other.latent(loader).variance)


@pytest.mark.usefixtures("group")
def test_mixed_precision_fits_in_the_precision_of_the_network() -> None:
    model, loader = tokens(torch.float32)
    one, other = lw.fit(shard(model, torch.bfloat16), loader), lw.fit(copy.deepcopy(model).bfloat16(), loader)
    torch.testing.assert_close(one.latent(loader).variance, other.latent(loader).variance)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", ["tied", "twice", "scaled", "conv"])
def test_another_end_is_refused(kind: str) -> None:
    model, loader = tokens(kind=kind)
    model = shard(model)
    with pytest.raises(lw.LapwingError, match="are not those of a torch.nn.Linear that is called last"):
        lw.fit(model, loader)
    assert all(type(value).__name__ == "DTensor" for value in model.parameters())


@pytest.mark.usefixtures("group")
def test_what_a_sharded_network_does_not_do_is_refused() -> None:
    model, loader = tokens()
    whole, model = model, shard(model)
    for method in (lw.KFAC(), lw.SampledLLA(4)):
        with pytest.raises(lw.LapwingError, match=rf"{type(method).__name__} .* pass params=lw.last_layer"):
            lw.fit(model, loader, method)
    with pytest.raises(lw.LapwingError, match=r"prior|DTensor"):
        lw.fit(model, loader, prior=lw.fit(whole, loader))
    posterior = lw.fit(model, loader)
    with pytest.raises(lw.LapwingError, match="lapwing has lw.fit, posterior.update"):
        posterior.log_marginal_likelihood(linearised_mode=True, loader=loader)
    with pytest.raises(lw.LapwingError, match="training mode"):
        lw.fit(model.train(), loader)
    model.eval()
    with torch.no_grad():
        model.middle.weight.mul_(2)
    with pytest.raises(lw.LapwingError, match=r"middle.weight of FSDPTokens was written after the fit. Fit again."):
        posterior.predict(loader[0][0])


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of a training with outputs that are views
def test_a_network_can_be_trained_after_predictions_in_inference_mode() -> None:
    model, loader = tokens()
    model = shard(model)
    posterior = lw.fit(model, loader)
    expected = posterior.predict(loader[0][0]).probs
    with torch.inference_mode():
        torch.testing.assert_close(posterior.predict(loader[0][0]).probs, expected)
    model.train()(loader[0][0]).square().sum().backward()
    assert all(value.grad is not None for value in model.parameters())


@pytest.mark.usefixtures("group")
def test_inputs_that_require_gradients_are_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    model, x = fully_shard(nn.Sequential(nn.Linear(4, 3)).eval()), torch.randn(6, 4)
    posterior = lw.fit(model, [(x, torch.arange(6) % 3)])
    with pytest.raises(lw.LapwingError, match="Pass x.detach"):
        posterior.predict(x.requires_grad_())


@pytest.mark.usefixtures("group")
def test_a_regression_is_told_to_hold_data_out(caplog: pytest.LogCaptureFixture) -> None:
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(40, 4)
    model, data = fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).eval()), [(x, x[:, :1])]
    with caplog.at_level(logging.WARNING, "lapwing"):
        lw.fit(model, data)
        assert "Pass held-out data" in caplog.text
        caplog.clear()
        lw.fit(model, data, validation=[(x + 1, x[:, :1])])
    assert not caplog.text
