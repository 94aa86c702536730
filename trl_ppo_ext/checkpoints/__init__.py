"""Checkpoints: what is saved, resumed and pushed."""
