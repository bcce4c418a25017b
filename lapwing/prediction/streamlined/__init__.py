"""Streamlined prediction: the Gaussian over the weights, pushed through the network layer by layer in one pass."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ... import batches
from ...covariance import Covariance, Latent
from ...covariance.output import Dense
from ...errors import LapwingError
from ...tangent import Tangent
from ...tangent.eager import outside_inference, without_compiled
from ...tangent.probe import check_mode
from ...tangent.record import wants_gradient
from ..way import Way
from .graph import Graph, read
from .joint import Walk
from .program import Options, Program, build

_PROGRAMS: weakref.WeakKeyDictionary[Covariance, dict[Any, tuple[Graph, Program | Walk]]] = weakref.WeakKeyDictionary()

_LABELS = {
    "covariance": ("diagonal", "full"),
    "residual": ("independent", "correlated", None),
    "attention": ("values", "scores"),
    "activations": ("linear", "moments"),
}


@dataclass(frozen=True)
class Streamlined(Way):
    """Pushes the moments of `N(θ̂, Σ)` through the network, call by call, without Jacobians or weight draws.

        E[h] = W m + b        Cov[h] = W Cov[a] Wᵀ + Σ_ii' E[a aᵀ]_ii' Cov[W_ji, W_j'i']        at layers with weights
        E[g(h)] = g(m)        Cov[g(h)] = J_g Cov[h] J_gᵀ                                       at everything else

    The network's own forward is read as a graph by `torch.export`: any module, `forward=`, Hugging Face models. Its
    means are the network's outputs. Layers are taken as independent of each other, whatever the posterior says; within
    a layer its covariance counts in full. What several calls make of one tensor (an activation or a norm written by
    hand) is linearised as one function, norms with their statistics. With the last layer alone treated the result is
    that of `Linearized()`.

    In "diagonal" mode the entries of a sample's tensors are independent of each other: positions that share a layer's
    weights, copies of an entry, the two sides of a sum. Pooling many positions then makes too little of the weights'
    uncertainty. "full" mode keeps all of this: it equals `Linearized()` for a block-diagonal Σ, plus what the weights'
    products with uncertain inputs add in each layer; in grouped convolutions and at tensors that are multiplied with
    each other those products are left out.

    Attributes:
        covariance: what is kept of hidden tensors: "diagonal", their variances, or "full", their covariances within a
            sample. Outputs have covariances (B, C, C) in either case where a linear layer gives them; else "diagonal"
            has their variances alone.
        residual: the two sides of a sum that share an input: "independent", as in the paper, or "correlated", which
            adds `2 Cov[x, h]`. None: correlated in full mode, independent in diagonal mode, where correlations cost as
            many forward-mode passes of a branch as its input has numbers a sample.
        attention: what is uncertain: the "values" alone, as in the paper, or the "scores" as well, to first order.
        activations: "linear", or the exact moments of element-wise functions of Gaussians, "moments": closed for ReLU,
            by quadrature with twenty evaluations for others; means then differ from the network's outputs.

    Cost: no pass but the forward one, after about a second that a network's first batch takes. "diagonal", in products
    of the size of the layer's own: one before the first treated layer, two after it, three at a layer with a diagonal
    posterior; with a Kronecker-factored one two and a rotation of its inputs, O(I² + I O) a position; memory a few
    times a forward pass. "full": as many forward-mode passes of each call as its tensors have numbers n a sample, and
    memory O(B n²) for all pairs of live tensors: for small networks. Batches are cut into chunks that fit the memory
    budget.

    Source: Li et al., Streamlining Prediction in Bayesian Deep Learning, equations 2 to 7, 49, 71 and 83 to 88, with
    layer norms linearised instead of taken as linear, and Kronecker-factored posteriors in their exact eigenbasis where
    the paper approximates them by equation 10. "moments" is its comparison in table 3.

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
    attention: Literal["values", "scores"] = "values"
    activations: Literal["linear", "moments"] = "linear"

    def __post_init__(self) -> None:
        """Checks the labels."""
        for name, accepted in _LABELS.items():
            found = getattr(self, name)
            if found not in accepted:
                raise LapwingError(
                    f"Asked for Streamlined({name}={found!r}); accepted are {' and '.join(map(repr, accepted))}: write "
                    f"via=lw.Streamlined({name}={accepted[0]!r})."
                )
        if self.covariance == "full" and self.activations == "moments":
            raise LapwingError(
                "Asked for Streamlined(covariance='full', activations='moments'), found no covariances between matched "
                "activations; accepted is activations='linear' there: write via=lw.Streamlined(activations='moments')."
            )

    def latent(self, tangent: Tangent, covariance: Covariance, inputs: Any, joint: bool = False) -> Latent:
        """Returns the latent Gaussian at one batch, differentiable in inputs that require gradients.

        Raises:
            LapwingError: joint=True; a call without a rule, named with what is accepted; NaN or infinite inputs or
                outputs.
        """
        if joint:
            raise LapwingError(
                "Asked for joint=True via lw.Streamlined(), which carries each input's moments alone, without "
                "covariances across inputs; accepted is joint=False: write via=lw.Linearized() for joint=True."
            )
        return self.propagate(tangent, covariance, inputs)

    @outside_inference
    def propagate(
        self, tangent: Tangent, covariance: Covariance, inputs: Any, input_variances: Mapping[int, Tensor] | None = None
    ) -> Latent:
        """Returns the latent Gaussian where some inputs are uncertain too, `x ~ N(x, diag v)`.

        Args:
            tangent: the network.
            covariance: Σ.
            inputs: B samples.
            input_variances: place of a floating-point tensor among the leaves of the inputs -> its variances, in its
                own shape.

        Raises:
            LapwingError: as for `latent`.
        """
        check_mode(tangent.model)
        batches.check_inputs(inputs, next(iter(tangent.parameters.values())), "the inputs")
        if not batches.size(inputs):
            raise LapwingError(
                f"Asked for streamlined prediction at {batches.describe(inputs)}, found no samples; one at least is "
                "needed: give a single sample as x[None]."
            )
        inputs, given = batches.plain(inputs), dict(input_variances or {})
        # under the lock of without_compiled: other threads swap parameters
        with torch.set_grad_enabled(wants_gradient((inputs, given))), without_compiled():
            places = tuple(sorted(given))
            length = max(1, tangent.memory // self._engine(tangent, covariance, inputs, places).bytes_per_sample)
            parts = []
            for rows, chunk in batches.chunks(inputs, length):
                engine = self._engine(tangent, covariance, chunk, places)
                parts.append(engine.run(chunk, {place: variance[rows] for place, variance in given.items()}))
        mean = torch.cat([part.mean for part in parts])
        batches.check_outputs(mean, "these inputs")
        matrix = torch.cat([part.covariance for part in parts])  # (B, C, C)
        return Latent(mean.to(tangent.dtype), (Dense(matrix.to(tangent.dtype)),))

    def _engine(
        self, tangent: Tangent, covariance: Covariance, inputs: Any, uncertain: tuple[int, ...] = ()
    ) -> Program | Walk:
        """Returns the program for inputs like these, built once for each graph and posterior."""
        graph, full = read(tangent, inputs), self.covariance == "full"
        correlated = full if self.residual is None else self.residual == "correlated"
        options = Options(full, correlated, self.attention, self.activations, uncertain)
        known = _PROGRAMS.setdefault(covariance, {})
        key = id(graph), self, uncertain
        if key not in known:
            program = build(tangent, covariance, graph, options, inputs)
            known[key] = graph, Walk.of(program, covariance, inputs) if options.full else program
        return known[key][1]


__all__ = ["Streamlined"]
