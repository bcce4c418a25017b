"""The contract between a tuning and `fitting.py`: what a tuning is given, and what it returns."""

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
        prefixes: posteriors of the first samples alone, by rising number, the whole data not among them; made where the
            tuning asks for them.
    """

    loader: Iterable[Any] = ()
    prefixes: tuple[Posterior, ...] = ()


class Tuning(ABC):
    """How prior precision and noise variance are chosen where they were not given.

    Attributes:
        prefixes: how many posteriors of first parts of the data (a half, a quarter, ...) the tuning wants.
    """

    prefixes: int = 0

    @abstractmethod
    def tune(self, posterior: Posterior, training: Training) -> Posterior:
        """Returns the tuned posterior; numbers that the user gave are kept."""
