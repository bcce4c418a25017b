"""The one exception that lapwing raises for input it cannot use."""

from __future__ import annotations


class LapwingError(ValueError):
    """Raise when lapwing cannot do what it was asked to do with what it was given.

    Every message is one clear sentence (or two short ones) with four parts, in this order:

    1. what was asked, in the words of the call;
    2. what was found, with the user's own names, shapes, dtypes or values;
    3. what is accepted;
    4. the line to write instead.

    For example: "accuracy needs one label for each of the 32 rows of probs, and labels has shape (31,); pass labels of
    shape (32,), e.g. labels[:32]." A message without part 4 is a riddle; a message without part 2 is an accusation.

    It is a ``ValueError``, so code that guards a call with ``except ValueError`` keeps working.

    Example:
        >>> import lapwing as lw
        >>> try:
        ...     lw.MonteCarlo(draws=0)
        ... except lw.LapwingError as error:
        ...     print("draws=0" in str(error))
        True
    """
