"""Files: tensors and one JSON header in a safetensors file, written to a temporary name and renamed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .errors import LapwingError

FORMAT = 1
KEY = "lapwing"


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Writes tensors and a JSON header; the file appears whole or not at all.

    Args:
        path: where to.
        tensors: by name; moved to the CPU.
        header: JSON.

    Raises:
        LapwingError: if the folder does not exist, or the path is one.
    """
    path = Path(path)
    if path.is_dir():
        raise LapwingError(
            f"Asked to save to {path}, found that it is a folder; a file's name is needed: write "
            f"{str(path / 'posterior.safetensors')!r}."
        )
    if not path.parent.is_dir():
        raise LapwingError(
            f"Asked to save to {path}, found no folder {path.parent}; an existing folder is needed: create it with "
            f"pathlib.Path({str(path.parent)!r}).mkdir(parents=True)."
        )
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    data = save(plain, {KEY: json.dumps({"format": FORMAT, **header})})
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads tensors and header.

    Raises:
        LapwingError: case 13, a file that is missing, truncated, foreign or newer than this library.
    """
    path = Path(path)
    if not path.is_file():
        raise LapwingError(f"Asked to load {path}, found no such file; write posterior.save({str(path)!r}) first.")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise LapwingError(
            f"Asked to load {path}, found a file that is no safetensors file or is truncated ({error}); a file written "
            "by posterior.save(path) is needed: save it again."
        ) from error
    header = _header(metadata.get(KEY))
    if header is None:
        raise LapwingError(
            f"Asked to load {path}, found a safetensors file of another origin; a file written by posterior.save(path) "
            "is needed: pass that path to lw.load(path, model)."
        )
    if header["format"] > FORMAT:
        raise LapwingError(
            f"Asked to load {path}, found format {header['format']}, newer than the {FORMAT} this version reads; a "
            "newer lapwing is needed: pip install -U lapwing."
        )
    return tensors, header


def _header(text: str | None) -> dict[str, Any] | None:
    """Returns the JSON header with its format number, or None where there is no such thing."""
    try:
        header = json.loads(text or "")
    except json.JSONDecodeError:
        return None
    return header if isinstance(header, dict) and isinstance(header.get("format"), int) else None
