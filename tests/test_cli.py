"""The command line: a fit, its file, an evaluation and a report, and one sentence with exit code 2 for wrong input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_model, save_model

import lapwing as lw
from lapwing.cli import main
from tests.hidden_package import hide

pd = pytest.importorskip("pandas")
pytest.importorskip("jsonargparse")

MODULE = """
import torch

def classifier():
    return torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))

def number():
    return 3

def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(20, 3, generator=generator), torch.arange(20) % 2)]

regressor = torch.nn.Linear(3, 1)
"""


DATA = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 2


def network() -> torch.nn.Module:
    """A network like that of the module."""
    return torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).eval()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Checks that a command ends with exit code 2 and one sentence, and returns it."""
    with pytest.raises(SystemExit) as done:
        main(arguments)
    printed = capsys.readouterr().err
    assert done.value.code == 2
    assert printed.startswith("lapwing: ")
    assert printed.count("\n") == 1
    return printed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a module of networks, weights, and data in three forms."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "networks_of_cli", raising=False)
    (tmp_path / "networks_of_cli.py").write_text(MODULE)
    x = torch.randn(40, 3)
    y = (x[:, 0] + 0.5 * torch.randn(40) > 0).long()
    np.savez("data.npz", x=x.numpy(), y=y.numpy())
    np.savez("far.npz", x=10 * x.numpy())
    np.savez("empty.npz", z=x.numpy())
    Path("nothing.npz").touch()
    Path("cut.npz").write_bytes(Path("data.npz").read_bytes()[:300])
    np.savez_compressed("flipped.npz", x=x.numpy(), y=y.numpy())
    whole = Path("flipped.npz").read_bytes()
    Path("flipped.npz").write_bytes(whole[:60] + bytes(20) + whole[80:])
    frame = pd.DataFrame(x.numpy(), columns=["a", "b", "c"])
    frame.assign(label=y.numpy()).to_csv("classes.csv", index=False)
    frame.assign(count=range(40))[["count", "a", "b", "c"]].to_csv("numbers.csv", index=False)
    save_model(network(), "c.safetensors")
    save_model(torch.nn.Linear(3, 1), "r.safetensors")
    return tmp_path


CLASSIFIER = ["networks_of_cli:classifier", "c.safetensors"]


def test_a_fit_its_file_and_an_evaluation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--method", "KFAC", "--method.uncovered", "dense", "--params", "2.*", "--likelihood", "categorical"]
    main(["fit", *CLASSIFIER, "data.npz", *options, "--out", "p.safetensors"])
    assert (
        "KFAC(weight_sharing='expand', uncovered='dense', fisher=None) over 14 of 38 weights" in capsys.readouterr().out
    )
    main(["info", "p.safetensors"])
    facts = capsys.readouterr().out
    assert "method           KFAC(weight_sharing='expand', uncovered='dense', fisher=None), 40 samples" in facts
    assert "weights          14\n" in facts
    assert " to " not in facts.partition("prior precision")[2]  # both blocks have the same one
    main(["evaluate", *CLASSIFIER, "p.safetensors", "classes.csv", "--foreign.far", "far.npz", "--score", "entropy"])
    printed = capsys.readouterr().out
    assert "posterior" in printed
    assert "far" in printed
    load_model(model := network(), "c.safetensors")
    with np.load("data.npz") as data:
        x, y = torch.tensor(data["x"]), torch.tensor(data["y"])
    nll = -lw.load("p.safetensors", model).predict(x).log_prob(y).mean()
    assert f"{nll:.4f}" in printed  # the CSV file holds the same rows as the arrays


def test_a_table_whose_targets_are_named_and_a_loader_of_held_out_data(folder: Path, capsys) -> None:
    regressor = ["networks_of_cli:regressor", "r.safetensors", "numbers.csv", "--target", "count"]
    main(["fit", *regressor, "--likelihood", "gaussian"])
    assert "over all 4 weights" in capsys.readouterr().out
    main(["fit", *CLASSIFIER, "data.npz", "--validation", "networks_of_cli:batches"])
    assert "tuned by Validation" in capsys.readouterr().out
    assert (folder / "posterior.safetensors").is_file()


def test_the_weights_that_a_method_trains_are_saved_too(folder: Path, capsys) -> None:
    main(["fit", *CLASSIFIER, "data.npz", "--method", "MeanField", "--method.steps", "3", "--out", "m.safetensors"])
    assert "Pass m.weights.safetensors to lapwing evaluate" in capsys.readouterr().out
    main(["evaluate", CLASSIFIER[0], "m.weights.safetensors", "m.safetensors", "data.npz"])
    assert "posterior" in capsys.readouterr().out


def test_a_report(folder: Path, capsys) -> None:
    main(["fit", *CLASSIFIER, "data.npz"])
    main(["report", *CLASSIFIER, "posterior.safetensors", "data.npz", "--out", "page.html"])
    assert "<html" in (folder / "page.html").read_text(encoding="utf-8")


