"""The callback fits what `lw.fit` fits, and leaves the module as the training left it."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from tests.refused import refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lightning")
    import lightning.pytorch as pl

    from lapwing.integrations.lightning import LaplaceCallback

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        x, y = torch.randn(50, 4), torch.arange(50) % 3
        self.train, self.val = TensorDataset(x[:35], y[:35]), TensorDataset(x[35:], y[35:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, 16, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 16)


def trainer(folder: Path, callback: LaplaceCallback, **options) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[callback], **options,
    )  # fmt: skip


@pytest.mark.parametrize("network", [None, "model"])
def test_the_posterior_is_that_of_lw_fit(network: str | None, tmp_path: Path) -> None:
    module, data = Module(), Data()
    callback = LaplaceCallback(lw.KFAC(), network=network, validation=True, params=lw.last_layer)
    assert callback.posterior is None
    trainer(tmp_path, callback).fit(module, datamodule=data)
    assert module.model[2].training
    assert all(weight.grad is None or weight.requires_grad for weight in module.parameters())
    posterior, x = callback.posterior, data.val.tensors[0]
    assert posterior.samples == 35
    module.eval()
    model = module if network is None else module.model
    assert posterior.model is model
    plain = lw.fit(model, [data.train.tensors], lw.KFAC(), params=lw.last_layer, validation=data.val.tensors)
    assert torch.allclose(posterior.predict(x).probs, plain.predict(x).probs, atol=1e-5)
    (file,) = tmp_path.rglob("posterior.safetensors")
    assert list(file.parent.glob("*.ckpt"))
    again = Module()
    checkpoint = torch.load(next(file.parent.glob("*.ckpt")), weights_only=False)
    again.load_state_dict(checkpoint["state_dict"])
    again.eval()
    loaded = lw.load(file, again if network is None else again.model)
    assert torch.allclose(loaded.predict(x).probs, posterior.predict(x).probs)


def test_batches_of_another_form(tmp_path: Path) -> None:
    class Named(Module):
        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            return super().training_step((batch["pixels"], batch["digit"]))

        def validation_step(self, batch: dict[str, Tensor]) -> None:
            self.training_step(batch)

    module, data = Named(), Data()
    train, val = ([{"pixels": x, "digit": y} for x, y in part] for part in (data.train, data.val))
    callback = LaplaceCallback(lw.KFAC(), validation=True, inputs="pixels", targets="digit", params=lw.last_layer)
    trainer(tmp_path, callback).fit(module, DataLoader(train, 16), DataLoader(val, 16))
    module.eval()
    expected = lw.fit(module, data.train, lw.KFAC(), validation=data.val, params=lw.last_layer)
    assert callback.posterior.samples == 35
    torch.testing.assert_close(callback.posterior.prior_precision, expected.prior_precision)


def test_without_checkpoints_there_is_no_file(tmp_path: Path) -> None:
    callback = LaplaceCallback()
    loader = Data().train_dataloader()
    trainer(tmp_path, callback, enable_checkpointing=False).fit(Module(), loader)
    assert callback.posterior.samples == 35
    assert not list(tmp_path.rglob("*"))


def test_what_would_fail_after_the_training_is_refused_before(tmp_path: Path) -> None:
    module = Module()
    before = [weight.clone() for weight in module.parameters()]
    plain = Data().train_dataloader()
    named = DataLoader([{"pixels": x, "digit": y} for x, y in Data().train], 16)
    for callback, loader, words in (
        (LaplaceCallback(network="net"), plain, "no submodule 'net'"),
        (LaplaceCallback(validation=True), plain, "needs validation data"),
        (LaplaceCallback(), named, "Write LaplaceCallback(inputs='pixels', targets='digit')"),
        (LaplaceCallback(inputs="pixel", targets="digit"), named, "from a batch, which has the keys"),
    ):
        refused(partial(trainer(tmp_path, callback).fit, module, loader), words)
    assert all(map(torch.equal, before, module.parameters()))

    class Two:
        world_size = 2

    refused(lambda: LaplaceCallback().setup(Two(), module, "fit"), "one process")


def test_the_module_is_put_back_after_an_error(tmp_path: Path) -> None:
    module = Module()
    training = trainer(tmp_path, LaplaceCallback("kfac"), enable_checkpointing=False)
    refused(lambda: training.fit(module, Data().train_dataloader()), "method")
    assert module.model[2].training
