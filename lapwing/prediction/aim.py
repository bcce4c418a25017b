"""The way and the link that held-out data chose the numbers of a posterior for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import LapwingError
from ..likelihoods import Link
from .linearized import DefaultWay, Linearized
from .way import Way

log = logging.getLogger("lapwing")


@dataclass(frozen=True)
class Aim:
    """Held-out data chose the numbers of a posterior for predictions by this way and this link.

    Attributes:
        via: the way; None is the default way.
        link: the link; None is the default link of the likelihood for this way.
    """

    via: Way | None = None
    link: Link | None = None

    @property
    def other_way(self) -> Way | None:
        """The way, unless it is linearised: one contraction gives the linearised latents of many candidates."""
        return None if self.via == Linearized() else self.via

    def link_for(self, via: Way | None, link: Link | None, default: Callable[[], Link]) -> Link | None:
        """Returns the link of a prediction; warns if its way or its link is not the one that the data chose for."""
        mine, other = self.via or DefaultWay(), via or self.via or DefaultWay()
        if other.tuned_as not in (None, mine.tuned_as):
            _warn("via", via)
        if other.tuned_as != mine.tuned_as:
            return link
        if link is not None and type(link) is not type(self.link or default()):
            _warn("link", link)
        return link or self.link

    def to_json(self) -> list[Any]:
        """Returns the way and the link by their classes and fields, as values that JSON can store."""
        return [one and [type(one).__name__, vars(one)] for one in (self.via, self.link)]

    @classmethod
    def from_json(cls, data: Any) -> Aim | None:
        """Returns the way and the link of `to_json`, of classes that are known here; None for None."""
        kinds = {kind.__name__: kind for root in (Way, Link) for kind in _family(root)}
        for name, _ in filter(None, data or ()):
            if name not in kinds:
                raise LapwingError(
                    f"The posterior was tuned for {name}, which is not defined. Import it before lw.load."
                )
        return None if data is None else cls(*(one and kinds[one[0]](**one[1]) for one in data))


DEFAULT_AIM = Aim()
"""Predictions by the default way with the default link."""


def _family(kind: Any) -> Iterator[Any]:
    yield kind
    for sub in kind.__subclasses__():
        yield from _family(sub)


def _warn(name: str, given: object) -> None:
    log.warning(
        "Held-out data chose the numbers of this posterior for other predictions than %s=lw.%r, which may need another "
        "prior precision. Write lw.fit(model, loader, tune=lw.Validation(held_out, %s=lw.%r)).",
        name, given, name, given,
    )  # fmt: skip
