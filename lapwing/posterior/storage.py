"""Files: what a saved posterior holds, and the safetensors file that carries it with a checksum of itself.

A file holds everything but the network, of which it keeps fingerprints to know it again by: tensors and a JSON header.
A file is written under a temporary name and renamed, so that it is whole or not there. The checksum is the SHA-256 of
all bytes of the file, its own 64 digits taken as zeros; nothing is read before it agrees.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..contents import (
    Entry,
    Mismatch,
    check_json,
    check_tensors,
    is_count,
    is_positive,
    is_positive_or_none,
    largest,
)
from ..covariance import COVARIANCES
from ..errors import LapwingError
from ..likelihoods.registry import options_of
from ..network.stamp import fingerprint
from ..tangent import Tangent
from ..tangent.stored import to_json

if TYPE_CHECKING:
    from .posterior import Posterior

FORMAT = 4
"""The one format that is written and read; docs/file-format.md describes it."""

KEY = "lapwing"
"""The metadata that holds the JSON header."""

BLANK = b"0" * 64
"""What stands in the place of the checksum while it is computed."""

CHECKSUM = re.compile(rb'(?<="lapwing":"{\\"sha256\\": \\")[0-9a-f]{64}(?=\\")')
"""The checksum in a file's head, where the header comes first; quotation marks within its texts are escaped twice."""

HEAD_BYTES = 100_000_000
"""A safetensors file's head is no longer than this."""

PIECE = 2**20
"""So many bytes are read at once."""

ABANDONED = 3600.0
"""A temporary file that nobody wrote to for so many seconds is of a process that was killed."""

HEADER = {
    "format": int, "tangent": dict,
    "covariance": {"class": str, "extra": dict},
    "likelihood": {
        "name": str, "noise_variance": is_positive_or_none, "logit_temperature": is_positive_or_none, "options": dict,
    },
    "given": (bool, bool),
    "samples": lambda samples: is_count(samples) and samples > 0,
    "data_factor": lambda factor: is_positive(factor) and factor >= 1,
    "temperature": is_positive, "method": dict, "forward": bool, "dtypes": dict,
}  # fmt: skip
"""What a file's header must be."""


def save(posterior: Posterior, path: str | os.PathLike[str]) -> None:
    """Writes what `load` needs to one file: `Posterior.save` once the network is known to be that of the fit.

    Raises:
        LapwingError: for a path that cannot be written, and for what `load` would refuse, such as NaN.
    """
    kind = type(posterior.covariance)
    if COVARIANCES.get(kind.__name__) is not kind:
        raise LapwingError(
            f"The covariance class {kind.__name__} is not registered, so files cannot name it. Decorate it with "
            "@lapwing.covariance.register."
        )
    tensors = {f"covariance/{name}": tensor for name, tensor in posterior.covariance.tensors().items()}
    tensors |= {f"prior_mean/{name}": tensor for name, tensor in posterior.prior.mean.items()}
    tensors |= {f"statistics/{name}": tensor for name, tensor in posterior.statistics.items()}
    tensors |= {f"history/{name}": tensor for name, tensor in posterior.history.items()}
    forward = posterior.tangent.positions.forward if posterior.tangent.positions else posterior.tangent.forward
    state = posterior.tangent.state()
    tensors |= {f"weights/{name}": fingerprint(value) for name, value in state.items()}
    header = {
        "tangent": to_json(posterior.tangent),
        "covariance": {"class": kind.__name__, "extra": posterior.covariance.extra()},
        "likelihood": {
            "name": posterior.likelihood.name,
            "noise_variance": posterior.noise_variance,
            "logit_temperature": posterior.logit_temperature,
            "options": options_of(posterior.likelihood),
        },
        "given": [posterior.prior.fixed, posterior.noise_fixed],
        "samples": posterior.samples,
        "data_factor": posterior.data_factor,
        "temperature": posterior.temperature,
        "method": asdict(posterior.method),
        "forward": forward is not None,
        "dtypes": {name: str(value.dtype) for name, value in state.items()},
    }
    try:
        read = json.loads(json.dumps({"format": FORMAT, **header}))
        check_json(read, HEADER, "the header")
        check_contents(posterior.tangent, tensors, read)
    except Mismatch as error:
        raise LapwingError(
            f"The posterior cannot be saved, since {error}. Look at posterior.diagnose(), and fit again with other "
            "options."
        ) from error
    write(path, tensors, header)


