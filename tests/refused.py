"""What a refusal must be: one of lapwing's errors, in a few sentences, with these words in this order.

Each row of a room's table has a call and words of its message. As in docs/errors.md, … stands for what is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import lapwing as lw


def refused(call: Callable[[], Any], *words: str) -> str:
    """Checks that a call is refused with these words, and returns the message."""
    with pytest.raises(lw.LapwingError) as caught:
        call()
    message, at = str(caught.value), 0
    for part in " … ".join(words).split(" … "):
        found = message.find(part, at)
        assert found >= 0, f"{part!r} is missing (or out of order) in: {message}"
        at = found + len(part)
    assert message.endswith((".", ")")), message
    assert "\n" not in message
    assert len(message) < 620, message
    return message


def each_row(table: Iterable[tuple[Callable[[], Any], str]]) -> Any:
    """Parametrises a test over the rows (call, words) of a table."""
    return pytest.mark.parametrize(("call", "words"), [pytest.param(*row, id=row[1]) for row in table])
