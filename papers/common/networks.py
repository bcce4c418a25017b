"""Networks: MLPs, and an MNIST network and a CIFAR-10 ResNet-20 with the checkpoints of the data folder."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from papers.common.data import file
from papers.common.device import DEVICE
from papers.common.training import Network


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Returns an MLP of the given widths, inputs and outputs included; it flattens its inputs."""
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


class MnistCNN(nn.Module):
    """ELLA's network for 28 x 28 grey images: two 5 x 5 convolutions with batch norm, then one linear layer.

    Inputs (B, 1, 28, 28) in [0, 1], outputs (B, 10); 29 034 weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = _convolution(1, 16)
        self.layer2 = _convolution(16, 32)
        self.fc = nn.Linear(32 * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, 10)."""
        return self.fc(self.layer2(self.layer1(x)).flatten(1))


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=5, padding=2)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with batch norm and a shortcut without weights (He et al. 2016, section 4.2, option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, outputs, H / stride, W / stride)."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        if self.padding:  # every second pixel, and zero channels on either side
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(h + x)


class ResNet20(nn.Module):
    """The CIFAR-10 ResNet-20 with option A shortcuts: three stages of three blocks with 16, 32 and 64 channels.

    Inputs (B, 3, 32, 32), normalised as `images("cifar10")` gives them; outputs (B, 10); 269 722 weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = stage(16, 16, 1)
        self.layer2 = stage(16, 32, 2)
        self.layer3 = stage(32, 64, 2)
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (B, 10)."""
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.layer3(self.layer2(self.layer1(h)))
        return self.linear(h.mean((2, 3)))


def stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Returns three blocks in a row, the first with the stride."""
    rest = (BasicBlock(outputs, outputs, 1) for _ in range(2))
    return nn.Sequential(BasicBlock(inputs, outputs, stride), *rest)


PADDING, UNKNOWN = 0, 1
"""Tokens of texts."""


class Logits(nn.Module):
    """A network of transformers that returns a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, C)."""
        return self.model(x).logits


def vit(
    size: int = 28, patch: int = 7, width: int = 64, layers: int = 4, classes: int = 10, channels: int = 1
) -> nn.Module:
    """Returns a Hugging Face ViT with random weights.

    Args:
        size: of the images, in pixels a side.
        patch: likewise, of a patch.
        width: of the tokens.
        layers: blocks of attention and an MLP of twice the width.
        classes: outputs.
        channels: of the images.
    """
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=size, patch_size=patch, num_channels=channels, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=4, intermediate_size=2 * width,
    )  # fmt: skip
    config.num_labels = classes
    return ViTForImageClassification(config)


def gpt2(words: int, length: int, width: int = 96, layers: int = 4, classes: int = 2) -> nn.Module:
    """Returns a Hugging Face GPT-2 that classifies by the last token that is not padding, with random weights.

    Args:
        words: of the vocabulary.
        length: most tokens of a text.
        width: of the tokens.
        layers: blocks of attention and an MLP of four times the width.
        classes: outputs.
    """
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=words, n_positions=length, n_embd=width, n_layer=layers, n_head=4,
        pad_token_id=PADDING, bos_token_id=UNKNOWN, eos_token_id=UNKNOWN,
    )  # fmt: skip
    config.num_labels = classes
    return GPT2ForSequenceClassification(config)


def logits_vit() -> nn.Module:
    """Returns a ViT of four blocks of width 128 on 64 patches of 4 x 4 pixels, in eval mode; it returns a tensor."""
    return Logits(vit(32, 4, 128, channels=3)).eval()


def mnist_cnn() -> MnistCNN:
    """Returns ELLA's MNIST network with its published weights, in eval mode: 99.01 % of the test images.

    Raises:
        LapwingError: if there is no such file.
    """
    return _with_weights(MnistCNN(), file("mnist_cnn_ella.safetensors"))


def cifar_resnet20() -> ResNet20:
    """Returns the trained CIFAR-10 ResNet-20, in eval mode: 91.73 % of the test images.

    It has seen all 50 000 training images, so none of them can validate anything: tune on some test images and report
    on the others.

    Raises:
        LapwingError: if there is no such file.
    """
    return _with_weights(ResNet20(), file("cifar10_resnet20_optionA.safetensors"))


def _with_weights(model: Network, path: Path) -> Network:
    """Loads a checkpoint; `num_batches_tracked`, which only training reads, may be missing from it."""
    weights = load_file(path)
    counters = {name: value for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")}
    try:
        model.load_state_dict({**counters, **weights})
    except RuntimeError as error:
        raise lw.LapwingError(
            f"{path} does not hold the weights of {type(model).__name__} ({error}). Put its checkpoint there."
        ) from error
    return model.eval().to(DEVICE)
