"""The papers' tables and figures, run again with lapwing: a folder a paper, what they share in `common`."""
