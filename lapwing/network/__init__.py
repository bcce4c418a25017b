"""Runs a user's network and records its layers: the gate, tracing, the probe, module state, autocast.

Nothing here changes the network. The package imports `jacobian` (Jacobians of layers), `data` (batches), `linalg` and
`errors`. Begin with `call.py` (calls the network), then `gate.py` (refuses networks), `tracing.py` (records a
forward pass) and `probe.py` (checks the record).
"""
