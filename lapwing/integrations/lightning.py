"""A Lightning callback that fits a posterior at the end of the training: `LaplaceCallback`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lapwing as lw

from ..data.inputs import Samples
from ..errors import LapwingError, extra
from ..network.stamp import PreservedState

__all__ = ["LaplaceCallback"]

_Callback: Any = extra("lightning.pytorch").Callback


class LaplaceCallback(_Callback):
    """Fits a posterior when `trainer.fit` ends, on the training data of its loader or data module, by `lw.fit`.

    The module is in eval mode only during the fit: call `module.eval()` before predictions. After training on a GPU the
    posterior is on the GPU, while Lightning moves the module to the CPU: call `module.cuda()`, or `lw.load` the file.
    If the trainer writes checkpoints, the posterior is saved next to them. It belongs to the weights at the end of the
    training, so `lw.load` refuses it for the weights of an earlier checkpoint.

    Args:
        method: method of `lw.fit`.
        network: name of the submodule to treat, such as "model"; None treats the Lightning module, whose `forward` then
            returns the outputs.
        validation: whether the validation data of the trainer tune the posterior, as `validation=` of `lw.fit`.
        inputs: keys or function of `lw.batches` for the inputs of the trainer's batches; None for (inputs, targets).
        targets: the same for the targets.
        filename: name of the file next to the checkpoints; None writes no file.
        options: further options of `lw.fit`, such as `params=lw.last_layer`.

    Attributes:
        posterior: the `lw.Posterior`; None before the end of the training.

    Raises:
        LapwingError: before the training, if there are several processes, the validation data are missing or `inputs=`
            does not fit the first batch; after it, for the reasons of `lw.fit`.
    """

    def __init__(
        self,
        method: lw.Method | None = None,
        *,
        network: str | None = None,
        validation: bool = False,
        inputs: Any = None,
        targets: Any = None,
        filename: str | None = "posterior.safetensors",
        **options: Any,
    ) -> None:
        super().__init__()
        self.method, self.network, self.validation, self.filename = method, network, validation, filename
        self.inputs, self.targets, self.options = inputs, targets, options
        self.posterior: lw.Posterior | Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raises for several processes, or a submodule that does not exist, before the training starts."""
        if trainer.world_size > 1:
            raise LapwingError(
                f"LaplaceCallback fits in one process, and the trainer has {trainer.world_size}, each with a share of "
                "the data. Leave the callback out, and call lw.fit(model, loader) after the training."
            )
        self._treated(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raises if `validation=True` and the trainer has no validation data."""
        if self.validation and not trainer.val_dataloaders:
            raise LapwingError(
                "LaplaceCallback(validation=True) needs validation data, and the trainer has none. Pass a loader for "
                "them to trainer.fit and define validation_step, or leave validation out."
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Raises before the first step if the fit at the end of the training could not read the batches."""
        if batch_idx == 0:
            try:
                Samples.of(self._picked([batch])[0], self.options.get("sample_weights", False))
            except LapwingError as error:
                raise LapwingError(str(error).replace("lw.batches(loader, ", "LaplaceCallback(")) from error

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Fits and saves the posterior."""
        model, options = self._treated(pl_module), dict(self.options)
        if self.validation:
            options["validation"] = self._picked(trainer.val_dataloaders)
        with PreservedState(model):
            model.eval()
            self.posterior = lw.fit(model, self._picked(trainer.train_dataloader), self.method, **options)
            checkpoints = trainer.checkpoint_callback
            if self.filename is not None and checkpoints is not None and checkpoints.dirpath is not None:
                folder = Path(checkpoints.dirpath)
                folder.mkdir(parents=True, exist_ok=True)
                self.posterior.save(folder / self.filename)

    def _picked(self, loader: Any) -> Any:
        return loader if self.inputs is None else lw.batches(loader, self.inputs, self.targets)

    def _treated(self, pl_module: Any) -> Any:
        if self.network is None:
            return pl_module
        try:
            return pl_module.get_submodule(self.network)
        except AttributeError as error:
            raise LapwingError(
                f"{type(pl_module).__name__} has no submodule {self.network!r}. Write network='model' for self.model, "
                "or leave network out for the module itself."
            ) from error
