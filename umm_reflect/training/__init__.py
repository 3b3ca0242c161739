"""The kit under every trainer: optimizer and schedule, log and curves, signals."""
