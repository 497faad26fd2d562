"""From token files to micro-batches: tokenizers, datasets, the order of samples, and where each of them came from."""
