"""Streamlined prediction: the Gaussian over the weights, pushed through the network layer by layer in one pass.

The way itself is here: its options, its checks, and the chunks of a batch; begin reading there. `graph.py` reads the
network, `schedule.py` says which calls carry moments, `program.py` runs them (`full.py` in full mode), and
`operations.py` is the table that both ask: `rules/` fills it, one entry for each operation. The folder imports
`covariance` and what is below it, and of the folder above `way.py` and `uncertain.py`; only `deployment` reads its
insides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...covariance import Covariance, Latent
from ...covariance.latent_at_positions import LatentAtPositions
from ...covariance.terms import concatenate
from ...data import batches
from ...errors import LapwingError
from ...linalg import is_finite
from ...network.eager import without_compiled
from ...network.entry import outside_modes
from ...network.refusals import check_layers
from ...network.tracing import wants_gradient
from ...tangent import Tangent
from ..uncertain import leaves_of, separate
from ..way import Way

if TYPE_CHECKING:
    from .full import FullProgram
    from .operations import Kind, Operation, broadcast, independent, register_operation
    from .program import Program


@dataclass(frozen=True)
class Streamlined(Way):
    """Pushes the moments of `N(θ̂, Σ)` through the network, call by call, without Jacobians or weight draws.

        E[h] = W m + b        Cov[h] = W Cov[a] Wᵀ + Σ_ii' E[a aᵀ]_ii' Cov[W_ji, W_j'i']        at layers with weights
        E[g(h)] = g(m)        Cov[g(h)] = J_g Cov[h] J_gᵀ                                       at everything else

    The network's own forward is read as a graph by `torch.export`: any module, `forward=`, Hugging Face models. Its
    means are the network's outputs. Layers are taken as independent of each other, whatever the posterior says; within
    a layer its covariance counts in full. What several calls make of one tensor (an activation or a norm written by
    hand) is linearised as one function, norms with their statistics. With the last layer alone treated the result is
    that of `Linearized()`. Uncertain inputs (`lw.Uncertain`) are carried too; in "diagonal" mode what hidden units
    share of their noise is lost, in deep networks most of it.

    In "diagonal" mode the entries of a sample's tensors are independent of each other: channels, copies of an entry,
    the two sides of a sum. Positions of one channel (pixels, tokens), which share a layer's weights, are not, with one
    correlation ρ a channel: `Cov[h_t, h_t'] = ρ √(v_t v_t')`, set at each layer so that the mean of its outputs over
    positions has the right variance, `Σ_ii' ā_i ā_i' Cov[W_ji, W_ji']` from its weights, with ā the mean of its inputs.
    That is exact for a layer that is averaged over its positions. What is left of the difference to `Linearized()` are
    the covariances between channels, which make variances of deep convolutional networks too small, more so the more
    certain the weights are; a scale factor tuned on held-out data makes up for the level. "full" mode keeps all
    covariances: it equals `Linearized()` for a block-diagonal Σ, plus what the weights' products with uncertain
    inputs add in each layer; in grouped convolutions and at tensors that are multiplied with each other those
    products are left out.

    Attributes:
        covariance: what is kept of hidden tensors: "diagonal", their variances, or "full", their covariances within a
            sample. Outputs have covariances (B, C, C) in either case where a linear layer gives them; else "diagonal"
            has their variances alone, as it has at positions.
        residual: the two sides of a sum that share an input: "independent", as in the paper, or, in full mode only,
            "correlated", which adds `2 Cov[x, h]`. None: correlated in full mode, independent in diagonal mode.
        attention: "values", as in the paper: values are uncertain, scores are not. "features": as "values", with the
            covariances between a head's features that share inputs, up to the layer after the attention (equation 74);
            costs as many times a linear layer as there are heads. It is for `scaled_dot_product_attention` and layers
            with tokens in one dimension; other calls, attention written by hand among them, are as with "values" (a
            network with only such calls is logged). "scores": queries and keys are uncertain too, to first order.
        activations: "linear", or the exact moments of element-wise functions of Gaussians, "moments": closed for ReLU,
            by quadrature with twenty evaluations for others; means then differ from the network's outputs.
        positions: positions of a channel: "correlated", or "independent", as in the paper. Independent ones make too
            little of the weights wherever many are averaged. In full mode it does not matter. Where a network merges
            its samples between other dimensions, they are independent; so they are after embeddings, softmaxes, maxima
            over a dimension, and sums of products of two uncertain tensors, and for a layer that has them flattened
            into its inputs.

    Cost: no pass but the forward one, after about a second that a network's first batch takes. "diagonal", in products
    of the size of the layer's own: one before the first treated layer, two after it, three at a layer with a diagonal
    posterior; with a Kronecker-factored one two and a rotation of its inputs, O(I² + I O) a position; attention one
    more; correlated positions a few element-wise passes of inputs and outputs, and one position more; memory a few
    times a forward pass. "full": as many forward-mode passes of each call as its tensors have numbers n a sample, and
    memory O(B n²) for all pairs of live tensors: for small networks. Batches are cut into chunks that fit the memory
    budget.

    Source: Li et al., Streamlining Prediction in Bayesian Deep Learning, equations 2 to 7, 49, 71 and 83 to 88, with
    layer norms linearised instead of taken as linear, correlated positions (equations 78 to 88 keep covariances of
    pixels), and Kronecker-factored posteriors in their exact eigenbasis. "moments" is its comparison in table 3,
    "features" that of tables 14 to 16.

    Example:
        >>> import lapwing as lw
        >>> _ = torch.manual_seed(0)
        >>> nn = torch.nn
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
        >>> x = torch.randn(8, 1, 8, 8)
        >>> loader = [(x, torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))]
        >>> posterior = lw.fit(model, loader, lw.Diagonal(), prior_precision=10.0)
        >>> latent = posterior.latent(x, via=lw.Streamlined())
        >>> latent.variance.shape, bool((latent.mean == model(x)).all())
        (torch.Size([8, 3]), True)
    """

    covariance: Literal["diagonal", "full"] = "diagonal"
    residual: Literal["independent", "correlated"] | None = None
    attention: Literal["values", "scores", "features"] = "values"
    activations: Literal["linear", "moments"] = "linear"
    positions: Literal["independent", "correlated"] = "correlated"

    def __post_init__(self) -> None:
        """Checks that the options go together."""
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

    def latent(
        self, tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool = False
    ) -> Latent | LatentAtPositions:
        """Returns the latent Gaussian at one batch, differentiable in inputs that require gradients.

        Raises:
            LapwingError: joint=True; a call that is not covered, named with what to do; full covariances of one sample
                that do not fit the memory budget; NaN or infinite inputs or outputs.
        """
        if joint:
            raise LapwingError(
                "lw.Streamlined() has no covariances across inputs, so there is no joint=True via lw.Streamlined(). "
                "Pass via=lw.Linearized(), or joint=False."
            )
        values, spreads = separate(inputs)
        latent, positions = self.propagate(tangent, covariance, values, spreads), tangent.positions
        if positions is None:
            return latent
        sizes = positions.sizes(tangent.outputs_of(batches.take(values, slice(0, 1))).shape)
        return LatentAtPositions(latent, positions.places(batches.size(values), sizes))

    @outside_modes
    def propagate(
        self, tangent: Tangent, covariance: Covariance, inputs: Any, input_variances: Mapping[int, Tensor] | None = None
    ) -> Latent:
        """Returns the latent Gaussian where some inputs are uncertain too, `x ~ N(x, Σ_x)`; positions are rows of it.

        Args:
            tangent: the network.
            covariance: Σ.
            inputs: B samples.
            input_variances: place of a floating-point tensor among the leaves of the inputs -> its variances, in its
                shape; in full mode also its covariances (B, n, n).

        Raises:
            LapwingError: as for `latent`.
        """
        variances = dict(input_variances or {})
        self._check_batch(tangent, inputs, variances)
        inputs = batches.plain(inputs)
        # under the lock of without_compiled: other threads swap parameters
        with torch.set_grad_enabled(wants_gradient((inputs, variances))), without_compiled():
            places = tuple(sorted(variances))
            means, parts = [], []
            for rows, chunk in batches.chunks(inputs, self._chunk_length(tangent, covariance, inputs, places)):
                program = self.program(tangent, covariance, chunk, places)
                mean, term = program.run(chunk, {place: v[rows] for place, v in variances.items()})
                means.append(mean)
                parts.append([term])
        mean, (term,) = torch.cat(means), concatenate(parts)  # of (B, C)
        batches.check_outputs(mean, "these inputs")
        if not all(map(is_finite, term.rows)):
            raise LapwingError(
                f"The streamlined variances of {type(tangent.model).__name__} at {batches.describe(inputs)} are NaN or "
                "infinite: this posterior is so wide that they overflow between the layers. Take one with a larger "
                "prior precision, such as posterior.with_prior(100.0). Or predict with via=lw.Linearized()."
            )
        mean = mean.to(tangent.dtype).reshape(term.variance().shape)
        return Latent(mean, (term.to(mean),))

    def _check_batch(self, tangent: Tangent, inputs: Any, variances: Mapping[int, Tensor]) -> None:
        check_layers(tangent.model)
        if not tangent.check(inputs).samples:
            raise LapwingError(
                f"The inputs {batches.describe(inputs)} hold no samples. Pass one at least; a single sample as x[None]."
            )
        leaves = leaves_of(inputs) if variances else []
        if self.covariance != "full" and any(v.shape != leaves[place].shape for place, v in variances.items()):
            raise LapwingError(
                "lw.Streamlined() keeps the variances of hidden tensors alone, and has no room for lw.Uncertain(x, "
                "covariance=...). Pass variances, or via=lw.Streamlined('full')."
            )

    def _chunk_length(self, tangent: Tangent, covariance: Covariance, inputs: Any, places: tuple[int, ...]) -> int:
        """Returns how many samples fit the memory budget, one at least; full covariances of one must fit."""
        needed = self.program(tangent, covariance, inputs, places).bytes_per_sample
        if self.covariance == "full" and needed > tangent.memory:
            raise LapwingError(
                f"The full covariances of {type(tangent.model).__name__} at {batches.describe(inputs)} take about "
                f"{needed / 2**20:,.0f} MiB a sample, more than the budget of {tangent.memory / 2**20:,.0f} MiB. Full "
                "mode is for small networks: write via=lw.Streamlined(), or pass "
                f"memory={2 ** (needed - 1).bit_length()} to lw.fit if the machine has it."
            )
        return max(1, tangent.memory // needed)

    def program(
        self, tangent: Tangent, covariance: Covariance, inputs: Any, places: tuple[int, ...] = ()
    ) -> Program | FullProgram:
        """Returns the program for inputs like these, built once for each graph and posterior.

        Call it under the lock of `without_compiled`.

        Args:
            tangent: the network.
            covariance: Σ.
            inputs: B samples.
            places: those of uncertain inputs among the leaves.
        """
        from .graph import read  # imported when used: `import lapwing` stays light

        graph = read(tangent, inputs)
        programs = graph.programs.setdefault(covariance, {})
        if (self, places) not in programs:
            from .full import FullProgram
            from .program import build

            program = build(tangent, covariance, graph, self, inputs, places)
            full = self.covariance == "full"
            programs[self, places] = FullProgram(program, covariance, inputs) if full else program
        return programs[self, places]


def __getattr__(name: str) -> Any:
    """Returns what belongs to the table of operations, filled when it is first used: `import lapwing` stays light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import operations, rules  # noqa: F401

    return getattr(operations, name)


__all__ = ["Kind", "Operation", "Streamlined", "broadcast", "independent", "register_operation"]
