"""Moments of embeddings: the rows of an uncertain table."""

from __future__ import annotations

from typing import Any

import torch

from .fusion import aten
from .moments import Moments, Rule, Site


def embedded(site: Site, given: dict[str, Any]) -> Moments:
    """Returns the rows' means and variances; the padding token has none, as it takes no gradient in torch."""
    table, tokens, padding = given["weight"], given["indices"], given["padding_idx"]
    if not isinstance(table, Moments) or isinstance(tokens, Moments):
        raise site.refusal("with uncertain tokens", "are certain tokens")
    mean, variance = (torch.embedding(part, tokens) for part in (table.mean, table.variance))
    if padding is not None and padding >= 0:
        variance = variance * (tokens != padding)[..., None]
    return Moments(mean, variance)


RULES: dict[Any, Rule] = {aten.embedding.default: embedded}
