"""The kit under every trainer: `optim.py` (optimizer, schedule), `metrics.py` (log, curves)."""
