"""Prompts and supervised rows."""
