"""Completions, run log and report of a run."""
