"""Mean-field variational inference: independent weights around a moved mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...covariance.low_rank_diagonal import LowRankPlusDiagonal
from ...data import batches
from ...data.batches import Forward
from ...data.data import Data
from ...errors import LapwingError
from ...likelihoods import Likelihood
from ...methods import FitResult, FitShape, Footprint, Method, Passes, Problem, SamplesSeen, Seen
from ...methods.passes import LikelihoodPass, with_size
from ...network.eager import parameters_of, uncompiled
from ...network.entry import outside_modes
from ...network.selection import select
from ...options import at_least, check_argument, option, positive
from ...posterior import MethodInfo, Posterior
from ...tangent import LastLayer, Predicate, everything
from ..constructed import constructed, copied, diagonal, put
from .fine_tuning import FineTuning


@dataclass(frozen=True)
class MeanField(Method):
    """Mean-field variational inference, `θ ~ N(m, diag σ²)`: by fine-tuning, from an IVON optimiser, or from variances.

    As a method of `lw.fit` it fine-tunes the trained weights, with Adam and a cosine schedule, on

        1/τ Σ_n -E_q[log p(y_n | f(x_n, θ))] + KL(q ‖ N(μ0, δ⁻¹ I))

    The mean moves, so the posterior is around a copy of the network, `posterior.model`: save its `state_dict()`
    together with the posterior. Your network is only read, and batch norm keeps its statistics. A prior precision that
    is None becomes the best one at every step, `δ = P / (‖m - μ0‖² + Σ σ²)`; so does a noise variance that is None.
    The result has no evidence, and its prior cannot be changed.

    `posterior.history` holds numbers for each step: `objective` (nats over all data, minus a lower bound of the
    evidence at τ = 1), `log_likelihood` (per sample), `divergence`, and `prior_precision` and `noise_variance` if they
    are learned.

    The default, a few hundred steps from a small σ, is early stopping. The optimum of the objective with τ = 1
    underfits networks with more weights than the data determine. For many steps lower `temperature` to about 0.05.

    Source: Deng et al. 2020, BayesAdapter (fine-tuning from the trained weights, "MFVI-BF" in ELLA's Tables 1 and 2);
    Blundell et al. 2015, equation 1 (the objective); Kingma et al. 2015, equation 6, and Wen et al. 2018, equation 4
    (the draws).

    Args:
        steps: number of batches; the loader starts again at its end.
        learning_rate: Adam's learning rate of the mean.
        std_rate: Adam's learning rate of log σ, which moves by at most about `std_rate * steps / 2`.
        initial_std: initial σ of every weight, in units of the weights.

    Raises:
        LapwingError: if an option is invalid, or if the objective becomes infinite or NaN in `lw.fit`.

    Cost: a step is a forward and a backward pass of the batch, with linear layers and convolutions run twice; memory
    O(P) for seven vectors. At the end one forward pass over the data of the steps.

    Example:
        >>> import torch, lapwing as lw
        >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> posterior = lw.fit(model, [(x, y)], lw.MeanField(steps=20))
        >>> posterior.predict(x, via=lw.MonteCarlo(20)).probs.shape
        torch.Size([64, 3])
    """

    can_change_prior: ClassVar[bool] = False
    steps: int = option(300, at_least(1))
    learning_rate: float = option(1e-4, positive())
    std_rate: float = option(1e-2, positive())
    initial_std: float = option(1e-2, positive())

    def passes(self, problem: Problem) -> Passes:
        problem, tangent = (yield from with_size(problem)), problem.tangent
        network = copied(tangent.model, "MeanField")
        tuning = FineTuning(problem, self.steps, self.learning_rate, self.std_rate, self.initial_std)
        state = yield tuning
        put(network, tuning.by_parameter(state.values["mean"]))
        moved = replace(tangent, call=replace(tangent.call, model=network))
        seen: Seen = yield SamplesSeen()
        summary = yield LikelihoodPass(problem, moved, seen.summary.samples)
        precision = problem.precision
        if not problem.prior.fixed:
            precision = torch.full_like(precision, float(tuning.weight_precision(state)))
        variances = tuning.by_parameter((2 * state.values["log_std"]).exp())
        noise = problem.likelihood.residual_variance(state.kept) if state.kept else None
        return FitResult(
            diagonal(moved, variances, precision), precision, noise, state.history, summary,
            seen.count / summary.samples, moved,
        )  # fmt: skip

    @staticmethod
    @outside_modes
    def from_optimizer(
        model: nn.Module,
        optimizer: Any,
        loader: Any,
        *,
        likelihood: str | Likelihood | None = None,
        scale: float = 1.0,
        params: Predicate | LastLayer = everything,
        forward: Forward | None = None,
        memory: int | None = None,
        progress: bool | None = None,
    ) -> Posterior:
        """Returns the posterior that an IVON optimiser has trained: `m = θ̂`, `σ² = 1 / (λ (h + γ))`.

        h, λ and γ are `hess`, `ess` and `weight_decay` of each parameter group. Any optimiser with these three entries
        works, such as `ivon.IVON` of the package ivon-opt. Parameters that it does not train are certain. Outside
        `optimizer.sampled_params()` the weights of the network are the mean. There is no prior and no evidence.
        `lw.Validation(held_out).tune(posterior)` chooses the logit temperature or the noise variance.

        Source: Shen et al. 2024, Variational Learning is Effective for Large Deep Networks, Algorithm 1; the mean-field
        posterior of Streamlined Prediction (section 4).

        Args:
            model: the trained network, in eval mode. It is used, not copied.
            optimizer: the optimiser that trained the network.
            loader: the training data, as in `lw.fit`.
            likelihood: "categorical", "gaussian" or an instance; None infers it from the dtype of the targets. A noise
                variance that is None becomes the mean squared residual.
            scale: factor of Σ.
            params: selection of the uncertain parameters of the optimiser. Not `lw.last_layer`.
            forward: `forward(model, inputs)`, if `model(x)`, `model(*x)` and `model(**x)` are all wrong.
            memory: budget in bytes for one chunk of samples; None as in `lw.fit`.
            progress: whether to show a bar; None shows one on a terminal.

        Raises:
            LapwingError: if the optimiser is not IVON, if it trained another network, or if the input is invalid.

        Cost: one forward pass over the data; memory O(P).

        Example:
            >>> import torch, lapwing as lw
            >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
            >>> model = torch.nn.Linear(4, 3).eval()
            >>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)  # stands for ivon.IVON(...)
            >>> optimiser.param_groups[0] |= {"hess": torch.full((15,), 0.1), "ess": 64.0}
            >>> posterior = lw.MeanField.from_optimizer(model, optimiser, [(x, y)])
            >>> posterior.predict(x, via=lw.Streamlined()).probs.shape
            torch.Size([64, 3])
        """
        if not isinstance(model, nn.Module) or isinstance(params, LastLayer):
            wrong = type(model).__name__ if not isinstance(model, nn.Module) else "params=lw.last_layer"
            raise LapwingError(
                "MeanField.from_optimizer needs the network that the optimiser trains, and params that select by name, "
                f"not {wrong}. Write lw.MeanField.from_optimizer(model, optimizer, loader, "
                "params=lw.matching('head.*'))."
            )
        parameters = parameters_of(uncompiled(model))
        variances = _ivon_variances(optimizer, parameters, type(model).__name__)
        names = select(params, {name: parameters[name] for name in variances}, type(model).__name__)
        chosen, kind = {name: variances[name] for name in names}, f"{type(optimizer).__name__}, "
        rest = likelihood, forward, memory, progress
        return _given(model, chosen, loader, scale, "MeanField.from_optimizer", kind, *rest)

    @staticmethod
    @outside_modes
    def from_variances(
        model: nn.Module,
        variances: Mapping[str, Tensor],
        loader: Any,
        *,
        likelihood: str | Likelihood | None = None,
        scale: float = 1.0,
        forward: Forward | None = None,
        memory: int | None = None,
        progress: bool | None = None,
    ) -> Posterior:
        """Returns the posterior `N(θ̂, diag σ²)` of given variances, without a prior or an evidence.

        `variances` maps names of parameters to σ² >= 0, in the shape of the parameter; other parameters are certain.
        The other arguments are as in `from_optimizer`, and so is `lw.Validation(held_out).tune(posterior)`.

        Raises:
            LapwingError: if names, shapes or values do not match the network, or if the input is invalid.

        Cost: one forward pass over the data; memory O(P).

        Example:
            >>> import torch, lapwing as lw
            >>> x, y = torch.randn(64, 4), torch.randn(64, 2)
            >>> model = torch.nn.Linear(4, 2).eval()
            >>> posterior = lw.MeanField.from_variances(model, {"weight": torch.full((2, 4), 0.01)}, [(x, y)])
            >>> posterior.predict(x).epistemic_variance.shape
            torch.Size([64, 2])
        """
        parameters = parameters_of(uncompiled(model)) if isinstance(model, nn.Module) else {}
        chosen = dict(variances) if isinstance(variances, Mapping) else {}
        wrong = [name for name, value in chosen.items() if not _fits(value, parameters.get(name))]
        if not chosen or wrong:
            unusable = f"{wrong[0]!r}: {batches.describe(chosen[wrong[0]])}" if wrong else batches.describe(variances)
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in list(parameters.items())[:4])
            raise LapwingError(
                f"MeanField.from_variances of {type(model).__name__} cannot use {unusable}. Pass finite variances, not "
                f"negative, by the name and in the shape of its parameters ({shapes}, ...): "
                f"lw.MeanField.from_variances(model, {{name: tensor}}, loader)."
            )
        rest = likelihood, forward, memory, progress
        return _given(model, chosen, loader, scale, "MeanField.from_variances", "", *rest)

    def footprint(self, shape: FitShape) -> Footprint:
        tangent, epochs = shape.tangent, self.steps * shape.batch / shape.samples
        kept = shape.stored(LowRankPlusDiagonal, {"rank": 0, "prior": True})
        vectors = 12 * tangent.size * tangent.dtype.itemsize
        peak = kept + vectors + shape.batch * 3 * shape.activations
        return Footprint(kept, peak, 6 * epochs + min(1.0, epochs))


def _given(
    model: nn.Module, variances: Mapping[str, Tensor], loader: Any, scale: float, name: str, options: str, *rest: Any
) -> Posterior:
    """Returns the posterior of given variances, times `scale`; `rest` are the last arguments of `constructed`."""
    check_argument(name, "scale", scale, positive(), "1.0")
    data = Data(loader, model)
    method = MethodInfo(name, f"{name}({options}scale={scale})", {"scale": scale})
    scaled = {key: scale * value for key, value in variances.items()}
    return constructed(model, scaled, lambda tangent: diagonal(tangent, scaled), data, method, *rest)


def _fits(variance: Any, parameter: Tensor | None) -> bool:
    if parameter is None or not isinstance(variance, Tensor) or variance.shape != parameter.shape:
        return False
    return parameter.is_floating_point() and bool((variance.isfinite() & (variance >= 0)).all())


def _ivon_variances(optimizer: Any, parameters: Mapping[str, Tensor], model: str) -> dict[str, Tensor]:
    """Returns `σ² = 1 / (λ (h + γ))` of every parameter of a network that an IVON optimiser trains, float64.

    Its parameter groups have `hess` h, one vector over the parameters in order, `ess` λ and `weight_decay` γ.
    """
    kind = type(optimizer).__name__
    groups = list(getattr(optimizer, "param_groups", ()))
    states = [(group.get("hess"), group.get("ess"), group.get("weight_decay")) for group in groups]
    if not states or not all(isinstance(hess, Tensor) and None not in (ess, decay) for hess, ess, decay in states):
        raise LapwingError(
            f"MeanField.from_optimizer needs an optimiser with IVON's state: the parameter groups of {kind} have no "
            "'hess', 'ess' and 'weight_decay'. Train with ivon.IVON(model.parameters(), lr=0.1, ess=len(dataset)), or "
            "fine-tune with lw.fit(model, loader, lw.MeanField())."
        )
    names = {id(value): name for name, value in parameters.items()}
    variances: dict[str, Tensor] = {}
    for number, (group, (hess, ess, decay)) in enumerate(zip(groups, states, strict=True)):
        trained = [value for value in group["params"] if value is not None]
        sizes = [value.numel() for value in trained]
        precision = ess * (hess.detach().flatten().double() + decay)
        positive = precision.isfinite() & (precision > 0)
        if len(precision) != sum(sizes) or not bool(positive.all()):
            raise LapwingError(
                f"The 'hess' of {kind} in parameter group {number} has {len(precision)} numbers for {sum(sizes)} "
                f"weights, and {int((~positive).sum())} of them give no positive finite precision. Check that training "
                "has not diverged, and pass the optimiser as it is after training."
            )
        for value, part in zip(trained, precision.split(sizes), strict=True):
            if id(value) in names:
                variances[names[id(value)]] = (1 / part).reshape(value.shape)
    if not variances:
        raise LapwingError(
            f"{kind} trains none of the {len(parameters)} parameters of {model}. Pass the model whose parameters() it "
            "was made with, not a copy."
        )
    return variances