def test_parquet_names_the_package_that_reads_it(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ImportError("Unable to find a usable engine; tried using: 'pyarrow', 'fastparquet'.")
    monkeypatch.setattr(pd, "read_parquet", mock.Mock(side_effect=missing))
    said = refused(["fit", *CLASSIFIER, "table.parquet"], capsys)
    assert "table.parquet needs the package pyarrow. Run pip install" in said


WEIGHT_SHARING = "--method.weight_sharing {expand,reduce} treatment of weights that are used at several positions"
HELP = {
    "`make demo`": ["--help"], "This runs the code of the module.": ["fit", "--help"],
    WEIGHT_SHARING: ["fit", "--method.help", "KFAC"],
}  # fmt: skip
"""Words of a help -> arguments; that of a method comes from its dataclass."""


@pytest.mark.parametrize("words", HELP)
def test_help_has_these_words(words: str, capsys) -> None:
    with pytest.raises(SystemExit) as done:
        main(HELP[words])
    assert done.value.code in (0, None)
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("out", ["missing/p", "."])
@pytest.mark.parametrize("command", ["fit", "report"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command: str, out: str, folder: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    lw.fit(network(), DATA).save("p")
    for work in ("fit", "load", "compare"):
        monkeypatch.setattr(lw, work, lambda *_, **__: pytest.fail("it works before it looks at the path"))
    said = refused([command, *CLASSIFIER, *(["p"] if command == "report" else []), "data.npz", "--out", out], capsys)
    assert "is not an ordinary file" in said if out == "." else "missing/p cannot be written: No such" in said


@pytest.mark.parametrize("by", ["mahalanobis", "knn"])
def test_info_of_a_detector(by: Any, folder: Path, capsys) -> None:
    lw.novelty(network(), DATA, by).save("detector")
    main(["info", "detector"])
    assert capsys.readouterr().out == f"detector         lw.novelty by {by}, 6 features\n"


def test_info_of_a_mixture(folder: Path, capsys) -> None:
    members = [lw.fit(network(), DATA, lw.Diagonal(), prior_precision=float(n + 1)) for n in range(11)]
    lw.mixture(members).save("ensemble")
    main(["info", "ensemble"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mixture          11 posteriors"
    precisions = [line.rpartition(" ")[2] for line in lines if line.startswith("prior precision")]
    assert precisions == [str(n + 1) for n in range(11)]


def test_info_needs_no_extra(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    lw.fit(network(), DATA, lw.Diagonal()).save("p")
    hide(monkeypatch, "jsonargparse")
    main(["info", "p"])
    assert "method           Diagonal(), 9 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["info", "none.safetensors"], "There is no file none.safetensors"),
        (["info", "c.safetensors"], "it was not written by lapwing"),
        (["fit", "networks_of_cli:none", "c.safetensors", "data.npz"], "networks_of_cli:none cannot be found"),
        (["fit", "nowhere:none", "c.safetensors", "data.npz"], "nowhere:none cannot be found"),
        (["fit", "networks_of_cli:number", "c.safetensors", "data.npz"], "gives 3 instead of a torch.nn.Module"),
        (["fit", "networks_of_cli:classifier", "r.safetensors", "data.npz"], "The weights r.safetensors do not fit"),
        (["fit", *CLASSIFIER, "empty.npz"], "empty.npz has no 'x'"),
        (["fit", *CLASSIFIER, "nothing.npz"], "nothing.npz is empty or damaged: EOFError: No data left in file. Write"),
        (["fit", *CLASSIFIER, "cut.npz"], "cut.npz is empty or damaged: BadZipFile: File is not a zip file. Write it"),
        (["fit", *CLASSIFIER, "flipped.npz"], "flipped.npz is empty or damaged"),
        (["evaluate", *CLASSIFIER, "none", "data.npz", "--foreign.far", "nothing.npz"], "nothing.npz is empty or dam"),
        (["fit", *CLASSIFIER, "classes.csv", "--target", "d"], "classes.csv has no 'd'"),
        (["fit", *CLASSIFIER, "none.csv"], "none.csv: No such file"),
        (["fit", CLASSIFIER[0], "none.safetensors", "data.npz"], "none.safetensors: No such file"),
        (["fit", *CLASSIFIER], "required: data"),
        (["fit", *CLASSIFIER, "far.npz"], "far.npz has no 'y'"),
        (["fit", *CLASSIFIER, "data.npz", "--validation", "far.npz"], "far.npz has no 'y'"),
        (["evaluate", *CLASSIFIER, "none", "data.npz", "--foreign", "far.npz"], "--foreign.noise noise.npz"),
        (["fit", *CLASSIFIER, "data.txt"], "data.txt is neither an .npz, .csv or .parquet file"),
        (["fit", *CLASSIFIER, "data.npz", "--method", "Kfac"], "--method is not one of Diagonal, EKFAC, ELLA"),
        (["fit", *CLASSIFIER, "data.npz", "--method", "ELLA", "--method.rank", "-7"], "rank must be a whole number"),
        (["fit", *CLASSIFIER, "data.npz", "--method", "ELLA", "--method.rang", "7"], "Option 'rang' is not accepted"),
        (["fit", *CLASSIFIER, "data.npz", "--likelihood", "normal"], "Pass --likelihood categorical for"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_sentence(arguments: list[str], sentence: str, folder: Path, capsys) -> None:
    assert sentence in refused(arguments, capsys)
