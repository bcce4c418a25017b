"""The way and the link that held-out data chose the numbers of a posterior for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..covariance import AnyLatent
from ..errors import LapwingError
from ..likelihoods import Likelihood, Link
from .linearized import EXACT
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
        return None if self.via == EXACT else self.via

    def link_for(
        self, via: Way | None, link: Link | None, likelihood: Likelihood, latent: AnyLatent, one_layer: bool
    ) -> Link | None:
        """Returns the link of a prediction, if it fits; warns if its way or link is not what the data chose for.

        If only `one_layer` is treated, the last one, all ways without draws give the same variances.
        """
        mine, other = self.via or EXACT, via or self.via or EXACT
        if not (one_layer and latent.draws is None) and other.tuned_as != mine.tuned_as:
            if other.tuned_as is None:  # such as `Scaled`, whose factor has the level of the other way
                return link or (self.link if latent.draws is None else None)
            _warn("via", via, likelihood)
            return link
        chosen, default = likelihood.choose_link(latent, link), self.link or likelihood.choose_link(latent, None)
        if link is not None and type(chosen) is not type(default):
            _warn("link", link, likelihood)
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


def _warn(name: str, given: object, likelihood: Likelihood) -> None:
    line = f"Write lw.fit(model, loader, tune=lw.Validation(held_out, {name}=lw.{given!r}))."
    log.warning(
        "Held-out data chose the numbers of this posterior for other predictions than %s=lw.%r, which may need another "
        "prior precision. %s", name, given, f"Leave {name}= out." if likelihood.head_numbers else line,
    )  # fmt: skip
