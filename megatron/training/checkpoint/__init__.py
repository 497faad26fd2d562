"""Checkpoints: where they lie, what they hold, and how a run goes on from one as if it had never stopped."""