def check_contents(tangent: Tangent, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Raises where the tensors that predictions are made of do not belong to a checked header and a network.

    The network's fingerprints are compared besides, and the history may hold anything.
    """
    kind, bound = COVARIANCES[header["covariance"]["class"]], largest(tangent.dtype, 1 / 2)
    described = kind.entries(tangent, header["covariance"]["extra"])
    entries = {f"covariance/{name}": entry for name, entry in described.items()}
    entries |= {f"prior_mean/{b.name}": Entry((b.size,), (tangent.dtype,), -bound, bound) for b in tangent.blocks}
    entries |= {name: Entry() for name in tensors if name.startswith("statistics/")}
    used = {name: value for name, value in tensors.items() if not name.startswith(("weights/", "history/"))}
    check_tensors(used, entries)


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Writes tensors and a JSON header; the file appears whole or not at all.

    A link is followed, an existing file keeps its mode, and a new one gets the mode that the umask allows.

    Raises:
        LapwingError: if the file cannot be written there; an old one is kept.

    Cost: memory of a copy of one tensor, where that is not contiguous or on another device.
    """
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))  # all are aligned
    head = _head(tensors, _text(header))
    place = CHECKSUM.search(head)
    assert place is not None
    digest = hashlib.sha256(head)
    try:
        target, mode = place_of(path)
        with _replacing(target, mode) as file:
            file.write(head)
            for tensor in tensors.values():
                data = _bytes_of(tensor)
                digest.update(data)
                file.write(data)
            file.seek(place.start())
            file.write(digest.hexdigest().encode())
    except LapwingError:
        raise
    except (OSError, ValueError, TypeError) as error:  # NUL in a name is a ValueError
        raise _unwritable(path, error) from error


def _unwritable(path: Any, error: Exception) -> LapwingError:
    return LapwingError(
        f"The file {_shown(path)} cannot be written: {_reason(error)}. Pass the name of a file in a folder that you "
        "may write to, such as 'posterior.safetensors'."
    )


def _text(header: dict[str, Any]) -> str:
    """Returns the JSON header, before the checksum is known."""
    return json.dumps({"sha256": BLANK.decode(), "format": FORMAT, **header}, allow_nan=False)


