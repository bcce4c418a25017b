"""The test zoo: tiny deterministic networks in float64, one for each way in which a network can be awkward.

    for name, case in ZOO.items():
        model, x, y = case.build(), case.inputs(4, seed=0), case.targets(4, seed=0)
        f = tests.oracle.outputs(model, x)  # (B, C)

An input is a tensor (`model(x)`), a tuple (`model(*x)`), or a dict as a Hugging Face batch (`model(**x)`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tests import zoo_modules as zm

Batch = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One network of the zoo.

    Attributes:
        name: Key in `ZOO`.
        build: Makes the network: float64, eval mode, the same at every call; the global generator is not touched.
        inputs: `inputs(batch_size, seed)`, a batch whose tensors all have the batch first.
        outputs: Number of outputs C.
        classification: Whether the targets are classes.
        notes: What is awkward about it.
        squeezed: Whether the network returns (B,) in place of (B, 1).
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Batch]
    outputs: int
    classification: bool
    notes: str
    squeezed: bool = False

    def targets(self, batch_size: int, seed: int) -> Tensor:
        """Random targets: classes (B,) int64, or values of the shape that the network returns, (B, C) or (B,)."""
        generator = torch.Generator().manual_seed(seed + 10_000)
        if self.classification:
            return torch.randint(self.outputs, (batch_size,), generator=generator)
        shape = (batch_size,) if self.squeezed else (batch_size, self.outputs)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


ZOO: dict[str, Case] = {}


def _real(*shape: int) -> Callable[[int, int], Tensor]:
    """Make inputs of standard normal numbers, (B, *shape)."""

    def inputs(batch_size: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch_size, *shape, generator=generator, dtype=torch.float64)

    return inputs


def _tokens(low: int, high: int, positions: int) -> Callable[[int, int], Tensor]:
    """Make inputs of token ids in [low, high), (B, T) int64."""

    def inputs(batch_size: int, seed: int) -> Tensor:
        return torch.randint(low, high, (batch_size, positions), generator=torch.Generator().manual_seed(seed))

    return inputs


def _randomise(model: nn.Module) -> nn.Module:
    """Move biases, norm weights and batch-norm statistics away from their defaults and widen matrices, in place."""
    norms = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, zm.HandRMSNorm)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1].endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif parameter.ndim > 1:
                parameter *= 1.5
        for module in model.modules():
            if isinstance(module, norms):
                module.weight.uniform_(0.5, 1.5)
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                module.running_mean.normal_(0.0, 0.3)
                module.running_var.uniform_(0.5, 1.5)
    return model


def _add(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[int, int], Any],
    outputs: int,
    classification: bool,
    notes: str,
    finish: Callable[[nn.Module], nn.Module] = lambda model: model,
    **options: Any,
) -> None:
    """Register a case; `finish` acts on the randomised float64 model (freezes, compiles, ...)."""
    seed = 100 + len(ZOO)

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return finish(_randomise(make().double()).eval())

    ZOO[name] = Case(name, build, inputs, outputs, classification, notes, **options)


def _mlp(*widths: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Make an MLP with the given layer widths and no activation after the last layer."""
    layers: list[nn.Module] = []
    for d_in, d_out in pairwise(widths):
        layers += [nn.Linear(d_in, d_out), activation()]
    return nn.Sequential(*layers[:-1])


def _freeze_all(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def _freeze_trunk(model: nn.Sequential) -> nn.Module:
    model.requires_grad_(False)
    model[-1].requires_grad_(True)
    return model


# --- fully connected -------------------------------------------------------------------------------------------------
_add("mlp", lambda: _mlp(4, 6, 5, 3), _real(4), 3, True, "plain tanh MLP")
_add("mlp_scalar", lambda: _mlp(3, 6, 1), _real(3), 1, False, "one output")
_add("squeezed", zm.Squeezed, _real(3), 1, False, "returns (B,) in place of (B, 1)", squeezed=True)
_add(
    "mlp_relu_inplace", lambda: _mlp(4, 7, 6, 3, activation=lambda: nn.ReLU(inplace=True)), _real(4), 3, True,
    "in-place ReLU right after Linear overwrites the layer's output",
)  # fmt: skip
_add(
    "deep_linear", lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 2)), _real(4), 2, False,
    "no activations: KFAC is the GGN block for Gaussian noise",
)  # fmt: skip
_add("swapped_order", zm.SwappedOrder, _real(4), 3, True, "layers defined in the opposite order of their use")
_add(
    "prelu", lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 4), nn.PReLU(), nn.Linear(4, 2)),
    _real(4), 2, False, "learned activations, one slope a channel and one for all",
)  # fmt: skip
_add("bilinear", zm.TwoInputs, lambda b, s: (_real(3)(b, s), _real(4)(b, s + 1_000)), 2, False, "inputs are a tuple")


# --- convolutions ----------------------------------------------------------------------------------------------------
def _cnn() -> nn.Module:
    trunk = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*trunk, nn.Flatten(), nn.Linear(36, 3))


def _grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2, stride=2, padding=1, padding_mode="zeros"),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, groups=8, padding=2, dilation=2),
        nn.GELU(),
        nn.Conv2d(8, 4, (3, 1), padding="same", bias=False),
        nn.Tanh(),
        zm.SpatialMean(),
        nn.Linear(4, 3),
    )


