"""The passes of a method over the data, with checkpoints and over several processes.

It imports `methods` and the rooms below it. Begin with `runner.py`. `checkpoint.py` keeps the states of passes in a
file, and `fingerprints.py` compares what two processes, or two calls, were given.
"""
