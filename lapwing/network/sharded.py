"""Networks whose weights `fully_shard` has spread over processes: the last layer, as a network of its own.

No process has all weights at once, so nothing is differentiated through them. The last layer does without: its inputs
are features, which the network computes. `Head` is that layer with its whole weight and bias, and the rest of the
library takes it for the network.

Every call of a sharded network is collective, and all processes must call it equally often. So `Head.features` alone
calls it: once for each batch, before anything else is done with the batch, and on a sample of the first batch where
another process has more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import LapwingError
from . import batches, ranks
from .batches import Forward
from .calling import output_tensor
from .data import with_tensors
from .eager import EagerMode, uncompiled, without_compiled
from .entry import network_precision, outside_modes
from .gate import check_inputs, check_mode, sharded_modules
from .invoke import invoke
from .module_state import modules_of, preserved_state
from .stamp import Stamp, state_of
from .tracing import wants_gradient

FEATURES = "head_features"
"""What a batch calls its features. A `Head` takes them by this name, so that it takes no inputs for features."""


class _LatestLinear(EagerMode):
    """Notes what the latest linear layer of a network got.

    Args:
        network: whose layer to look up; None where the inputs are all that is asked for.

    Attributes:
        inputs: of the latest call.
        calls: the weights of all calls.
        path: where the network has the latest layer; None where not one linear layer alone has its weight.
        parameters: copies of its weight and bias, which are whole during the call alone.
    """

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        self._network = network
        self.inputs: Tensor | None = None
        self.calls: list[Tensor] = []
        self.path: str | None = None
        self.parameters: dict[str, Tensor] = {}

    def intercept(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs the function; notes it if it is a linear layer."""
        if function is F.linear:
            arguments = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
            self.inputs = arguments["input"]
            if self._network is not None:
                self._note(self._network, arguments["weight"])
        return function(*args, **kwargs)

    def _note(self, network: nn.Module, weight: Tensor) -> None:
        self.calls.append(weight)
        owners = [(prefix, m) for prefix, m in modules_of(network) if any(p is weight for p in m._parameters.values())]
        self.path = owners[0][0] if len(owners) == 1 and isinstance(owners[0][1], nn.Linear) else None
        if self.path is not None:
            named = owners[0][1]._parameters.items()
            self.parameters = {name: value.detach().clone() for name, value in named if value is not None}


