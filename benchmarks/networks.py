"""Coverage, exactness and cost of networks of torchvision, timm and transformers, small ones with random weights.

The table is in benchmarks/README.md. Needs `pip install torchvision timm transformers` beside lapwing; nothing is
downloaded. For every network:

- *covered*: the share of its weights that a layer family treats. The others are generic: exact, and slower.
- *error*: the largest difference between output covariances of `lw.Diagonal()` over all weights and those made of
  autograd's gradients, sample by sample, both in float64, relative to the largest entry.
- *fit* and *latent*: the CPU time of `lw.fit(model, loader, lw.Diagonal())` at a fixed prior precision, and of the
  output covariances of a batch, over that of plain forward passes of the same data: 128 samples in batches of 32, in
  float32, on one thread. The fastest of three runs each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from papers.common.measure import least
from papers.common.tables import grid

CLASSES = 5

Inputs = Callable[[int, torch.Generator], Any]
Network = tuple[str, Callable[[], nn.Module], Inputs]
"""The library that it is from, and how to make the network and a batch of inputs."""


def images(size: int, channels: int = 3) -> Inputs:
    return lambda samples, source: torch.randn(samples, channels, size, size, generator=source)


def pixels(size: int) -> Inputs:
    return lambda samples, source: {"pixel_values": images(size)(samples, source)}


def text(length: int = 12, words: int = 60) -> Inputs:
    """Tokens of texts of one length, none of them padding."""
    return lambda samples, source: {"input_ids": torch.randint(3, words, (samples, length), generator=source)}


def series(length: int = 20, channels: int = 16) -> Inputs:
    return lambda samples, source: torch.randn(samples, length, channels, generator=source)


def of_torchvision() -> dict[str, Network]:
    from torchvision import models

    def named(name: str) -> Callable[[], nn.Module]:
        return lambda: getattr(models, name)(num_classes=CLASSES)

    small = {name: named(name) for name in (
        "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5",
    )}  # fmt: skip
    made: dict[str, Callable[[], nn.Module]] = {
        "densenet": lambda: models.DenseNet(8, (2, 2, 2), 16, num_classes=CLASSES),
        "vision_transformer": lambda: models.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=CLASSES),
        "swin": lambda: models.SwinTransformer([4, 4], 24, [2, 2], [2, 2], [4, 4], num_classes=CLASSES),
        "convnext": lambda: models.ConvNeXt(
            [models.convnext.CNBlockConfig(16, 32, 2), models.convnext.CNBlockConfig(32, None, 2)], num_classes=CLASSES
        ),
    }
    return {f"tv_{name}": ("torchvision", build, images(64)) for name, build in (small | made).items()}


def of_timm() -> dict[str, Network]:
    import timm
    from timm.models import convmixer, mlp_mixer

    sized = {"img_size": 64, "patch_size": 16, "embed_dim": 32}
    options: dict[str, dict[str, Any]] = {
        "vit_tiny_patch16_224": {**sized, "depth": 2, "num_heads": 2},
        "deit3_small_patch16_224": {**sized, "depth": 2, "num_heads": 2},
        "cait_xxs24_224": {**sized, "depth": 2, "num_heads": 2},
        "xcit_nano_12_p16_224": {**sized, "depth": 2, "num_heads": 2},
        "ghostnet_050": {},
        "edgenext_xx_small": {},
    }

    def made(name: str) -> Callable[[], nn.Module]:
        return lambda: timm.create_model(name, pretrained=False, num_classes=CLASSES, **options[name])

    def mixer(**more: Any) -> Callable[[], nn.Module]:
        return lambda: mlp_mixer.MlpMixer(CLASSES, num_blocks=2, **sized, **more)

    gated = {"block_layer": mlp_mixer.SpatialGatingBlock, "mlp_layer": mlp_mixer.GatedMlp, "mlp_ratio": 6}
    affine = {"block_layer": mlp_mixer.ResBlock, "norm_layer": mlp_mixer.Affine, "mlp_ratio": 4}
    networks = {name: made(name) for name in options} | {
        "mixer": mixer(), "gmlp": mixer(**gated), "resmlp": mixer(**affine),
        "convmixer": lambda: convmixer.ConvMixer(32, 2, num_classes=CLASSES),
    }  # fmt: skip
    return {f"timm_{name}": ("timm", build, images(64)) for name, build in networks.items()}


def of_transformers() -> dict[str, Network]:
    import transformers

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    common = {"vocab_size": 64, "max_position_embeddings": 32, "num_labels": CLASSES, "pad_token_id": 0}
    grouped = {"num_key_value_heads": 2, "head_dim": 8}
    gpt = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "num_labels": CLASSES}
    options: dict[str, dict[str, Any]] = {
        "Bert": size, "Roberta": size, "Electra": {**size, "embedding_size": 16}, "MPNet": size,
        "Albert": {**size, "embedding_size": 16},
        "DebertaV2": {**size, "relative_attention": True, "position_buckets": 8},
        "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
        "GPT2": {**gpt, "eos_token_id": 1, "bos_token_id": 1},
        "GPTNeoX": size, "OPT": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
                                 "word_embed_proj_dim": 32},
        "Llama": {**size, **grouped}, "Qwen2": {**size, "num_key_value_heads": 2}, "Gemma": {**size, **grouped},
        "T5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
               "eos_token_id": 1},
    }  # fmt: skip

    def made(name: str) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            config = getattr(transformers, f"{name}Config")(**(common | options[name]))
            return getattr(transformers, f"{name}ForSequenceClassification")(config)

        return build

    def with_end(samples: int, source: torch.Generator) -> dict[str, Tensor]:
        tokens = text()(samples, source)["input_ids"]
        tokens[:, -1] = 1  # the end of the text, which T5 reads its outputs at
        return {"input_ids": tokens}

    networks: dict[str, Network] = {
        f"hf_{name}": ("transformers", made(name), with_end if name == "T5" else text()) for name in options
    }
    picture = {"image_size": 32, "num_labels": CLASSES}
    networks["hf_ViT"] = "transformers", lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(patch_size=8, **size, **picture)
    ), pixels(32)  # fmt: skip
    networks["hf_ResNet"] = "transformers", lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=CLASSES)
    ), pixels(32)  # fmt: skip
    return networks


class Recurrent(nn.Module):
    """A recurrent layer of 64 units over (B, T, 16), and a head on its final output."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(16, 64, batch_first=True, **options)
        self.head = nn.Linear(64 * (1 + self.layer.bidirectional), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Siren(nn.Module):
    """Sines of products written by hand: `x @ W.T + b`."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        shapes = list(pairwise(widths))
        self.w = nn.ParameterList([torch.randn(after, before) / before**0.5 for before, after in shapes])
        self.b = nn.ParameterList([torch.randn(after) for _, after in shapes])

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.w[:-1], self.b[:-1], strict=True):
            x = torch.sin(x @ weight.T + bias)
        return x @ self.w[-1].T + self.b[-1]


def of_torch() -> dict[str, Network]:
    up = [nn.Linear(16, 64), nn.Unflatten(1, (4, 4, 4)), nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.PReLU()]
    decoder = lambda: nn.Sequential(*up, nn.Conv2d(8, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, CLASSES))  # noqa: E731
    return {
        "siren": ("torch", lambda: Siren(4, 64, 64, CLASSES), lambda n, source: torch.randn(n, 4, generator=source)),
        "lstm": ("torch", lambda: Recurrent(nn.LSTM), series()),
        "gru": ("torch", lambda: Recurrent(nn.GRU), series()),
        "bilstm2": ("torch", lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), series()),
        "decoder": ("torch", decoder, lambda samples, source: torch.randn(samples, 16, generator=source)),
    }


def networks() -> dict[str, Network]:
    """Returns all networks by name."""
    return of_torch() | of_torchvision() | of_timm() | of_transformers()


def gradients(model: nn.Module, x: Any, names: list[str]) -> Iterator[Tensor]:
    """Yields the gradients (C, P) of each sample's outputs, by autograd, the parameters in the order of the names.

    The sample stays in its batch: torch's backward pass of a batch norm can be wrong for one alone.
    """
    named = dict(model.named_parameters())
    weights = [named[name] for name in names]
    for out in model(**x).logits if isinstance(x, dict) else model(x):
        rows = [
            torch.autograd.grad(f, weights, retain_graph=True, allow_unused=True, materialize_grads=True) for f in out
        ]
        yield torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def error(model: nn.Module, inputs: Inputs) -> float:
    """Returns the largest relative difference of output covariances from those of autograd's rows."""
    source, double = torch.Generator().manual_seed(1), model.double()

    def data(samples: int) -> Any:
        x = inputs(samples, source)
        return x if isinstance(x, dict) and "input_ids" in x else (
            {key: value.double() for key, value in x.items()} if isinstance(x, dict) else x.double()
        )  # fmt: skip

    train, test = data(4), data(3)
    y = torch.zeros(4, CLASSES).double()
    batch = {**train, "labels": y} if isinstance(train, dict) else (train, y)
    posterior = lw.fit(double, [batch], lw.Diagonal(), likelihood=lw.Gaussian(1.0), prior_precision=1.0)
    covariance = posterior.latent(test).covariance
    names = [name for block in posterior.tangent.blocks for name in block.parameters]
    precision = 1 + sum(rows.square().sum(0) for rows in gradients(double, train, names))
    wanted = torch.stack([(rows / precision) @ rows.T for rows in gradients(double, test, names)])
    return float((covariance - wanted).abs().max() / wanted.abs().max())


def measured(name: str, network: Network) -> dict[str, Any]:
    """Returns the row of one network."""
    library, _, inputs = network
    torch.manual_seed(0)
    model = network[1]().eval()
    with torch.no_grad():  # norms see other weights than ones, so that a wrong one shows
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    row: dict[str, Any] = {"library": library, "weights": sum(p.numel() for p in model.parameters())}
    source = torch.Generator().manual_seed(0)
    batches = [inputs(32, source) for _ in range(4)]
    y = torch.arange(32) % CLASSES
    loader = [{**x, "labels": y} if isinstance(x, dict) else (x, y) for x in batches]
    lines = lw.coverage(model, batches[0]).lines
    total = sum(line.weights for line in lines)
    row["covered"] = sum(line.weights for line in lines if line.family != "generic") / total
    row["families"] = sorted({line.family for line in lines})

    def forward(data: list[Any]) -> None:
        with torch.no_grad():
            for x in data:
                model(**x) if isinstance(x, dict) else model(x)

    def fit() -> lw.Posterior:
        return lw.fit(model, loader, lw.Diagonal(), prior_precision=1.0)

    posterior = fit()
    plain = least(lambda: forward(batches), 6)[1] / len(batches)
    row |= {"forward_milliseconds": 1e3 * plain, "fit": least(fit, 4)[1] / plain / len(batches)}
    row["latent"] = least(lambda: posterior.latent(batches[0]).covariance, 4)[1] / plain
    return row | {"error": error(model, inputs)}


def parts() -> dict[str, Callable[[], Any]]:
    """Returns the networks."""

    def tried(name: str, network: Network) -> dict[str, Any]:
        try:
            return measured(name, network)
        except lw.LapwingError as refusal:
            return {"library": network[0], "refused": str(refusal)}

    return {name: partial(tried, name, network) for name, network in networks().items()}


def tables(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns a line for each network."""
    rows = {}
    for name, row in sorted(results.items(), key=lambda item: (item[1]["library"], item[0])):
        name = name.partition("_")[2] if row["library"] != "torch" else name
        rows[name] = [row["library"], "", row.get("refused", "")]
        if "error" in row:
            covered = "all" if row["covered"] == 1 else f"{100 * row['covered']:.1f} %"
            costs = (f"{row[key]:.0f}" if key in row else "" for key in ("fit", "latent"))  # some were not measured
            weights = f"{row['weights']:,}".replace(",", " ")
            rows[name] = [row["library"], weights, covered, f"{row['error']:.0e}", *costs]
    columns = ["from", "weights", "covered", "error", "fit", "latent"]
    return {"networks": grid(columns, rows, right=True, corner="network")}
