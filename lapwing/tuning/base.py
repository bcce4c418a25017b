"""The contract between a tuning and `fitting/fit.py`: what goes into a tuning, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..posterior import Posterior


@dataclass(frozen=True)
class Training:
    """What a tuning gets of a fit, beside the posterior.

    Attributes:
        loader: the training data.
        prefixes: posteriors of the first samples alone, by rising number, if the tuning asks for them; with
            `data_size`, the posterior of all samples too, not scaled.
        shown: how many samples the loader shows, or None if unknown. The posterior may be of fewer.
    """

    loader: Iterable[Any] = ()
    prefixes: tuple[Posterior, ...] = ()
    shown: int | None = None


class Tuning(ABC):
    """How prior precision and noise variance are chosen where the user gave none.

    Attributes:
        prefixes: for how many first parts of the data (a half, a quarter, ...) the tuning needs posteriors.
    """

    prefixes: int = 0

    def reads_evidence(self, prior_open: bool, noise_open: bool) -> bool:
        """Whether the tuning reads the lower bound of the evidence, by what is open."""
        return prior_open or noise_open

    @abstractmethod
    def tune(self, posterior: Posterior, training: Training) -> Posterior:
        """Returns the tuned posterior; numbers that the user gave are kept."""
