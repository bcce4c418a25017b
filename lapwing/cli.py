"""The command line, `lapwing` or `python -m lapwing`: what a file holds, a fit, an evaluation and a report.

jsonargparse (the extra `cli`) makes options and help from signatures and docstrings: `lapwing fit --method.help KFAC`.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

import lapwing as lw

from .errors import LapwingError, extra, shown
from .evaluation.comparison import Score
from .files import check_writable, read_safetensors, reason


def info(file: str) -> None:
    """Prints what a file of lapwing holds; it needs no network.

    Args:
        file: file of a posterior or a detector, which `lapwing fit` or `save` wrote, or the folder of a mixture.
    """
    members = sorted(Path(file).glob("member-*.safetensors"), key=lambda path: (len(path.name), path.name))
    if members:
        print(f"mixture          {len(members)} posteriors")
        for member in members:
            info(str(member))
        return
    tensors, header = read_safetensors(file)
    if "checkpoint" in header:
        raise LapwingError(f"The file {file} is the checkpoint of a fit that has not ended. It holds no posterior.")
    if "novelty" in header:  # of "knn" and of "mahalanobis"
        features = tensors["novelty/rows" if "novelty/rows" in tensors else "novelty/mean"].shape[-1]
        print(f"detector         lw.novelty by {header['novelty']}, {features} features")
        return
    likelihood, precision = header["likelihood"], tensors.get("covariance/precision")
    shapes = [shape for block in header["tangent"]["blocks"] for shape in block["shapes"]]
    numbers = [f"{key}={likelihood[key]:.4g}" for key in ("noise_variance", "logit_temperature") if likelihood[key]]
    print(f"method           {header['method']['text']}, {header['samples']} samples")
    print(f"weights          {sum(map(math.prod, shapes)):,}")
    print(f"likelihood       {' '.join([likelihood['name'], *numbers])}")
    if precision is not None:
        print(f"prior precision  {' to '.join(dict.fromkeys(f'{end:.4g}' for end in precision.aminmax()))}")


def versions() -> None:
    """Prints what a bug report needs: versions, the system, devices and threads."""
    print(lw.versions())


def fit(
    model: str,
    weights: str,
    data: str,
    *,
    target: str | None = None,
    validation: str | None = None,
    method: lw.Method | None = None,
    likelihood: str | None = None,
    params: str | None = None,
    out: str = "posterior.safetensors",
) -> None:
    """Fits a posterior around the weights of a network, and saves it.

    Args:
        model: `package.module:factory`, the network or a function that returns it. This runs the code of the module.
        weights: safetensors file of the trained weights.
        data: training data: an .npz file with the arrays x and y; a .csv or .parquet file; or `package.module:loader`,
            a loader or a function that returns one, which runs the code of the module.
        target: column of the targets in a .csv or .parquet file; None means the last column.
        validation: held-out data, in the same forms, which choose the width of the error bars.
        method: method of the fit; None chooses one.
        likelihood: "categorical", "ordinal", "gaussian", "student_t", "heteroscedastic", "censored", "bernoulli" or
            "poisson"; None infers it from the targets.
        params: treated parameters: everything, last_layer, or a pattern of names such as "head.*"; None chooses.
        out: file of the posterior, which is replaced.
    """
    check_writable(out)
    named: dict[str | None, Any] = {"everything": lw.everything, "last_layer": lw.last_layer, None: None}
    network = network_of(model, weights)
    posterior: Any = lw.fit(
        network, known_data(data, target), method, likelihood=likelihood,
        params=named[params] if params in named else lw.matching(str(params)),
        validation=None if validation is None else known_data(validation, target),
    )  # fmt: skip
    posterior.save(out)
    print(posterior)
    if posterior.model is not network:  # MeanField trains it further
        save_model(posterior.model, trained := str(Path(out).with_suffix(".weights.safetensors")))
        print(f"The posterior belongs to other weights. Pass {trained} to lapwing evaluate.")


def evaluate(
    model: str,
    weights: str,
    posterior: str,
    data: str,
    *,
    target: str | None = None,
    foreign: dict[str, str] | None = None,
    score: Score = "mutual_information",
) -> Any:
    """Prints the metrics of a posterior on test data, next to the network alone and temperature scaling.

    Args:
        model: `package.module:factory`, as for `lapwing fit`. This runs the code of the module.
        weights: safetensors file of the trained weights.
        posterior: file that `lapwing fit` wrote.
        data: test data, in the forms of `lapwing fit`.
        target: column of the targets in a .csv or .parquet file; None means the last column.
        foreign: out-of-distribution inputs by name, in the same forms: `--foreign.noise noise.npz`.
        score: score of the columns FPR95 and AUPR of out-of-distribution inputs.
    """
    others = {name: data_of(source, target) for name, source in (foreign or {}).items()}
    loaded: Any = lw.load(posterior, network_of(model, weights))
    table = lw.compare({"posterior": loaded}, known_data(data, target), others, score=score)
    print(table)
    return table


def report(*arguments: Any, out: str = "report.html", **options: Any) -> None:  # noqa: D417 (see `evaluate`)
    """Writes the evaluation as one HTML page with pictures, and prints its table.

    Args:
        out: HTML file, which is replaced.
    """
    check_writable(out)
    evaluate(*arguments, **options).report(out)


def network_of(model: str, weights: str) -> nn.Module:
    """Returns the network that `package.module:factory` names, with the weights of a safetensors file, in eval mode."""
    network = named_object(model)
    network = network if isinstance(network, nn.Module) else network()
    if not isinstance(network, nn.Module):
        raise LapwingError(f"{model} gives {shown(network)} instead of a torch.nn.Module.")
    try:
        load_model(network, weights)
    except OSError as error:
        raise LapwingError(f"{weights}: {reason(error)}.") from error
    except (RuntimeError, SafetensorError) as error:
        raise LapwingError(f"The weights {weights} do not fit {model}: {' '.join(str(error).split())[:300]}") from error
    return network.eval()


def known_data(source: str, target: str | None) -> Any:
    """Returns (x, y), or the loader; raises if an .npz file has no targets."""
    found = data_of(source, target)
    if isinstance(found, np.ndarray):
        raise LapwingError(f"{source} has no 'y'. Write np.savez({source!r}, x=x, y=y).")
    return found


def data_of(source: str, target: str | None) -> Any:
    """Returns (x, y), or x, from an .npz, .csv or .parquet file, or the loader that `package.module:loader` names."""
    path = Path(source)
    try:
        if path.suffix == ".npz":
            with open(path, "rb") as file:  # np.load would leave a damaged file open
                arrays = dict(np.load(file, allow_pickle=False))
            return (arrays["x"], arrays["y"]) if "y" in arrays else arrays["x"]
        if path.suffix not in (".csv", ".parquet"):
            found = named_object(source)
            return found() if inspect.isroutine(found) else found
        frame = getattr(extra("pandas"), f"read_{path.suffix[1:]}")(path)
        targets = frame.pop(frame.columns[-1] if target is None else target)
        return frame.astype(dict.fromkeys(frame.select_dtypes("integer").columns, float)), targets
    except KeyError as error:
        raise LapwingError(f"{source} has no {error}.") from error
    except (EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise LapwingError(f"{source} is empty or damaged: {reason(error)}. Write it again.") from error
    except ImportError as error:
        if path.suffix != ".parquet":
            raise
        raise LapwingError(f"{source} needs the package pyarrow. Run pip install --upgrade pyarrow.") from error
    except (OSError, ValueError) as error:
        raise error if isinstance(error, LapwingError) else LapwingError(f"{source}: {reason(error)}.") from error


def named_object(name: str) -> Any:
    """Returns the object that `package.module:name` names; the working folder is searched first."""
    if ":" not in name:
        raise LapwingError(f"{name} is neither an .npz, .csv or .parquet file nor of the form package.module:name.")
    sys.path.insert(0, os.getcwd())
    try:
        return resolve_name(name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise LapwingError(f"{name} cannot be found: {error}.") from error


COMMANDS: dict[str, Any] = {"info": info, "versions": versions, "fit": fit, "evaluate": evaluate, "report": report}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; without one, prints the versions. Wrong input ends with one sentence and exit code 2."""
    try:
        command, options = parsed(sys.argv[1:] if arguments is None else arguments)
        command(**options)
    except LapwingError as error:
        text = re.sub(r"likelihood=['\"](\w+)['\"]", r"--likelihood \1", str(error))  # as the command line spells it
        print(f"lapwing: {text}", file=sys.stderr)
        raise SystemExit(2) from error


