"""The `trl-ppo` command line."""
