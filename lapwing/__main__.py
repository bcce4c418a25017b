"""`python -m lapwing` prints what a bug report needs."""

from __future__ import annotations

from .environment import versions

if __name__ == "__main__":
    print(versions())
