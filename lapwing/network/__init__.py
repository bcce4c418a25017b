"""Somebody else's network, run safely and watched: batches, the gate, tracing, the probe, module state, autocast.

Nothing here writes to the network. It imports `jacobian` (what a layer's Jacobian is), `linalg` and
`errors`. Begin with `batches.py` (what a batch is), then `calling.py` (how the network is run), `gate.py` (what is
refused), `tracing.py` (what ran) and `probe.py` (what of it can be trusted).
"""
