"""Li, Klasson, Solin, Trapp: Streamlining Prediction in Bayesian Deep Learning, 2025."""

THREADS = 1  # seconds are processor seconds of one thread
