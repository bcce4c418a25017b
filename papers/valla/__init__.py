"""Ortega, Rodríguez-Santana, Hernández-Lobato: Variational Linearized Laplace Approximation, 2024."""

THREADS = 1  # seconds are processor seconds of one thread
