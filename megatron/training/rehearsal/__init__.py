"""Runs that only find something out about capture: what it would write, and whether it changes a bit of training."""
