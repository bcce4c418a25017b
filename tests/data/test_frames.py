"""Data as people have them: arrays, frames and data sets give what their tensors give."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lapwing as lw
from tests.data.test_loaders import REAL, WAYS_IN, X, Y, fitted
from tests.refused import each_row, refused


class Frame:
    """What lapwing reads of a pandas DataFrame or Series; pandas itself may not be installed."""

    def __init__(self, **columns: Any) -> None:
        self.data = {name: np.asarray(column) for name, column in columns.items()}
        self.columns, self.dtypes = list(columns), [column.dtype for column in self.data.values()]
        self.shape = (len(next(iter(self.data.values()))), len(columns))

    def __iter__(self) -> Any:
        return iter(self.columns)

    def __len__(self) -> int:
        return self.shape[0]

    def to_numpy(self) -> np.ndarray:
        kinds = {column.dtype.kind for column in self.data.values()}
        columns = [column if len(kinds) == 1 else column.astype(object) for column in self.data.values()]
        values = np.stack(columns, 1)
        values.setflags(write=False)  # as pandas 3 returns it
        return values


class Rows(Dataset):
    """A map-style data set of arrays, as most people write one."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, Any]:
        return self.x[i], self.y[i]


def network(inputs: int = 3, outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs)).eval()


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(120, 3)), generator.integers(4, size=120)


