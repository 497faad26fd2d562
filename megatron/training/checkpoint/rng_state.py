"""The random state of a rank, as plain data that a checkpoint can hold.

Everything that upstream draws from: Python, numpy, torch, the device, and Megatron's tracker of the generators that
differ or agree over tensor parallel ranks. Numpy's state becomes a tensor, so that nothing but plain data is stored.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megatron.core import tensor_parallel


def rng_state() -> dict[str, Any]:
    """The state of every generator of this process."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put every generator of this process into `state`."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(state["tracker"]))  # which it keeps, and writes to
