"""Files that become visible when they are complete, and the file of a posterior, a detector or a checkpoint.

This file is safetensors, with a JSON header and a digest of both.

Tensors are stored by name. The header is JSON text in the metadata, under `KEY`. Its entry `sha256` is one digest of
the rest of the header and of all tensors, and shows damage.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import LapwingError, shown

FORMAT = 7  # the format that is written: see docs/file-format.md
OLDEST = 5  # the first format that every later version reads
KEY = "lapwing"  # of the JSON header in the metadata of the safetensors file

T = TypeVar("T")


def write_safetensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Writes tensors and a JSON header to one file by `replacing`.

    Tensors that are on another device, not contiguous, or share memory are copied, as safetensors needs them.
    """
    with replacing(path) as new:
        text: dict[str, Any] = json.loads(json.dumps({**header, "format": FORMAT}, allow_nan=False))
        plain: dict[str, Tensor] = {}
        storages: set[int] = set()
        for name, tensor in tensors.items():
            value = tensor.detach().cpu().resolve_conj().resolve_neg()
            # an expanded tensor of one entry counts as contiguous, but its bytes cannot be viewed
            if not value.is_contiguous() or value.numel() == 1 or value.untyped_storage().data_ptr() in storages:
                value = value.clone(memory_format=torch.contiguous_format)
            storages.add(value.untyped_storage().data_ptr())
            plain[name] = value
        save_file(plain, new, {KEY: json.dumps({**text, "sha256": _digest(plain, text)})})


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a path for a new file or folder, which replaces `path` only when it is complete, and has the same name.

    Until then it is in a hidden folder next to `path`. Files next to it in that folder move too, before it. A link is
    followed. An old file keeps its mode, and a new file gets the mode that the umask allows.
    """
    target, mode = place_of(path)
    folder = target.parent / f".{target.name[:200]}-{secrets.token_hex(8)}.tmp"
    new = folder / target.name
    try:
        folder.mkdir()
        yield new
        mode = stat.S_IMODE(folder.stat().st_mode) & 0o666 if mode is None else mode  # as the umask allows
        for part in sorted(folder.iterdir(), key=new.__eq__):
            if part.is_file():
                os.chmod(part, mode)
                with open(part, "rb+") as file:
                    os.fsync(file.fileno())
            os.replace(part, target.parent / part.name)
    except LapwingError as error:
        if isinstance(error.__cause__, (OSError, SafetensorError)):  # of a file in a new folder
            raise _unwritable(path, error.__cause__) from error
        raise
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise _unwritable(path, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prefixed(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """Returns values under the names "prefix/name"."""
    return {f"{prefix}/{name}": value for name, value in values.items()}


def under(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """Returns the values under names "prefix/name", by name: the inverse of `prefixed`."""
    start = f"{prefix}/"
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads the tensors and the header of a file that `write_safetensors` wrote; raises if it is damaged or foreign."""
    try:
        if Path(path).is_dir():
            first = str(Path(path) / "member-0.safetensors")
            raise LapwingError(
                f"{_shown(path)} is a folder. If a mixture wrote it, read each member, lw.load({first!r}, model), and "
                "join them by lw.mixture([...])."
            )
        if not Path(path).is_file():
            raise LapwingError(f"There is no file {_shown(path)}. Write it with posterior.save({str(path)!r}).")
        with safe_open(str(path), "pt") as opened:
            metadata = opened.metadata() or {}
            if KEY not in metadata:
                raise ValueError("it was not written by lapwing")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        header = json.loads(metadata[KEY])
        version = header["format"]
        if type(version) is not int or version < 1:
            raise ValueError("its format is unknown")
        if not OLDEST <= version <= FORMAT:
            line = f"newer than the {FORMAT} that this version reads. Install a newer version of lapwing-torch."
            if version < OLDEST:
                line = f"older than the {OLDEST} that this version reads. Fit again and write it with "
                line += "posterior.save(path)."
            raise LapwingError(f"The file {_shown(path)} has format {version}, {line}")
        if header.pop("sha256") != _digest(tensors, header):
            raise ValueError("its digest does not agree with its contents")
    except LapwingError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        raise LapwingError(
            f"The file {_shown(path)} is damaged or has another origin than posterior.save(path): {reason(error)}. "
            "Save the posterior again, and pass the path of that file to lw.load(path, model)."
        ) from error
    return tensors, header


def place_of(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Returns the file that a path leads to, and its mode, or None if it does not exist yet."""
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target, None
    except (OSError, ValueError, TypeError) as error:
        raise _unwritable(path, error) from error
    if not stat.S_ISREG(mode):
        raise LapwingError(f"{target} is not an ordinary file. Pass the name of one, such as 'posterior.safetensors'.")
    return target, stat.S_IMODE(mode)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises if `path` is a folder or a read-only file, or if no file can be created in its folder."""
    target, mode = place_of(path)
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
        if mode is not None:
            open(target, "rb+").close()
    except OSError as error:
        raise _unwritable(path, error) from error


def remove_temporaries(target: Path) -> None:
    """Removes the temporary folders of `target` that killed processes left next to it."""
    for left in target.parent.glob(f".{glob.escape(target.name[:200])}-{'[0-9a-f]' * 16}.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a JSON header and of the name, dtype, shape and bytes of each tensor."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _unwritable(path: Any, error: Exception) -> LapwingError:
    return LapwingError(
        f"The file {_shown(path)} cannot be written: {reason(error)}. Create its folder if it is missing, or pass the "
        "name of a file in a folder that you may write to."
    )


def _shown(path: object) -> str:
    return str(path) if isinstance(path, (str, os.PathLike)) else shown(path)


def reason(error: Exception) -> str:
    """Returns the first line of an error, at most 200 characters, with its class if the text alone says little."""
    text = getattr(error, "strerror", None) or str(error)
    text = text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__}: {text}"
    return text.partition("\n")[0].rstrip(".")[:200]
