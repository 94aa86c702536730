"""The algorithm: rollouts, updates, and their mathematics."""
