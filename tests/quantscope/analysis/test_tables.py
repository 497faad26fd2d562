import json
from pathlib import Path

import numpy as np
import torch

from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.analysis.summary import summarize
from megatron.quantscope.analysis.tables import read_table, summary_columns, summary_row, write_table
from megatron.quantscope.capture import TensorRecord

TRIED = treatments(formats=["mxfp4", "hifp8"])
SPLIT = {"over": "tp", "dim": -1}


def record_of(layer_type, name, **fields):
    return TensorRecord(
        path="/a", bytes=1, layer_type=layer_type, operation="forward", quant_type="bf16", tensor_name=name, **fields
    )


def row_of(record, tensor):
    role = role_of(record.layer_type, record.tensor_name)
    return summary_row(record, summarize(tensor, role, treatments=TRIED, head_dim=record.head_dim))


def test_columns_of_parallel_runs_and_attention_are_there(tmp_path):
    records = [
        record_of("linear", "input", parallel={"tp_rank": 1, "tp_size": 2}, shard=(SPLIT,), counter=7),
        record_of("attention", "grad_output", head_dim=24, softmax_scale=0.25),
        record_of("linear", "output", run_folder=Path("run")),
    ]
    x = torch.randn(40, 1, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    path = tmp_path / "summary.parquet"
    write_table(path, [row_of(record, x) for record in records], summary_columns(one.name for one in TRIED))
    linear, attention, output = read_table(path).to_dict("records")
    assert (linear["tp_rank"], linear["counter"], json.loads(linear["shard"])) == (1, 7, [SPLIT])
    assert [list(row["gemms"]) for row in (linear, attention, output)] == [["fprop", "wgrad"], ["dp", "dv"], []]
    assert (attention["head_dim"], attention["softmax_scale"]) == (24, 0.25)
    assert not isinstance(attention["shard"], str)  # of a bare file nobody knows
    assert output["shard"] == "[]"  # whole, as its manifest says
    assert (linear["blocks"], attention["blocks"]) == (40 * 3, 40 * 4)  # of 96, and of 4 heads of 24
    assert np.isnan(output["mxfp4@2.sqnr_db"])
    assert len(output["block2_exponent_counts"]) == 0
    assert linear["mxfp4@2.sqnr_db"] > 0


def test_fractions_are_the_exponents_once_more():
    row = row_of(record_of("linear", "weight"), torch.randn(64, 96, generator=torch.Generator().manual_seed(0)))
    for prefix, blocks in (("block", 64 * 3), ("block2", 2 * 96)):
        fractions = np.reshape(row[f"{prefix}_fraction_counts"], (-1, 4))
        assert fractions.sum(axis=1).tolist() == row[f"{prefix}_exponent_counts"]
        assert fractions.sum() == blocks


def test_every_column_is_declared():
    row = row_of(record_of("linear", "weight"), torch.ones(4, 4))
    declared = summary_columns(one.name for one in TRIED)
    assert set(row) == set(declared) - {"key"}
