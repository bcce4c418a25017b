"""Faller, Martin: Optimal Subspace Inference for the Laplace Approximation of Bayesian Neural Networks, 2025."""
