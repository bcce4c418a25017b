"""Somebody else's network, run safely and watched: the gate, tracing, the probe, module state, autocast.

Nothing here writes to the network. It imports `jacobian` (what a layer's Jacobian is), `data` (what a batch is),
`linalg` and `errors`. Begin with `calling.py` (how the network is run), then `gate.py` (what is refused), `tracing.py`
(what ran) and `probe.py` (what of it can be trusted).
"""
