"""The way and the link that held-out data chose the numbers of a posterior for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..errors import LapwingError, shown
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
    def contracts(self) -> bool:
        """Whether one contraction of the Jacobian gives the latents of all candidates."""
        return self.via is None or self.via == Linearized()

    def link_for(self, via: Way | None, link: Link | None, default: Callable[[], Link]) -> Link | None:
        """Returns the link of a prediction; warns if its way or its link is another one than the data chose for."""
        mine, other = self.via or DefaultWay(), via or self.via or DefaultWay()
        if other.tuned_as not in (None, mine.tuned_as):
            _warn("via", via)
            return link
        if link is not None and type(link) is not type(self.link or default()):
            _warn("link", link)
        return self.link if link is None else link

    def to_json(self) -> dict[str, Any]:
        """Returns the way and the link as values that JSON can store; raises for a way that was fitted."""
        return {"via": _described(self.via), "link": _described(self.link)}

    @classmethod
    def from_json(cls, data: dict[str, Any] | None) -> Aim | None:
        """Returns the way and the link of `to_json`, of classes that are known here; None for None."""
        return None if data is None else cls(_restored(data["via"], Way), _restored(data["link"], Link))


def _warn(name: str, given: object) -> None:
    log.warning(
        "Held-out data chose the numbers of this posterior for other predictions than %s=lw.%r, which may need another "
        "prior precision. Write lw.fit(model, loader, tune=lw.Validation(held_out, %s=lw.%r)).",
        name, given, name, given,
    )  # fmt: skip


def _described(value: Any) -> Any:
    """Returns options as their class and their fields, and other values as they are."""
    if not is_dataclass(value):
        if value is not None and not isinstance(value, (bool, int, float, str, tuple)):
            raise LapwingError(
                f"via=... holds {shown(value)}, which was fitted to a posterior, and a tuning makes a new one. Write "
                "tune=lw.Validation(held_out, via=lw.Streamlined())."
            )
        return value
    return {"class": type(value).__name__} | {f.name: _described(getattr(value, f.name)) for f in fields(value)}


def _restored(data: Any, root: type) -> Any:
    """Returns the options that `_described` has described, of a subclass of the root."""
    if not isinstance(data, dict):
        return tuple(data) if isinstance(data, list) else data
    kinds, found = [root], {}
    while kinds:
        kind = kinds.pop()
        found[kind.__name__] = kind
        kinds += kind.__subclasses__()
    return found[data["class"]](**{name: _restored(v, root) for name, v in data.items() if name != "class"})