def parsed(arguments: Sequence[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the function of a command, and its arguments."""
    if not arguments or [*arguments] == ["versions"]:
        return versions, {}
    if len(arguments) == 2 and arguments[0] == "info" and not arguments[1].startswith("-"):  # without jsonargparse
        return info, {"file": arguments[1]}
    parse = extra("jsonargparse").ArgumentParser
    parser = parse(prog="lapwing", exit_on_error=False, epilog="A demo: run `make demo` in a checkout of lapwing.")
    commands = parser.add_subcommands()
    for name, command in COMMANDS.items():
        text = (command.__doc__ or "").partition("\n")[0]
        options = parse(description=text, exit_on_error=False)
        options.add_function_arguments(command, as_positional=True)
        commands.add_subcommand(name, options, help=text)
    try:
        chosen = parser.instantiate(parser.parse_args(arguments))
    except (argparse.ArgumentError, ValueError) as error:  # with a list of what each type of a union objects to
        text = " ".join(str(error).split())
        objections = [part for part in text.split(" - ")[1:] if "NoneType" not in part.partition(" Given")[0]]
        if objections and "import path string: " in objections[-1]:
            methods = [n for n, kind in vars(lw).items() if isinstance(kind, type) and issubclass(kind, lw.Method)]
            raise LapwingError(f"--method is not one of {', '.join(sorted({*methods} - {'Method'}))}.") from error
        if "Expected a <class 'dict'>" in text:
            raise LapwingError("Other inputs need a name: --foreign.noise noise.npz.") from error
        text = text.replace(f"required: {arguments[0]}.", "required: ")
        raise LapwingError(objections[-1].partition(" Given value")[0] if objections else text) from error
    return COMMANDS[chosen.subcommand], chosen[chosen.subcommand].as_dict()