def forms(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    tensors = torch.from_numpy(x).float(), torch.from_numpy(y)
    frame = Frame(a=x[:, 0], b=x[:, 1], c=x[:, 2])
    return {
        "arrays": (x, y),
        "strided": (np.asfortranarray(x)[::-1][::-1], y.astype(np.int32)[::1]),
        "big-endian": (x.astype(">f8"), y.astype(">i4")),
        "frame": (frame, y),
        "tensors": tensors,
        "mixed": (x, tensors[1]),
        "dict": {"input": tensors[0], "labels": y},
        "data set": Rows(x, y),
        "tensor data set": TensorDataset(*tensors),
        "list of arrays": [(x[:100], y[:100]), (x[100:], y[100:])],
    }


@pytest.mark.quick(2)
@pytest.mark.parametrize("form", list(forms(np.ones((1, 3)), np.ones(1, int))))
def test_every_form_fits_as_its_tensors(form: str, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = arrays
    model, data = network(), forms(x, y)[form]
    batches = [(torch.from_numpy(x[s]).float(), torch.from_numpy(y[s])) for s in (slice(0, 100), slice(100, 120))]
    expected = lw.fit(model, batches, lw.KFAC(), prior_precision=2.0)
    posterior = lw.fit(model, data, lw.KFAC(), prior_precision=2.0)
    assert posterior.samples == 120
    for name, value in expected.covariance.tensors().items():
        torch.testing.assert_close(posterior.covariance.tensors()[name], value, rtol=1e-4, atol=1e-6)
    asked = batches[0][0]
    probs = expected.predict(asked).probs
    for same in (x[:100], Frame(a=x[:100, 0], b=x[:100, 1], c=x[:100, 2]), [x[:60], x[60:100]],
                 Rows(x[:100], y[:100]), TensorDataset(asked), (part for part in np.split(x[:100], 4))):  # fmt: skip
        torch.testing.assert_close(posterior.predict(same).probs, probs, rtol=1e-4, atol=1e-6)


def compared(kind: Callable[..., Any], y: torch.Tensor) -> dict[str, float]:
    """Returns the row of a comparison, without the time that it took."""
    table = lw.compare({"a": fitted(y)}, kind(X, y), foreign={"far": kind(3 * X, y)[0]}, repeats=1)
    return {**table["a"], "passes": 0.0}


WAYS = {name: way for name, way in WAYS_IN.items() if name not in ("prediction", "weights")} | {
    "plan": lambda kind, y: lw.plan(network(4, 1 if y is REAL else 3), kind(X, y), lw.KFAC()).passes,
    "compare": compared,
}
"""The ways in that take a pair (x, y); a prediction reads a pair as two inputs."""


@pytest.mark.quick(15)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("y", [Y, REAL], ids=["classes", "real"])
@pytest.mark.parametrize("way_in", WAYS)
def test_arrays_enter_every_way_as_their_tensors_do(way_in: str, y: torch.Tensor) -> None:
    results = []
    for kind in (lambda x, y: (x, y), lambda x, y: (x.double().numpy(), y.numpy())):
        torch.manual_seed(0)
        results.append(WAYS[way_in](kind, y))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_an_array_of_floats_is_one_input_per_sample() -> None:
    x = np.linspace(-1, 1, 20)
    model = network(1, 1).double()
    posterior = lw.fit(model, (x, np.sin(x)), lw.Full(), prior_precision=1.0, likelihood=lw.Gaussian(0.1))
    column = torch.from_numpy(x)[:, None]
    torch.testing.assert_close(posterior.predict(x).variance, posterior.predict(column).variance)


def test_arrays_take_the_dtype_of_the_weights_and_tensors_keep_theirs(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = arrays
    for dtype in (torch.float64, torch.bfloat16):
        model = network().to(dtype)
        assert lw.fit(model, (x, y), lw.Diagonal()).predict(x.astype(np.float32)).probs.shape == (120, 4)
    refused(lambda: lw.fit(network(), (torch.from_numpy(x), y), lw.Diagonal()), "x.to(torch.float32)")
    tokens = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)).eval()
    posterior = lw.fit(tokens, (y, y % 2), lw.KFAC())
    assert posterior.predict(y[:5]).probs.shape == (5, 2)


def fit(data: Any) -> lw.Posterior:
    return lw.fit(network(), data, lw.Diagonal(), likelihood="categorical")


@cache
def of_numbers() -> lw.Posterior:
    return lw.fit(network(1, 1).double(), LINE, lw.Diagonal(), prior_precision=1.0)


LINE = np.linspace(-1, 1, 20), np.sin(np.linspace(-1, 1, 20))
MODULE = type("Data", (), {"train_dataloader": lambda self: [LINE]})()
SINGLE, SEVERAL = "hold a single number. Pass an array", "hold a list of numbers. Pass an array"
REFUSED = [
    (lambda: of_numbers().predict(0.5), SINGLE),
    (lambda: of_numbers().predict(LINE[0].tolist()), SEVERAL),
    (lambda: of_numbers().predict([[0.1], [0.2]]), SEVERAL),
    (lambda: of_numbers().predict(LINE[0]).log_prob(LINE[1].tolist()), SEVERAL),
    (lambda: of_numbers().predict(MODULE), "module.train_dataloader() or another"),
    (lambda: lw.fit(network(1, 1), (LINE[0], LINE[1].tolist())), SEVERAL),
    (lambda: lw.fit(network(1, 1), (LINE[0].tolist(), LINE[1])), SEVERAL),
    (lambda: lw.fit(network(1, 1), MODULE), "module.setup('fit'), and pass module.train_dataloader"),
    (lambda: fit((np.ones((5, 3)), np.ones(4, int))), "5 rows and the targets 4. Pass a target for each row."),
    (lambda: fit((np.ones((0, 3)), np.ones(0, int))), "no samples"),
    (lambda: fit(Rows(np.ones((0, 3)), np.ones(0))), "of type Rows, has no samples"),
    (lambda: fit((np.array([["a", "b"]], object), np.ones(1))), "ndarray of shape (1, 2) has the dtype object"),
    (lambda: fit((np.ones((2, 3)), np.array(["cat", "dog"]))), "numpy.unique(y, return_inverse=True)[1]"),
    (lambda: fit((Frame(a=[1.0], city=["Rome"]), np.ones(1))), "columns 'city' … of the Frame hold no numbers"),
    (lambda: fit((Frame(a=[1.0, 2.0], b=[None, 1.0]), np.ones(2))), "columns 'b'"),
    (lambda: fit(Rows([np.ones(2), np.ones(3)], [0, 1])), "cannot be joined into a batch … collate_fn"),
    (lambda: fit(np.ones((5, 3))), "needs an iterable … Write (x, y)"),
    (lambda: fit(Frame(a=[1.0])), "Write (x, y)"),
    (lambda: fit([torch.ones(5, 3), torch.ones(5)]), "Write (x, y)"),
]


@each_row(REFUSED)
def test_a_call_is_refused_in_these_words(call, words):
    refused(call, words)


def test_pandas_itself() -> None:
    pandas = pytest.importorskip("pandas")
    x = pandas.DataFrame({"a": [0.5, 1.0], "b": [True, False], "c": pandas.array([1, 2], dtype="Int64")})
    posterior = lw.fit(network(), (x, pandas.Series([0, 1])), lw.Diagonal())
    torch.testing.assert_close(posterior.latent(x).mean, network()(torch.tensor([[0.5, 1, 1], [1, 0, 2]])).detach())


def test_a_data_set_draws_no_random_numbers_and_a_set_of_batches_stays_a_loader(
    arrays: tuple[np.ndarray, np.ndarray],
) -> None:
    class Batches(Dataset):
        """No samples by number, but batches in turn."""

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            yield from [(torch.from_numpy(part).float(), torch.from_numpy(y)) for part in np.split(x, 2)]

    x, y, model = arrays[0], arrays[1][:60], network()
    state = torch.get_rng_state()
    lw.fit(model, Rows(*arrays), lw.Diagonal(), prior_precision=1.0).predict(Rows(*arrays))
    assert torch.equal(torch.get_rng_state(), state)
    assert lw.fit(model, Batches(), lw.Diagonal(), prior_precision=1.0).samples == 120


# --- columns in another order ----------------------------------------------------------------------------------------
def shuffled(x: Any) -> Any:
    return x[list(reversed(x.columns))]


def test_columns_of_a_frame_are_found_by_name(reloaded: Any) -> None:
    pd = pytest.importorskip("pandas")
    generator = np.random.default_rng(0)
    x, y = pd.DataFrame(generator.normal(size=(40, 3)), columns=["a", "b", "c"]), generator.normal(size=(40, 1))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).eval()
    posterior = lw.fit(model, (x, y), lw.Full(), prior_precision=1.0)
    variance = posterior.latent(x).variance
    loaded = reloaded(posterior, model)
    for one in (posterior, loaded, posterior.with_prior(1.0), pickle.loads(pickle.dumps(posterior))):
        for other in (shuffled(x), [shuffled(x)], [(shuffled(x[:7]), y[:7]), (shuffled(x[7:]), y[7:])]):
            torch.testing.assert_close(one.latent(other).variance, variance)

    def same(function: Callable[[Any], Any]) -> None:
        torch.testing.assert_close(function(shuffled(x)), function(x))

    same(lambda other: loaded.update((other, y)).latent(x).variance)
    same(lambda other: lw.fit(model, (x, y), lw.KFAC(), validation=(other, y)).latent(x).variance)
    same(lambda other: lw.fit(model, (x, y), lw.KFAC(), tune=lw.Validation((other, y))).latent(x).variance)
    same(lambda other: lw.fit(model, (other, y), prior=posterior).latent(x).variance)
    same(lambda other: torch.tensor(lw.scale_factor(posterior, (other, y)).factor))
    same(lambda other: torch.tensor(posterior.log_marginal_likelihood(linearised_mode=True, loader=(other, y))))
    tables = [lw.compare({"a": posterior}, (other, y), {"far": other + 1.0}).rows for other in (x, shuffled(x))]
    for row in ("network", "a"):
        assert {**tables[0][row], "passes": 0} == pytest.approx({**tables[1][row], "passes": 0})
    other = x.rename(columns={"a": "z"})
    words = "A DataFrame has the columns ['z'], which … not have and lacks the columns ['a'] of the data of the fit."
    refused(lambda: posterior.predict(other), words)
    refused(lambda: posterior.predict(x.assign(y=1.0)), "A DataFrame has the columns ['y'], which the data of the fit")
    refused(lambda: posterior.predict(x[["c", "a"]]), "A DataFrame lacks the columns ['b'] of the data of the fit.")
    twice = "A DataFrame has the columns ['c'], which the data of the fit did not have."
    refused(lambda: posterior.predict(x[["a", "b", "c", "c"]]), twice)
    torch.testing.assert_close(posterior.latent(x.to_numpy()).variance, variance)


def test_each_posterior_of_a_comparison_has_its_own_columns() -> None:
    pd = pytest.importorskip("pandas")
    generator = np.random.default_rng(0)
    x, y = pd.DataFrame(generator.normal(size=(40, 2)), columns=["a", "b"]), generator.normal(size=(40, 1))
    model, mirrored = nn.Linear(2, 1).eval(), nn.Linear(2, 1).eval()
    mirrored.load_state_dict({**model.state_dict(), "weight": model.weight.flip(1)})
    rows = lw.compare({"a": lw.fit(model, (x, y)), "b": lw.fit(mirrored, (shuffled(x), y))}, (x, y)).rows
    assert {**rows["a"], "passes": 0} == pytest.approx({**rows["b"], "passes": 0}, rel=1e-3)
