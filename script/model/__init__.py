"""Importing pretrained Llama-type checkpoints, and measuring their loss."""
