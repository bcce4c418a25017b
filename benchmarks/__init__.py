"""Measurements, each written to `benchmarks/results` with the machine and the seed beside it."""