class Head(nn.Module):
    """The last layer of a sharded network. Its parameters have the names that they have there.

    Args:
        network: the sharded network, in eval mode.
        forward: how it is called; None for `network(x)`.
        inputs: of the first batch, which all processes have.

    Raises:
        LapwingError: for a network that does not end in a linear layer, which is called once.
    """

    def __init__(self, network: nn.Module, forward: Forward | None, inputs: Any) -> None:
        super().__init__()
        self._sharded = (uncompiled(network),)  # in a tuple, since it is no part of this module
        self._called, self._some = forward, batches.take(inputs, slice(0, 1))
        check_mode(self._network)
        noted, outputs = self._noted(self._some, self._network)
        if noted.path is None or sum(weight is noted.calls[-1] for weight in noted.calls) > 1:
            raise self._other_end()
        layer: nn.Module = self
        for name in noted.path.split(".")[:-1]:
            inner = nn.Module()
            layer._modules[name] = inner  # add_module refuses the names of methods, such as "features"
            layer = inner
        for name, value in noted.parameters.items():
            layer.register_parameter(name, nn.Parameter(value))
        self._layer = (layer,)
        self.eval()
        self._checked(noted, outputs)
        self._stamp = Stamp.of(self._shards())

    @property
    def _network(self) -> nn.Module:
        return self._sharded[0]

    def forward(self, inputs: Any = None, *, head_features: Tensor | None = None) -> Tensor:
        """Returns the network's outputs, from its features."""
        if head_features is None:
            raise LapwingError(
                f"The weights of {type(self._network).__name__} are sharded over processes by fully_shard. Of such a "
                "network lapwing has lw.fit, posterior.update, posterior.latent and posterior.predict alone. For "
                "anything else load its full state dict into a network that is not sharded."
            )
        layer: Any = self._layer[0]
        return F.linear(head_features, layer.weight, getattr(layer, "bias", None))

    @outside_modes
    def features(self, loader: Iterable[Any], parts: Callable[[Any], tuple[Any, ...]]) -> list[Any]:
        """Returns the batches of a loader with features in place of inputs. All processes call it, each with its own.

        Args:
            loader: of this process; it may be without batches.
            parts: takes a batch apart: the inputs, and what else there is.

        Raises:
            LapwingError: for weights that were written after the fit, and inputs that are not finite or require
                gradients.
        """
        done: list[Any] = []
        left = iter(loader)
        with ranks.across_ranks("prediction"):
            check_mode(self._network)
            self._reshard()
            changed = self._stamp.changed(self._shards())
            if changed is not None:
                raise LapwingError(f"{changed} of {type(self._network).__name__} was written after the fit. Fit again.")
            while True:
                batch = next(left, None)
                inputs, *rest = (self._some,) if batch is None else parts(batch)
                if wants_gradient(inputs):
                    raise LapwingError(
                        "The inputs require gradients, and none pass through a network that is sharded by fully_shard. "
                        "Pass x.detach()."
                    )
                check_inputs(inputs, (), f"the inputs of batch number {len(done) + 1}")
                if not any(ranks.gathered("features", batch is not None)):
                    return done
                features = {FEATURES: self._checked(*self._noted(inputs))}
                if batch is not None:
                    done.append((features, *rest) if rest else features)

    def features_of(self, x: Any) -> Any:
        """Returns inputs, or a loader of them, with features in their place. All processes call it."""
        if not batches.is_loader(x):
            return self.features([x], lambda x: (x,))[0]
        return self.features(x, lambda batch: (batches.inputs_of(with_tensors(batch, self)),))

    def _noted(self, inputs: Any, network: nn.Module | None = None) -> tuple[_LatestLinear, Tensor]:
        """Runs the network; returns its latest linear layer, and its outputs."""
        noted = _LatestLinear(network)
        device = next(self._network.parameters()).device
        with torch.no_grad(), without_compiled(), network_precision(), preserved_state(self._network):
            try:
                with noted:
                    outputs = output_tensor(invoke(self._network, batches.plain(inputs, device), self._called))
            finally:
                self._reshard()
        return noted, outputs

    def _checked(self, noted: _LatestLinear, outputs: Any) -> Tensor:
        """Returns the features, once the last layer has made the network's outputs of them."""
        features = noted.inputs
        if features is None or not isinstance(outputs, Tensor):
            raise self._other_end()
        features = features.to(next(self.parameters()).dtype)
        with torch.no_grad(), network_precision():
            expected = self(head_features=features)
        eps, scale = torch.finfo(expected.dtype).eps, expected.abs().max().clamp_min(1.0)
        if outputs.shape != expected.shape or not (outputs - expected).abs().max() <= 3 * eps**0.5 * scale:
            raise self._other_end()
        return features.cpu()

    def _other_end(self) -> LapwingError:
        return LapwingError(
            f"The outputs of {type(self._network).__name__}, whose weights are sharded by fully_shard, are not those "
            "of a torch.nn.Linear that is called last, and once, with a weight of its own. Load its full state dict "
            "into a network that is not sharded."
        )

    def _reshard(self) -> None:
        """Frees the whole weights that a call has left, as between the steps of a training."""
        for module in sharded_modules(self._network):
            module.reshard()

    def _shards(self) -> dict[str, Tensor]:
        return {name: getattr(value, "_local_tensor", value) for name, value in state_of(self._network).items()}


def features_of(model: nn.Module, x: Any) -> Any:
    """Returns what the network of a posterior gets: inputs as they are, or the features that a sharded one computes."""
    done = isinstance(x, Mapping) and FEATURES in x
    return model.features_of(x) if isinstance(model, Head) and not done else x
