"""Data of the user: batches, loaders, arrays and frames, the shares of several processes, and progress bars.

This room imports only `ranks`, `linalg` and `errors`. Begin with `batches.py`, then `inputs.py` and `data.py`.
"""
