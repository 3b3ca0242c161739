"""Supervised fine-tuning: trajectories as training data, and how nano learns from nothing."""