def _head(tensors: dict[str, Tensor], text: str) -> bytes:
    """Returns how a safetensors file begins whose tensors follow in this order."""
    names = {dtype: _dtype_name(dtype) for dtype in {tensor.dtype for tensor in tensors.values()}}
    entries: dict[str, Any] = {"__metadata__": {KEY: text}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def _dtype_name(dtype: torch.dtype) -> str:
    """Returns what safetensors calls a dtype, from the file that it would write."""
    return json.loads(safetensors.torch.save({"x": torch.empty(0, dtype=dtype)})[8:])["x"]["dtype"]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor as a file holds them."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.stride(0) != 1:  # of one number, expanded: it is contiguous, and has no bytes that can be viewed
        plain = torch.empty(plain.shape, dtype=plain.dtype, device="cpu").copy_(plain)
    return plain.view(torch.uint8).numpy().data


def place_of(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Returns the file that a path leads to, and its mode, None where it does not exist yet."""
    try:
        target = Path(os.path.realpath(Path(path)))
        mode = target.stat().st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise LapwingError(
                f"There is no folder {target.parent}. Create it with "
                f"pathlib.Path({str(target.parent)!r}).mkdir(parents=True)."
            ) from None
        return target, None
    except (OSError, ValueError) as error:  # NUL in a name is a ValueError
        raise _unwritable(path, error) from error
    if stat.S_ISDIR(mode):
        raise LapwingError(
            f"{target} is a folder. Pass the name of a file, such as {str(target / 'posterior.safetensors')!r}."
        )
    if not stat.S_ISREG(mode):
        raise LapwingError(f"{target} is not an ordinary file. Pass the name of one, such as 'posterior.safetensors'.")
    return target, stat.S_IMODE(mode)


def check_writable(target: Path) -> None:
    """Raises where no file can be made beside the target: files are written under another name, and then renamed."""
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise _unwritable(target, error) from error


def temporary_pattern(target: Path) -> str:
    """Returns which names temporary files have that become a file, as `Path.glob` takes it."""
    return f".{glob.escape(target.name[:200])}-{'[0-9a-f]' * 16}.tmp"


@contextlib.contextmanager
def _replacing(target: Path, mode: int | None) -> Iterator[BinaryIO]:
    """Opens a temporary file beside a file, which it replaces when all is written; removes what killed writers left."""
    for left in target.parent.glob(temporary_pattern(target)):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED:
                left.unlink()
    temporary = target.parent / f".{target.name[:200]}-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(temporary, flags, 0o666 if mode is None else mode & 0o777)
    try:
        with open(handle, "wb") as file:
            yield file
            if mode is not None:
                os.chmod(temporary, mode)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every system opens folders
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads tensors and header, once the checksum agrees.

    Raises:
        LapwingError: for a file that is missing, damaged, foreign, or of another version's format.

    Cost: the file is read twice, a mebibyte at a time for the checksum: about 1 s a gigabyte.
    """
    try:
        path = Path(path)
        if path.exists() and not path.is_file():
            raise LapwingError(f"{_shown(path)} is not a file. Pass the name of one that posterior.save(path) wrote.")
        if not path.is_file():
            raise LapwingError(f"There is no file {_shown(path)}. Write it with posterior.save({str(path)!r}).")
        with open(path, "rb") as file:
            _check_sum(path, file)
        with safe_open(str(path), "pt") as opened:
            text = opened.metadata()[KEY]
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        header = json.loads(text, parse_constant=_no_number)
        version = header["format"]
        del header["sha256"]
        if type(version) is not int or version < 1:
            raise ValueError("its format is unknown")
        if version < FORMAT:
            raise LapwingError(
                f"The file {_shown(path)} has format {version}, older than the {FORMAT} that this version reads. Fit "
                "again and write it with posterior.save(path)."
            )
    except LapwingError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        raise LapwingError(
            f"The file {_shown(path)} cannot be read: {_reason(error)}. Pass a file that posterior.save(path) wrote."
        ) from error
    if version > FORMAT:
        raise LapwingError(
            f"The file {_shown(path)} has format {version}, newer than the {FORMAT} that this version reads. Install a "
            "newer one with pip install -U lapwing."
        )
    return tensors, header


def _check_sum(path: Path, file: BinaryIO) -> None:
    """Raises for a file whose checksum is missing or does not agree with its bytes."""
    start = file.read(8)
    head = file.read(min(int.from_bytes(start, "little"), HEAD_BYTES))
    checksums = CHECKSUM.findall(head)
    if len(checksums) != 1:
        raise LapwingError(
            f"The file {_shown(path)} has another origin than posterior.save(path), or is damaged. Pass the path of a "
            "saved posterior to lw.load(path, model)."
        )
    digest = hashlib.sha256(start)
    digest.update(CHECKSUM.sub(BLANK, head))
    piece = bytearray(PIECE)
    while count := file.readinto(piece):  # type: ignore[attr-defined]
        digest.update(memoryview(piece)[:count])
    if digest.hexdigest().encode() != checksums[0]:
        raise LapwingError(
            f"The file {_shown(path)} is damaged or truncated: its checksum does not agree with its contents. Save the "
            "posterior again with posterior.save(path)."
        )


def _no_number(text: str) -> None:
    raise ValueError(f"its header holds {text}")


def _shown(path: object) -> str:
    """Returns a path as a message shows it: in one line, and not all of a very long one."""
    text = str(path) if isinstance(path, (str, os.PathLike)) else repr(path)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _reason(error: Exception) -> str:
    """Returns what went wrong, in a few words."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.partition("\n")[0].rstrip(".")[:200]