def _conv1d() -> nn.Module:
    convolutions = [nn.Conv1d(3, 5, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(5, 4, 2, bias=False), nn.Tanh()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(12, 2))


def _circular() -> nn.Module:
    convolution = nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="circular")
    return nn.Sequential(convolution, nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Tanh(), zm.SpatialMean(), nn.Linear(3, 3))


def _transposed() -> nn.Module:
    wide = nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1)
    grouped = nn.ConvTranspose2d(4, 6, (2, 3), groups=2, dilation=(1, 2), padding=(2, 0), bias=False)
    return nn.Sequential(wide, nn.Tanh(), grouped, nn.Tanh(), zm.SpatialMean(), nn.Linear(6, 2))


def _norms() -> nn.Module:
    trunk = [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.RMSNorm(16)]
    return nn.Sequential(*trunk, nn.Linear(16, 6), zm.HandRMSNorm(6), nn.Tanh(), nn.Linear(6, 3))


_add("cnn_bn_inplace", _cnn, _real(1, 6, 6), 3, True, "convolution, batch norm in eval mode, in-place ReLU, max pool")
_add(
    "grouped_strided_conv", _grouped, _real(4, 7, 6), 3, True,
    "groups and stride; depthwise and dilation; padding='same' without bias",
)  # fmt: skip
_add("conv1d", _conv1d, _real(3, 8), 2, False, "one-dimensional convolutions, one without bias")
_add("circular_conv", _circular, _real(2, 4, 5), 3, True, "padding_mode='circular' with unequal padding")
_add("transposed_conv", _transposed, _real(2, 3, 3), 2, False, "ConvTranspose2d with stride, and with groups")
_add("residual_block", zm.ResidualBlock, _real(3, 4, 4), 3, True, "in-place `h += x` and a head scaled in place")
_add("groupnorm_rms", _norms, _real(2, 4, 4), 3, True, "GroupNorm, nn.RMSNorm and a hand-written RMSNorm")


# --- sequences -------------------------------------------------------------------------------------------------------
def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, num_labels=3, initializer_range=0.4,
    )  # fmt: skip
    return ViTForImageClassification(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2, n_inner=16, num_labels=3, initializer_range=0.4,
        pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return GPT2ForSequenceClassification(config)


def _gpt2_inputs(batch_size: int, seed: int) -> dict[str, Tensor]:
    tokens = _tokens(1, 17, 6)(batch_size, seed)  # never the padding token 0
    mask = torch.ones_like(tokens)
    mask[1::2, -2:] = 0  # every other text is shorter
    return {"input_ids": tokens * mask, "attention_mask": mask}


_add("attention", zm.PreNormAttention, _real(4, 6), 3, True, "pre-norm attention block written by hand")
_add("mha", lambda: zm.SelfAttention(batch_first=True), _real(4, 6), 3, True, "out-projection used without its module")
_add("mha_seq_first", lambda: zm.SelfAttention(batch_first=False), _real(4, 6), 3, True, "batch in dimension 1 within")
_add("encoder_layer", zm.EncoderLayer, _real(4, 8), 3, True, "fused fast path when no gradient is wanted")
_add("vit", _vit, lambda b, s: {"pixel_values": _real(1, 8, 8)(b, s)}, 3, True, "Hugging Face: dict in, .logits out")
_add("gpt2", _gpt2, _gpt2_inputs, 3, True, "Hugging Face, Conv1D with transposed weights, causal and padding masks")
_add("tied", zm.TiedTokens, _tokens(0, 7, 4), 7, True, "embedding and head share one weight")
_add(
    "embedding_bag_of_tokens", zm.TokenSum, lambda b, s: _tokens(0, 9, 7)(b, s).clamp(max=5), 3, True,
    "tokens repeat within a sample; row 0 is padding: backward gives it no gradient, forward mode would",
)  # fmt: skip
_add("lstm", zm.Recurrent, _real(4, 3), 2, False, "fused recurrent layer")

# --- parameters ------------------------------------------------------------------------------------------------------
_add("shared_module", zm.SharedModule, _real(5), 3, True, "one Linear called twice")
_add("functional_reuse", zm.FunctionalReuse, _real(5), 3, True, "one weight used by module, by F.linear and transposed")
_add("custom_parameter", zm.CustomParameter, _real(4), 3, True, "bare scale and shift, weights used by einsum")
_add("frozen_trunk", lambda: _mlp(4, 6, 3), _real(4), 3, True, "only the last layer wants gradients", _freeze_trunk)
_add("all_frozen", lambda: _mlp(4, 5, 2), _real(4), 2, False, "no parameter wants gradients", _freeze_all)
_add(
    "weight_norm", lambda: _mlp(4, 5, 3), _real(4), 3, True,
    "a parametrised weight: its parameters are magnitude and direction",
    lambda model: nn.Sequential(nn.utils.parametrizations.weight_norm(model[0]), *model[1:]).eval(),
)  # fmt: skip
_add(
    "compiled", lambda: _mlp(4, 6, 3), _real(4), 3, True, "torch.compile's OptimizedModule around the network",
    lambda model: torch.compile(model, backend="eager"),
)  # fmt: skip
_add("patch_embedding", zm.PatchEmbedding, _real(2, 4, 4), 3, True, "batch norm before a transpose to tokens")
