"""Studies of hand-made tables: a small model whose numbers are those of Gaussian data, and faults planted in it."""

import numpy as np
import pandas
import pytest

from megatron.quantscope.analysis.findings.reference import gaussian
from megatron.quantscope.analysis.study import Study

LAYERS, WIDTH, COUNT = 8, 64, 64 * 1024
FORMATS = ("fp16", "hifp8", "fp8_e4m3", "mxfp8", "mxfp4")
NOISE = {"fp16": 1e-7, "hifp8": 5e-4, "fp8_e4m3": 7e-4, "mxfp8": 7e-4, "mxfp4": 1.3e-2}  # of unit signal
SITES = {
    "fc1.x": ("input", "activation", "forward", "pre", True),
    "fc1.w": ("weight", "weight", "forward", "pre", True),
    "fc1.y": ("output", "activation", "forward", "post", False),
    "fc1.dy": ("grad_output", "gradient", "backward", "pre", True),
}


def _row(quant_type, rank, layer, site, counter):
    tensor_name, family, operation, phase, operand = SITES[site]
    row = {
        "quant_type": quant_type, "run_id": "r", "iteration": 0, "micro_batch": 0, "rank": rank, "sample_idx": rank,
        "layer_type": "linear", "layer_idx": layer, "module": f"decoder.layers.{layer}.mlp.linear_fc1",
        "component": "linear", "operation": operation, "phase": phase, "tensor_name": tensor_name,
        "stage": "complete", "shape": [1024, 1, WIDTH], "site": site, "symbol": site.partition(".")[2],
        "family": family, "operand": operand, "file": f"{quant_type}/{rank}/{counter}.pt", "offset": None,
        "counter": counter, "tp_rank": 0, "shard": "[]",
        "count": COUNT, "zero": 0, "nan": 0, "inf": 0, "bytes": 2 * COUNT, "min": -4.2, "max": 4.2, "amax": 4.2,
        "mean": 0.0, "sum": 0.0, "rms": 1.0, "std": 1.0, "sum_squares": float(COUNT), "median_magnitude": 0.67,
        "kurtosis": 3.0, "top": [4.2, 4.1, 4.0], "channel_amax": np.linspace(3.0, 4.2, WIDTH).astype("f4"),
        "blocks": COUNT // 32, "zero_blocks": 0,
    }  # fmt: skip
    for name in FORMATS:
        found = gaussian(name)
        for treatment in [name, f"{name}@2"] if name.startswith("mx") else [name]:
            row[f"{treatment}.error_squares"] = NOISE[name] * COUNT
            row[f"{treatment}.underflow"] = round(found.underflow_percent * COUNT / 100)
            row[f"{treatment}.saturated"] = round(found.saturated_percent * COUNT / 100)
            row[f"{treatment}.lost"] = 0
            row[f"{treatment}.dead_blocks"] = 0
            row[f"{treatment}.sqnr_db"] = -10 * np.log10(NOISE[name])
    for name in ("fp16", "hifp8"):
        row |= {f"{name}_pow2.{part}": row[f"{name}.{part}"] for part in _PARTS}
    return row


_PARTS = ("error_squares", "underflow", "saturated", "lost", "dead_blocks", "sqnr_db")


@pytest.fixture
def table():
    """`table(*types, ranks=1)`: a summary without a fault; weights are the same on every rank."""

    def make(*types, ranks=1):
        rows = []
        for quant_type in types or ("bf16",):
            for rank in range(ranks):
                counter = 0
                for layer in range(LAYERS):
                    for site in SITES:
                        counter += 1
                        rows.append(_row(quant_type, rank, layer, site, counter))
        return pandas.DataFrame(rows)

    return make


@pytest.fixture
def study_with():
    """A study of a summary, with further fields."""

    def make(summary, **fields):
        return Study(source="here", index=summary, summary=summary, **fields)

    return make


def at(summary, site, layer=None, rank=None):
    """The rows of a site, as a mask."""
    mask = summary["site"] == site
    if layer is not None:
        mask &= summary["layer_idx"] == layer
    return mask if rank is None else mask & (summary["rank"] == rank)


@pytest.fixture
def plant():
    """`plant(summary, site, layer, rank=None, **columns)`: set columns of some rows (`__` in a name is a dot)."""

    def change(summary, site, layer=None, rank=None, **columns):
        for name, value in columns.items():
            rows = summary.index[at(summary, site, layer, rank)]
            column = name.replace("__", ".")
            if isinstance(value, list | np.ndarray):
                for row in rows:
                    summary.at[row, column] = value
            else:
                summary.loc[rows, column] = value
        return summary

    return change
