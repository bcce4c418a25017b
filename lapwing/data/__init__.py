"""What people pass as data: batches, loaders, arrays and frames, the shares of several processes, progress bars.

It imports `ranks`, `linalg` and `errors`, and no network. Begin with `batches.py` (what a batch is), then `loaders.py`.
"""
