"""What the papers' tables and figures need: their networks, and readers of the data sets that LAPWING_DATA names."""

from __future__ import annotations
