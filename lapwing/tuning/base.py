"""The contract between a tuning and `fitting/fit.py`: what a tuning is given, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..posterior import Posterior


@dataclass(frozen=True)
class Training:
    """What a tuning may know of the fit beside its posterior.

    Attributes:
        loader: the training data.
        prefixes: posteriors of the first samples alone, by rising number, where the tuning asks for them; with
            `data_size`, that of all samples too, not scaled.
        shown: how many samples the loader shows, where that is known: the posterior may be one of fewer.
    """

    loader: Iterable[Any] = ()
    prefixes: tuple[Posterior, ...] = ()
    shown: int | None = None


class Tuning(ABC):
    """How prior precision and noise variance are chosen where they were not given.

    Attributes:
        prefixes: how many posteriors of first parts of the data (a half, a quarter, ...) the tuning wants.
    """

    prefixes: int = 0

    def reads_evidence(self, prior_open: bool, noise_open: bool) -> bool:
        """Whether the evidence's lower bound will be asked for, given what is left to tune."""
        return prior_open or noise_open

    @abstractmethod
    def tune(self, posterior: Posterior, training: Training) -> Posterior:
        """Returns the tuned posterior; numbers that the user gave are kept."""
