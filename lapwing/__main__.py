"""`python -m lapwing` is the command line; without a command it prints what a bug report needs."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
