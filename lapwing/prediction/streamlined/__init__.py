"""Streamlined prediction: propagates the Gaussian over the weights through the network, layer by layer in one pass.

Begin reading here: this file has the options, their checks, and the chunks of a batch. `graph.py` reads the network,
`schedule.py` chooses the calls that carry moments, and `program.py` runs them (`full.py` in full mode). `operations.py`
is the table of operations, which `rules/` fills. The folder imports `covariance`, the rooms below it, `way.py` and
`uncertain.py`. Only `deployment` imports its files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...covariance import Covariance, Latent
from ...covariance.latent_at_positions import LatentAtPositions
from ...covariance.terms import concatenate
from ...data.batches import check_outputs
from ...data.inputs import Inputs
from ...errors import LapwingError
from ...linalg import is_finite
from ...network.call import finite
from ...network.eager import without_compiled
from ...network.entry import outside_modes
from ...network.gate import check_layers
from ...options import Rule, option
from ...tangent import MemoryNeed, Tangent
from ..way import Way

if TYPE_CHECKING:
    from .full import FullProgram
    from .moments import FeatureCorrelation
    from .operations import Kind, Operation, broadcast, independent, register_operation
    from .program import Program


def _is_correlation(value: Any) -> bool:
    from .moments import FeatureCorrelation

    return isinstance(value, FeatureCorrelation)


@dataclass(frozen=True)
class Streamlined(Way):
    """Pushes the moments of `N(θ̂, Σ)` through the network, call by call, without Jacobians or weight draws.

        E[h] = W m + b        Cov[h] = W Cov[a] Wᵀ + Σ_ii' E[a aᵀ]_ii' Cov[W_ji, W_j'i']        at layers with weights
        E[g(h)] = g(m)        Cov[g(h)] = J_g Cov[h] J_gᵀ                                       at everything else

    `torch.export` reads the network's forward as a graph, so any module, `forward=` and Hugging Face models work. Means
    are the network's outputs, up to rounding. Layers count as independent of each other, and within a layer the
    covariance of its weights counts in full. Several calls that form one function of a tensor (an activation or a norm
    written by hand) are linearised as one function, norms with their statistics. If only the last layer is treated, the
    result equals `Linearized()`. Uncertain inputs (`lw.Uncertain`) are propagated too. "diagonal" mode loses the
    correlation of their noise between hidden units, in deep networks most of their variance.

    In "diagonal" mode the entries of a sample's tensors are independent: channels, copies of an entry, the two sides of
    a sum. Only positions of one channel (pixels, tokens), which share a layer's weights, are correlated, with one ρ for
    each channel: `Cov[h_t, h_t'] = ρ √(v_t v_t')`. Each layer sets ρ such that the mean of its outputs over positions
    has the right variance. Without covariances between channels the variances of deep convolutional networks are too
    small, especially for narrow posteriors; `lw.scale_factor` corrects the level.

    "full" mode keeps all covariances. It equals `Linearized()` for a block-diagonal Σ, plus the products of uncertain
    weights and uncertain inputs in each layer. Grouped convolutions, and products of two tensors, omit these products.

    Attributes:
        covariance: moments of hidden tensors: "diagonal" keeps their variances, "full" their covariances within a
            sample. Outputs of a linear layer have covariances (B, C, C) in both modes. Other outputs, and outputs with
            positions, have only variances in "diagonal" mode.
        residual: the two sides of a sum that share an input: "independent", as in the paper, or, in full mode only,
            "correlated", which adds `2 Cov[x, h]`. None: correlated in full mode, independent in diagonal mode.
        attention: "values", as in the paper: values are uncertain, scores are not. "scores": queries and keys are
            uncertain too, to first order. "features": as "values", with the covariances between the features of a head
            that share inputs, up to the layer after the attention (equation 74), for `scaled_dot_product_attention` and
            layers with tokens in one dimension. It costs a linear layer per head. Other calls work as with "values".
        activations: "linear", or "moments" for the exact moments of element-wise functions of Gaussians: in closed form
            for ReLU, by quadrature with twenty evaluations for other functions. Means then differ from the network's
            outputs.
        positions: positions of a channel: "correlated", or "independent", as in the paper, which makes the variance of
            averages over many positions too small. Full mode ignores it. Positions are always independent after
            embeddings, softmaxes, maxima over a dimension and sums of products of two uncertain tensors, for a layer
            that has them flattened into its inputs, and in networks that merge samples between other dimensions.
        features: correlation of the inputs of a last linear layer, in "diagonal" mode. Leave it None, for independent
            inputs; `lw.scale_factor(posterior, x, lw.Streamlined(), to=lw.Linearized())` sets it. It belongs to this
            posterior, also after saving and loading; another one refuses it.

    Cost: one forward pass with moments, after about a second for the first batch of a network. "diagonal", in products
    of the size of the layer's own: one before the first treated layer, two after it, three at a layer with a diagonal
    posterior; with a Kronecker-factored posterior two and a rotation of the inputs, O(I² + I O) per position; attention
    one more. Memory is a few times a forward pass. "full", for small networks: n forward-mode passes of each
    call, where n is the number of entries of its tensors per sample, and memory O(B n²) for all pairs of live tensors.

    Source: Li et al., Streamlining Prediction in Bayesian Deep Learning, equations 2 to 7, 49, 71 and 83 to 88.
    Differences: layer norms are linearised instead of treated as linear, positions are correlated (equations 78 to 88
    keep covariances of pixels), and Kronecker-factored posteriors use their exact eigenbasis. "moments" is compared in
    its table 3, "features" in its tables 14 to 16.

    Example:
        >>> import lapwing as lw
        >>> _ = torch.manual_seed(0)
        >>> nn = torch.nn
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
        >>> x = torch.randn(8, 1, 8, 8)
        >>> loader = [(x, torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))]
        >>> posterior = lw.fit(model, loader, lw.Diagonal(), prior_precision=10.0)
        >>> latent = posterior.latent(x, via=lw.Streamlined())
        >>> latent.variance.shape, torch.allclose(latent.mean, model(x), atol=1e-6)
        (torch.Size([8, 3]), True)
    """

    covariance: Literal["diagonal", "full"] = "diagonal"
    residual: Literal["independent", "correlated"] | None = None
    attention: Literal["values", "scores", "features"] = "values"
    activations: Literal["linear", "moments"] = "linear"
    positions: Literal["independent", "correlated"] = "correlated"
    features: FeatureCorrelation | None = option(None, Rule(_is_correlation, "made by lw.scale_factor(..., to=)"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.covariance == "full" and self.activations == "moments":
            raise LapwingError(
                "Full mode has no covariances between matched activations. Write lw.Streamlined('full') or "
                "lw.Streamlined(activations='moments')."
            )
        if self.covariance == "diagonal" and self.residual == "correlated":
            raise LapwingError(
                "Diagonal mode has no covariance of the two sides of a sum. Write lw.Streamlined('full'), whose sides "
                "are correlated, or leave residual out."
            )

    @outside_modes
    def latent(
        self, tangent: Tangent, covariance: Covariance, inputs: Inputs, joint: bool = False
    ) -> Latent | LatentAtPositions:
        """Returns the latent Gaussian at one batch, differentiable in inputs that require gradients."""
        if joint:
            raise LapwingError(
                "lw.Streamlined() has no covariances across inputs, so there is no joint=True via lw.Streamlined(). "
                "Pass via=lw.Linearized(), or joint=False."
            )
        check_layers(tangent.model)
        tangent.check(inputs.certain)
        leaves = inputs.leaves
        if self.covariance != "full" and any(v.shape != leaves[i].shape for i, v in inputs.spreads.items()):
            raise LapwingError(
                "lw.Streamlined() keeps only the variances of hidden tensors, so it cannot use lw.Uncertain(x, "
                "covariance=...). Pass variances, or via=lw.Streamlined('full')."
            )
        # the lock of without_compiled keeps other threads from swapping parameters
        with torch.set_grad_enabled(inputs.wants_gradient), without_compiled():
            means, parts = [], []
            for _, chunk in inputs.chunks(self._chunk_length(tangent, covariance, inputs)):
                mean, term = self.program(tangent, covariance, chunk).run(chunk)
                means.append(mean)
                parts.append([term])
        mean, (term,) = torch.cat(means), concatenate(parts)  # of (B, C)
        mean = finite(mean.reshape(term.variance().shape), tangent.call.activation, tangent.call.looks)
        check_outputs(mean, "these inputs")
        if not all(map(is_finite, term.rows)):
            raise LapwingError(
                f"The streamlined variances of {type(tangent.model).__name__} at {inputs} are NaN or "
                "infinite: this posterior is so wide that they overflow between the layers. Use a larger prior "
                "precision, such as posterior.with_prior(100.0). Or predict with via=lw.Linearized()."
            )
        mean = mean.to(tangent.dtype)
        latent = Latent(mean, (term.to(mean),))
        if tangent.call.activation == "softmax":
            latent = latent.without_impossible()
        positions = tangent.places_of(inputs)
        return LatentAtPositions(latent, positions) if positions.sizes else latent

    @outside_modes
    def fitted(self, tangent: Tangent, covariance: Covariance, inputs: Inputs) -> Streamlined:
        """Returns the way with the correlation of the features before the last layer, from draws at these inputs."""
        from .features import correlation_of

        if self.covariance == "full" or tangent.positions.several:
            return self
        with torch.no_grad():
            with without_compiled():
                program: Any = replace(self, features=None).program(tangent, covariance, inputs)
            return replace(self, features=correlation_of(tangent, covariance, program, inputs))

    def _chunk_length(self, tangent: Tangent, covariance: Covariance, inputs: Inputs) -> int:
        """Returns the number of samples that fit the memory budget, at least one. Full covariances of one must fit."""
        needed = self.program(tangent, covariance, inputs).bytes_per_sample
        if self.covariance == "full":
            tangent.require(MemoryNeed(str(self), needed, f"one sample of {inputs}", "write via=lw.Streamlined()"))
        return max(1, tangent.memory // needed)

    def program(self, tangent: Tangent, covariance: Covariance, inputs: Inputs) -> Program | FullProgram:
        """Returns the program for such inputs, built once for each graph, posterior, and choice of uncertain leaves.

        Call it under the lock of `without_compiled`.
        """
        from .graph import read  # imported when used: `import lapwing` stays fast

        graph, places = read(tangent, inputs), tuple(sorted(inputs.spreads))
        programs = graph.programs.setdefault(covariance, {})
        if (self, places) not in programs:
            from .full import FullProgram
            from .program import build

            program = build(tangent, covariance, graph, self, inputs)
            full = self.covariance == "full"
            programs[self, places] = FullProgram(program, covariance) if full else program
        return programs[self, places]


def __getattr__(name: str) -> Any:
    """Returns a name of the table of operations, which is filled at the first use: `import lapwing` stays fast."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import operations, rules  # noqa: F401

    return getattr(operations, name)


__all__ = ["Kind", "Operation", "Streamlined", "broadcast", "independent", "register_operation"]
