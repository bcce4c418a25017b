"""The life of a posterior: fits by both kinds of passes, files, seeds, immutability, threads, copies and forks."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.covariance import Blockwise, DiagonalBlock
from lapwing.likelihoods.registry import REGISTERED
from lapwing.methods import Batch, FitResult, IteratePass, Passes, Problem, SamplesSeen, State, SumPass
from lapwing.network.eager import LOCK
from lapwing.network.generic import jvp
from lapwing.tangent import Tangent
from lapwing.tangent.cotangents import ComputedCotangents
from tests.conformance import jacobian, pack
from tests.likelihoods.test_likelihoods import Counts
from tests.zoo import ZOO
from tests.zoo_modules import Net

EVERY = lw.matching("*")
METHODS = [
    lw.KFAC(), lw.KFAC("reduce", "dense"), lw.EKFAC(), lw.Diagonal(), lw.Full(form="primal"), lw.Full(form="dual"),
    lw.ELLA(rank=4, rows=8), lw.ELLA(rank=4, rows=8, residual="prior"), lw.OptimalSubspace(4, lw.KFAC(), "all"),
    lw.SubsetOfWeights(5, "magnitude"),
]  # fmt: skip


def data(name: str, samples: int = 8) -> tuple[nn.Module, Any, Tensor, list[Any]]:
    case = ZOO[name]
    x, y = case.inputs(samples, 0), case.targets(samples, 0)
    return case.build(), x, y, [pack(x, y)]


def identical(one: lw.Posterior, other: lw.Posterior, x: Any, y: Tensor) -> None:
    """Check that two posteriors agree in every answer, up to rounding: memory layouts may differ after loading."""

    def close(a: Any, b: Any) -> None:
        double = not isinstance(a, Tensor) or a.dtype == torch.float64
        torch.testing.assert_close(a, b, **({"rtol": 1e-9, "atol": 1e-11} if double else {}))

    for via in (lw.Linearized(), lw.MonteCarlo(draws=3)):
        a, b = one.latent(x, via=via), other.latent(x, via=via)
        close(a.mean, b.mean)
        close(a.covariance, b.covariance)
        close(one.predict(x, via=via).log_prob(y), other.predict(x, via=via).log_prob(y))
    close(one.latent(x, joint=True).covariance, other.latent(x, joint=True).covariance)
    close(one.log_marginal_likelihood(), other.log_marginal_likelihood())
    first, second = one.sample(3), other.sample(3)
    assert first.keys() == second.keys()
    for name in first:
        close(first[name], second[name])
    assert (one.prior_precision, one.noise_variance) == (other.prior_precision, other.noise_variance)
    assert str(one.diagnose()) == str(other.diagnose())
    assert (one.samples, one.data_factor, one.temperature) == (other.samples, other.data_factor, other.temperature)


# --- save and load ---------------------------------------------------------------------------------------------------
ROUND_TRIPS: dict[str, tuple[str, dict[str, Any]]] = {
    "prior by layer": ("mlp", {"prior_precision": {"*": 2.0, "2.*": 0.5}}),
    "prior mean": ("mlp", {"prior_mean": {"0.weight": torch.ones(6, 4, dtype=torch.float64)}}),
    "noise given": ("deep_linear", {"likelihood": lw.Gaussian(noise_variance=0.3)}),
    "noise tuned": ("mlp_scalar", {}),
    "data size and temperature": ("mlp", {"data_size": 100, "temperature": 2.0}),
    "not tuned": ("mlp_scalar", {"tune": None}),
    "tokens, tied weights": ("tied", {}),
    "generic parameters": ("custom_parameter", {}),
    "a recurrent layer": ("lstm", {}),
    "dictionaries": ("gpt2", {}),
    "tuples": ("bilinear", {}),
    "convolutions in groups": ("grouped_strided_conv", {"method": lw.EKFAC()}),
    "the last layer": ("vit", {"method": None, "params": None}),
    "full, prior by layer": ("mlp", {"method": lw.Full(form="primal"), "prior_precision": {"*": 2.0, "2.*": 0.5}}),
}  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("key", ROUND_TRIPS)
def test_round_trip_of_every_option(key: str, tmp_path: Path) -> None:
    name, options = ROUND_TRIPS[key]
    model, x, y, loader = data(name)
    posterior = lw.fit(model, loader, **{"method": lw.KFAC(), "params": EVERY, **options})
    posterior.save(tmp_path / "p")
    loaded = lw.load(tmp_path / "p", ZOO[name].build())
    identical(loaded, posterior, x, y)
    noise = {} if posterior.noise_variance is None else {"noise_variance": 0.7}
    identical(loaded.with_prior(3.0, **noise), posterior.with_prior(3.0, **noise), x, y)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "p").read_bytes()


def test_round_trip_in_low_precision(reloaded: Any) -> None:
    model, x, y, _ = data("mlp")
    for dtype in (torch.float32, torch.bfloat16):
        cast = copy.deepcopy(model).to(dtype)
        posterior = lw.fit(cast, [(x.to(dtype), y)], lw.KFAC())
        identical(reloaded(posterior, cast), posterior, x.to(dtype), y)
        assert posterior.latent(x.to(dtype)).covariance.dtype == torch.float32


def test_load_does_not_run_the_network(tmp_path: Path) -> None:
    calls: list[int] = []

    def forward(net: nn.Module, x: Any) -> Tensor:
        calls.append(1)
        return net(x)

    model, x, y, loader = data("mlp")
    posterior = lw.fit(model, loader, lw.KFAC(), forward=forward)
    posterior.save(tmp_path / "p")
    calls.clear()
    loaded = lw.load(tmp_path / "p", model, forward=forward)
    assert not calls
    identical(loaded, posterior, x, y)
    assert calls


# --- seeds and immutability ------------------------------------------------------------------------------------------
@pytest.mark.quick(2)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_same_seed_same_answer(method: lw.Method) -> None:
    model, x, y, loader = data("mlp")
    options: dict[str, Any] = {"prior_precision": 1.0}
    posterior = lw.fit(model, loader, method, **options, seed=3)
    torch.manual_seed(99)
    identical(lw.fit(model, loader, method, **options, seed=3), posterior, x, y)
    drawn = isinstance(method, lw.ELLA)
    other = lw.fit(model, loader, method, **options, seed=4)
    assert torch.equal(other.latent(x).covariance, posterior.latent(x).covariance) is not drawn
    assert not torch.equal(posterior.sample(2, seed=1)["0.weight"], posterior.sample(2, seed=2)["0.weight"])
    ways = [lw.MonteCarlo(draws=3, seed=seed) for seed in (1, 1, 2)]
    a, b, c = (posterior.latent(x, via=way).draws for way in ways)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    link = lw.SampledLink()
    p, q, r = (posterior.predict(x, link=link, generator=torch.Generator().manual_seed(s)).probs for s in (1, 1, 2))
    assert torch.equal(p, q)
    assert not torch.equal(p, r)


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_with_prior_leaves_the_old_one_unchanged(method: lw.Method) -> None:
    model, x, y, loader = data("mlp")
    posterior = lw.fit(model, loader, method)
    same = lw.fit(model, loader, method)
    kept = {name: value.clone() for name, value in posterior.covariance.tensors().items()}
    wider = posterior.with_prior(0.01 * posterior.prior_precision)
    wider.with_prior({"0": 5.0, "*": 2.0}).predict(x)
    assert wider.latent(x).variance.sum() > posterior.latent(x).variance.sum()
    identical(posterior, same, x, y)
    assert all(torch.equal(kept[name], value) for name, value in posterior.covariance.tensors().items())
    back = wider.with_prior(posterior.prior_precision)
    torch.testing.assert_close(back.latent(x).covariance, posterior.latent(x).covariance)
    with pytest.raises(FrozenInstanceError):
        posterior.samples = 3


@pytest.mark.parametrize("method", [lw.Full(), lw.KFAC(), lw.Diagonal(), lw.ELLA(rank=4), lw.SampledLLA(4)], ids=str)
def test_each_parameter_has_its_prior_precision_and_its_standard_deviations(method: lw.Method) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    prior = 2.0 if isinstance(method, lw.SampledLLA) else {"0": 1.0, "2.*": 2.0}
    posterior = lw.fit(model, [(x, y)], method, likelihood=lw.Gaussian(0.5), prior_precision=prior)
    first = 2.0 if isinstance(method, lw.SampledLLA) else 1.0
    assert posterior.parameter_precisions == {"0.weight": first, "0.bias": first, "2.weight": 2.0, "2.bias": 2.0}
    for name, std in posterior.weight_std().items():
        torch.testing.assert_close(std, posterior.of(lambda f, name=name: f.weight[name]).std)


def test_results_do_not_share_memory_with_the_posterior() -> None:
    model, x, y, loader = data("mlp")
    posterior = lw.fit(model, loader, lw.KFAC())
    same = lw.fit(model, loader, lw.KFAC())
    latent = posterior.latent(x)
    for tensor in (latent.mean, latent.variance, latent.covariance, *posterior.sample(2).values()):
        tensor.mul_(0).add_(7)
    posterior.predict(x).probs.zero_()
    identical(posterior, same, x, y)


# --- a method from outside the package -------------------------------------------------------------------------------
@dataclass
class SquaredSum(State):
    diagonal: Tensor
    samples: int = 0


class SquaredRows(SumPass[SquaredSum]):
    """`Σ_n,r J²` from the rows of J: the diagonal of the GGN."""

    label = "squared rows"

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def init(self) -> SquaredSum:
        return SquaredSum(self.problem.zeros(self.problem.tangent.size))

    def update(self, state: SquaredSum, batch: Batch) -> None:
        for _, record in batch.records(self.problem.root):
            state.diagonal += record.rows().square().sum((0, 1))
            state.samples += record.samples


class HutchinsonSteps(IteratePass[SquaredSum]):
    """A stochastic estimate of the same diagonal: the mean over steps of `(Jᵀ R ε)²` with random signs ε."""

    label = "random signs"

    def __init__(self, problem: Problem, steps: int) -> None:
        self.problem, self.steps = problem, steps

    def init(self) -> SquaredSum:
        return SquaredSum(self.problem.zeros(self.problem.tangent.size))

    def step(self, state: SquaredSum, batch: Batch, generator: torch.Generator) -> None:
        root = self.problem.root

        def signs(outputs: Tensor) -> Tensor:
            columns = root(outputs)
            drawn = torch.randint(2, (len(outputs), columns.shape[-1], 1), generator=generator).to(columns) * 2 - 1
            return columns @ drawn  # (B, C, 1)

        for _, record in batch.records(ComputedCotangents(signs, batch.tangent.outputs)):
            state.diagonal += record.rows().square().sum((0, 1))
        state.samples += len(batch.targets)


@dataclass(frozen=True)
class MyDiagonal(lw.Method):
    """A new method: its options and its passes."""

    steps: int | None = None

    def passes(self, problem: Problem) -> Passes:
        if self.steps is None:
            diagonal = (yield SquaredRows(problem)).diagonal
        else:
            state = yield HutchinsonSteps(problem, self.steps)
            seen = yield SamplesSeen()
            diagonal = state.diagonal / state.samples * seen.summary.samples
        blocks = problem.tangent.blocks
        parts = diagonal.split([block.size for block in blocks])
        structures = {block.name: DiagonalBlock(part) for block, part in zip(blocks, parts, strict=True)}
        return Blockwise(blocks, structures, problem.precision, problem.scale.of_curvature)


def halves(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:4], y[:4]), (x[4:], y[4:])]


def test_a_sum_pass_from_outside() -> None:
    model, x, y, _ = data("mlp")
    expected = lw.fit(model, halves(x, y), lw.Diagonal())
    found = lw.fit(model, halves(x, y), MyDiagonal())
    torch.testing.assert_close(found.latent(x).covariance, expected.latent(x).covariance)
    torch.testing.assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood())
    assert str(found.method) == "MyDiagonal(steps=None)"


class Until(HutchinsonSteps):
    """Converges after 12 samples."""

    def converged(self, state: SquaredSum) -> bool:
        return state.samples >= 12


@dataclass(frozen=True)
class Self(lw.Method):
    """Reads five samples first, iterates until convergence, and chooses prior and noise."""

    def passes(self, problem: Problem) -> Passes:
        few = SquaredRows(problem)
        few.limit = 5
        state = yield few
        assert state.samples == 5
        assert not (yield SamplesSeen()).summary.samples  # nothing was summed yet
        state = yield Until(problem, 50)
        ends = torch.tensor([state.samples / 4])
        blocks = problem.tangent.blocks
        structures = {block.name: DiagonalBlock(problem.zeros(block.size)) for block in blocks}
        covariance = Blockwise(blocks, structures, 3 * problem.precision, problem.scale.of_curvature)
        return FitResult(covariance, 3 * problem.precision, 0.5, {"steps": ends})


def test_a_method_that_chooses_prior_and_noise_itself(reloaded: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, x, _, _ = data("mlp")
    y = torch.randn(len(x), 3, dtype=x.dtype)
    posterior = lw.fit(model, halves(x, y), Self())
    assert (posterior.prior_precision, posterior.noise_variance, posterior.samples) == (3.0, 0.5, 8)
    assert posterior.history["steps"].tolist() == [3.0]
    assert not caplog.records
    loaded = reloaded(posterior, model)
    assert (loaded.prior_precision, loaded.noise_variance) == (3.0, 0.5)
    assert loaded.history["steps"].tolist() == [3.0]
    lw.fit(model, halves(x, y), Self(), tune=lw.Evidence())
    assert "chooses its own prior" in caplog.text


def test_a_loader_with_a_length_is_not_read_for_counting() -> None:
    model, x, y, _ = data("mlp")
    seen: list[int] = []

    class Watched(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, i: int) -> Any:
            seen.append(i)
            return x[i], y[i]

    loader = torch.utils.data.DataLoader(Watched(), batch_size=3, drop_last=True)
    posterior = lw.fit(model, loader, MyDiagonal(steps=1), prior_precision=1.0)
    assert (posterior.samples, posterior.data_factor) == (3, 2.0)
    assert seen == [0, 1, 2, 0, 1, 2]  # the survey, and the step


@dataclass(frozen=True)
class NoPass(lw.Method):
    """A method that reads no data and returns the prior."""

    def passes(self, problem: Problem) -> Passes:
        blocks = problem.tangent.blocks
        structures = {block.name: DiagonalBlock(problem.zeros(block.size)) for block in blocks}
        return Blockwise(blocks, structures, problem.precision, problem.scale.of_curvature)
        yield  # a generator all the same


def test_a_method_without_passes_still_gets_the_likelihood() -> None:
    model, x, y, _ = data("mlp")
    posterior = lw.fit(model, halves(x, y), NoPass(), prior_precision=4.0)
    torch.testing.assert_close(posterior.statistics, lw.fit(model, halves(x, y), lw.Diagonal()).statistics)
    assert torch.equal(posterior.covariance.to_dense(), torch.eye(posterior.tangent.size).double() / 4)


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_unused_parameters_keep_the_prior(method: lw.Method, reloaded: Any) -> None:
    _, x, y, _ = data("mlp")
    idle = {"spare": nn.Linear(5, 5), "scale": nn.Parameter(torch.full((2,), 3.0))}
    used = lambda net, x: net.head(torch.tanh(net.body(x)))  # noqa: E731
    model = Net(used, body=nn.Linear(4, 5), head=nn.Linear(5, 3), **idle).double().eval()
    posterior = lw.fit(model, halves(x, y), method, prior_precision=4.0)
    names = [name for block in posterior.tangent.blocks for name in block.parameters]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    assert "it is not used there" in str(posterior.tangent.coverage)
    J = jacobian(model, x, posterior.tangent.blocks)
    torch.testing.assert_close(posterior.latent(x).covariance, J @ posterior.covariance.to_dense() @ J.mT)
    if getattr(method, "residual", "prior") is not None:
        variances = torch.cat(
            [posterior.covariance.diagonal()[b.name] for b in posterior.tangent.blocks if "s" in b.name[0]]
        )
        torch.testing.assert_close(variances, torch.full_like(variances, 0.25))
    drawn = posterior.sample(2)
    assert drawn["spare.weight"].shape == (2, 5, 5)
    identical(reloaded(posterior, model), posterior, x, y)


# --- threads ---------------------------------------------------------------------------------------------------------
def in_threads(work: Callable[[int], None], turns: int) -> None:
    """Run `work` in three threads that start together; an exception of one of them is raised here."""
    start = threading.Barrier(3)

    def run(first: int) -> None:
        start.wait()
        for i in range(first, first + turns):
            work(i)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, range(3)))


def test_a_thread_that_holds_the_network_does_not_wait_for_one_that_reads_another() -> None:
    """Python 3.11 computes a `cached_property` under a lock of all instances."""
    model, x, _, _ = data("mlp", 5)
    one, other = (Tangent.survey(model, x, EVERY) for _ in range(2))
    for tangent in (one, other):
        tangent.__dict__.pop("dtype", None)
        tangent.__dict__.pop("parameters", None)
    held, started = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            held.set()
            assert started.wait(10.0)
            reader.join(0.2)  # until it waits for the lock
            assert other.dtype == torch.float64

    holder, reader = (threading.Thread(target=work, daemon=True) for work in (hold, lambda: one.dtype))
    holder.start()
    assert held.wait(10.0)
    reader.start()
    started.set()
    holder.join(10.0)
    assert not holder.is_alive()


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["mlp", "custom_parameter", "compiled", "lstm", "gpt2", "weight_norm"])
def test_threads_that_predict_at_the_same_time(name: str) -> None:
    """Each thread runs the network at drawn weights, which no other thread may see."""
    model, x, _, loader = data(name, 5)
    posterior = lw.fit(model, loader, lw.KFAC(), params=EVERY)
    ways = [lw.MonteCarlo(draws=3), lw.Linearized(), *([lw.Streamlined()] if name == "mlp" else [])]
    expected = [posterior.latent(x, via=way).covariance for way in ways]
    sums = [posterior.covariance.to_dense().sum(), posterior.sample(2)]

    def work(i: int) -> None:
        way = i % len(ways)
        torch.testing.assert_close(posterior.latent(x, via=ways[way]).covariance, expected[way])
        torch.testing.assert_close(posterior.sample(2), sums[1])
        other = lw.fit(model, loader, lw.KFAC(), params=EVERY) if i % 3 == 0 else posterior
        torch.testing.assert_close(other.covariance.to_dense().sum(), sums[0])

    in_threads(work, 6)
    from torch._dynamo.eval_frame import _stance

    assert _stance.stance == "default"


def test_a_thread_in_forward_mode_lets_others_wait() -> None:
    """torch shares one level of forward mode between threads, so a call in another thread must wait."""
    model, x, _, loader = data("mlp", 5)
    posterior = lw.fit(model, loader, lw.KFAC(), params=EVERY)
    expected = posterior.latent(x).covariance
    inside, answered = threading.Event(), threading.Event()

    def function(value: Tensor) -> Tensor:
        inside.set()
        answered.wait(0.5)
        return value.sin()

    thread = threading.Thread(target=jvp, args=(function, (torch.ones(2),), (torch.ones(2),)))
    thread.start()
    inside.wait()
    try:
        torch.testing.assert_close(posterior.latent(x).covariance, expected)
    finally:
        answered.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_a_process_forked_while_another_thread_runs_the_network() -> None:
    """The child process does not have this thread, must not wait for its lock, and gives the same answers."""
    model, x, _, loader = data("mlp", 5)
    posterior = lw.fit(model, loader, lw.KFAC())
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    ways = [lw.Linearized(), lw.MonteCarlo(draws=3)]
    expected = [posterior.latent(x, via=way).covariance for way in ways]
    inside = threading.Event()

    def run() -> None:
        with LOCK:
            inside.set()
            time.sleep(0.3)

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait()
    child = context.Process(target=lambda: sending.send([posterior.latent(x, via=w).covariance.tolist() for w in ways]))
    child.start()
    thread.join()
    try:
        assert receiving.poll(30)
        torch.testing.assert_close(torch.tensor(receiving.recv(), dtype=x.dtype), torch.stack(expected))
    finally:
        child.kill()
        child.join()


def test_copies_and_pickles_bring_their_network_along() -> None:
    model, x, y, loader = data("cnn_bn_inplace")
    posterior = lw.fit(model, loader, lw.KFAC())
    for other in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        assert other.tangent.model is not model
        identical(other, posterior, x, y)
        with torch.no_grad():
            next(other.tangent.model.parameters()).add_(1.0)
        with pytest.raises(lw.LapwingError, match="after the fit"):
            other.predict(x)
    identical(posterior, posterior, x, y)


@pytest.mark.parametrize("method", [lw.Diagonal(), lw.KFAC()])
def test_pickles_do_not_grow_with_use(method: Any) -> None:
    """A pickle leaves out the values that predictions cache."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 200), torch.nn.ReLU(), torch.nn.Linear(200, 3)).eval()
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    posterior = lw.fit(model, [(x, y)], method, params=lw.everything, prior_precision=1.0)
    before = len(pickle.dumps(posterior))
    posterior.latent(x).covariance.sum()
    assert len(pickle.dumps(posterior)) < 1.01 * before


def test_a_likelihood_from_outside_loads_once_it_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(4, 2).double().eval(), torch.randn(9, 4, dtype=torch.float64)
    loader = [(x, torch.poisson(torch.ones(9, 2, dtype=torch.float64)))]
    fitted = lw.fit(model, loader, lw.Diagonal(), likelihood=Counts(), prior_precision=1.0)
    fitted.save(tmp_path / "p.st")
    with pytest.raises(lw.LapwingError, match=r"'counts' of .* is not registered.*lw.load\(path, model, likelihood="):
        lw.load(tmp_path / "p.st", model)
    loaded = lw.load(tmp_path / "p.st", model, likelihood=Counts())
    assert torch.equal(loaded.latent(x).variance, fitted.latent(x).variance)
    monkeypatch.setitem(REGISTERED, "counts", Counts)
    assert lw.load(tmp_path / "p.st", model).likelihood == Counts()
