"""The algebra of Jacobians: products, Kronecker factors and norms of blocks that are never formed.

It works on tensors alone and knows no network; it imports `linalg`, `contents` and `errors`. Begin with `jacobian.py`
(what every block can do), then `outer.py` (sums of `g aᵀ`, which most layers are) and `layers/` (one file a family).
"""
