"""Deng, Zhou, Zhu: Accelerated Linearized Laplace Approximation for Bayesian Deep Learning, 2022."""
