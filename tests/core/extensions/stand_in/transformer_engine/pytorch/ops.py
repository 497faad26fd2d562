"""Names that megatron-core derives from, annotates with or puts in tables, and does not use here."""

import torch


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return torch.nn.Module
