"""What a session writes for one tensor: the file, its name, its metadata, its manifest row; and weights, once."""

import re
import subprocess
import sys

import pytest
import torch
import xxhash

from megatron.quantscope.capture import (
    ParallelCoordinates,
    TensorFilter,
    open_capture,
    parse_name,
)
from megatron.quantscope.formats.measuring import measure
from megatron.quantscope.formats.statistics import TensorStatistics
from tests.quantscope.capture.conftest import (
    FILES_A_PASS,
    FORMATS,
    FORMATS_OF_FILES,
    LINEAR,
    ODD_TENSORS,
    ROWS_A_PASS,
    bits,
    linear_tensors,
    manifest_of,
    read,
    rows_of,
    run_folder,
    run_iteration,
    show_backward,
    show_forward,
    stored_tensor,
)


@pytest.fixture(params=FORMATS_OF_FILES)
def save_format(request):
    return request.param


TP_1_OF_2_AND_DP_2_OF_4 = {
    **{"tp_rank": 1, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "dp_rank": 2},
    **{"dp_size": 4, "cp_rank": 0, "cp_size": 1, "ep_rank": 0, "ep_size": 1},
    **{"etp_rank": 0, "etp_size": 1},
}


class TestRows:
    def test_every_row_of_a_linear_in_order(self, open_session, save_format):
        session = open_session(save_format=save_format)
        run_iteration(session, 0)
        capture = read(session)
        assert [(row.operation, row.phase, row.tensor_name) for row in capture.records] == [
            ("forward", "pre", "input"),
            ("forward", "pre", "weight"),
            ("forward", "post", "output"),
            ("backward", "pre", "grad_output"),
            ("backward", "pre", "weight"),
            ("backward", "post", "grad_input"),
            ("backward", "post", "grad_weight"),
        ]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_content_is_what_was_shown(self, open_session, dtype, save_format):
        session, tensors = open_session(save_format=save_format), linear_tensors(dtype=dtype)
        run_iteration(session, 0, tensors=tensors)
        capture = read(session)
        for record in capture.records:
            expected = tensors[record.tensor_name]
            assert torch.equal(capture.load(record), expected)
            assert record.checksum == "xxh3_128:" + xxhash.xxh3_128(bits(expected).numpy()).hexdigest()
            assert record.statistics == TensorStatistics.from_json(measure(expected).to_json())
            assert record.shape == tuple(expected.shape)
            assert record.dtype == str(dtype).removeprefix("torch.")
        for row in manifest_of(session, "tensor"):
            assert torch.equal(stored_tensor(session, row), tensors[row["tensor_name"]])

    def test_metadata_is_complete_in_file_and_manifest(self, open_session):
        session = open_session(
            rank=5,
            parallel=ParallelCoordinates(tp_rank=1, tp_size=2, dp_rank=2, dp_size=4),
            run_id="20250101_000000_abcdef",
        )
        column, summand = {"over": "tp", "dim": -1}, {"over": "tp", "reduce": "sum"}
        site = session.site(**LINEAR, shards={"output": [column], "grad_input": [summand]})
        session.begin_iteration(7)
        session.begin_micro_batch(0, [70, 71], document_ids=[[3], [3, 4]], grad_scale=8.0)
        show_forward(site.tap(), linear_tensors(7))
        show_backward(site.tap(), linear_tensors(7))
        session.end_iteration({})
        capture = read(session)
        record = rows_of(capture, tensor_name="output")[0]
        content = torch.load(record.path, weights_only=True)
        assert set(content) == {"tensor", "metadata"}
        metadata = content["metadata"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", metadata.pop("save_time"))
        assert metadata == {
            "rank": 5,
            "sample_idx": 70,
            "iteration": 7,
            "layer_type": "linear",
            "operation": "forward",
            "quant_type": "mxfp8",
            "tensor_name": "output",
            "layer_idx": 0,
            "phase": "post",
            "component": "linear",
            "module": "decoder.layers.0.mlp.linear_fc1",
            "gemm": "fprop",
            "sample_indices": [70, 71],
            "document_ids": [[3], [3, 4]],
            "micro_batch": 0,
            "parallel": TP_1_OF_2_AND_DP_2_OF_4,
            "shard": [{"over": "tp", "dim": -1}],
            "shape": [4, 1, 16],
            "dtype": "bfloat16",
            "stage": "complete",
            "recomputed": False,
            "grad_scale": 8.0,
            "formats": FORMATS,
            "head_dim": None,
            "softmax_scale": None,
            "routed": False,
            "run_id": "20250101_000000_abcdef",
        }
        partial = rows_of(capture, tensor_name="grad_input")[0]
        assert (partial.stage, partial.shard) == ("partial", (summand,))
        assert rows_of(capture, tensor_name="input")[0].shard == ()
        line = next(row for row in manifest_of(session, "tensor") if row["tensor_name"] == "output")
        assert {name: line[name] for name in metadata} == metadata

    def test_file_names_say_what_the_metadata_says(self, open_session):
        session = open_session(rank=3, parallel=ParallelCoordinates(dp_rank=3, dp_size=4))
        run_iteration(session, 1234)
        for record in read(session).records:
            if record.reference:
                continue
            name = parse_name(record.path.name)
            for part in ("rank", "sample_idx", "iteration", "layer_idx", "operation", "phase", "tensor_name"):
                assert getattr(name, part) == getattr(record, part)
            assert name.counter == record.counter
            assert name.stamp == re.sub(r"[-:]", "", record.save_time).replace(" ", "_")

    def test_a_module_outside_the_layers(self, open_session):
        session = open_session(filter=TensorFilter.parse(["modules=output_layer"]))
        site = session.site(**(LINEAR | {"module": "output_layer", "layer_idx": None}))
        run_iteration(session, 0, site=site)
        record = read(session).records[0]
        assert record.layer_idx is None
        assert "_linear_forward_" in record.path.name

    def test_counters_grow_over_everything(self, open_session):
        session = open_session(control_iter=2, collect_micro_batches=2)
        for iteration in range(2):
            run_iteration(session, iteration, micro_batches=2)
        counters = [record.counter for record in read(session).records]
        assert counters == list(range(1, 4 * ROWS_A_PASS + 1))

    def test_manifest_rows_and_commit(self, open_session):
        session = open_session()
        run_iteration(session, 0, scalars={"lm loss": 2.25, "grad norm": float("inf")})
        session.close()
        lines = manifest_of(session)
        rows, commit, closed = lines[:-2], lines[-2], lines[-1]
        assert len(rows) == ROWS_A_PASS
        assert {(row["schema"], row["kind"], row["store"], row["offset"]) for row in rows} == {
            (2, "tensor", "pt", None)
        }
        folder = session.config.directory / "mxfp8"
        for row in rows:
            assert row["bytes"] == (folder / row["file"]).stat().st_size
        files = list(folder.glob("*.pt"))
        counted = {"rows": ROWS_A_PASS, "files": FILES_A_PASS, "bytes": sum(path.stat().st_size for path in files)}
        assert len(files) == FILES_A_PASS
        scalars = {"lm loss": 2.25, "grad norm": "inf"}
        assert commit == {"schema": 2, "kind": "commit", "iteration": 0, "scalars": scalars} | counted
        assert closed == {"schema": 2, "kind": "closed"} | counted
        summary = session.summary()
        assert {"rows": summary.rows, "files": summary.files, "bytes": summary.bytes} == counted
        assert open_capture(folder).commits == {"mxfp8": {0: {"lm loss": 2.25, "grad norm": float("inf")}}}

    def test_manifest_rows_and_commit_of_a_segment(self, open_session):
        session = open_session(save_format="segment")
        run_iteration(session, 0, scalars={"lm loss": 2.25})
        session.close()
        segment, *rows, commit, closed = manifest_of(session)
        path = run_folder(session) / "iter000_rank0_000.safetensors"
        size = path.stat().st_size
        assert segment == {"schema": 2, "kind": "segment", "iteration": 0, "file": path.name, "bytes": size}
        assert len(rows) == ROWS_A_PASS
        assert {(row["kind"], row["store"], row["file"]) for row in rows} == {("tensor", "segment", path.name)}
        assert [row["tensor_name"] for row in rows if row["reference"]] == ["weight"]  # whichever of two came second
        tensors = linear_tensors(0)
        assert [row["bytes"] for row in rows] == [2 * tensors[row["tensor_name"]].numel() for row in rows]
        counted = {"rows": ROWS_A_PASS, "files": 1, "bytes": size}
        assert commit == {"schema": 2, "kind": "commit", "iteration": 0, "scalars": {"lm loss": 2.25}} | counted
        assert closed == {"schema": 2, "kind": "closed"} | counted
        assert list(session.config.directory.rglob("*.pt")) == []

    def test_run_json(self, open_session):
        session = open_session(run_info={"command": ["pretrain_gpt.py"], "odd": {1, 2}, "nan": float("nan")})
        run_iteration(session, 0)
        info = read(session).run_info["mxfp8"]
        assert info["command"] == ["pretrain_gpt.py"]
        assert (info["run_id"], info["quant_type"]) == (session.identity["run_id"], "mxfp8")
        assert info["capture"]["control_iter"] == 1
        assert info["capture"]["directory"] == str(session.config.directory)
        assert info["nan"] == "nan"

    def test_files_open_with_torch_alone(self, open_session, tmp_path):
        session = open_session()
        run_iteration(session, 0)
        path = read(session).records[0].path
        code = (
            "import sys, torch; f = torch.load(sys.argv[1], weights_only=True); "
            "assert not any('quantscope' in name for name in sys.modules); print(f['tensor'].shape[-1])"
        )
        result = subprocess.run(
            [sys.executable, "-I", "-c", code, str(path)], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert result.stdout == "8\n"

    def test_tensors_are_copied_before_the_tap_returns(self, open_session, save_format):
        session, tensors = open_session(save_format=save_format), linear_tensors()
        site = session.site(**LINEAR)
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        tap, expected = site.tap(), tensors["input"].clone()
        tap("forward", "pre", "input", tensors["input"])
        tensors["input"].zero_()
        tap("forward", "post", "output", tensors.pop("input"))  # freed, and its memory used again
        noise = [torch.full_like(expected, 7.0) for _ in range(50)]
        session.end_iteration({})
        capture = read(session)
        assert torch.equal(capture.load(capture.records[0]), expected)
        assert torch.equal(capture.load(capture.records[1]), torch.zeros_like(noise[0]))

    @pytest.mark.parametrize("make", ODD_TENSORS.values(), ids=ODD_TENSORS.keys())
    def test_odd_tensors(self, open_session, make, save_format):
        session, tensor = open_session(save_format=save_format), make()
        run_iteration(session, 0, tensors=dict.fromkeys(linear_tensors(), tensor))
        capture = read(session)
        assert session.failed is None
        assert len(capture.records) == ROWS_A_PASS
        for record, row in zip(capture.records, manifest_of(session, "tensor"), strict=True):
            for loaded in (capture.load(record), stored_tensor(session, row)):
                assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(bits(loaded), bits(tensor))
            assert (record.statistics is None) == tensor.is_complex()

    def test_views_of_one_storage_are_kept_apart(self, open_session, save_format):
        session, base = open_session(save_format=save_format), torch.arange(60.0)
        views = {name: base[10 * number : 10 * number + 10] for number, name in enumerate(linear_tensors())}
        run_iteration(session, 0, tensors=views)
        capture = read(session)
        for record in capture.records:
            assert torch.equal(capture.load(record), views[record.tensor_name])
            if record.store == "pt":
                assert record.bytes < 4096


class TestWeights:
    def test_written_once_an_optimizer_step(self, open_session):
        session = open_session(collect_micro_batches=3)
        run_iteration(session, 0, micro_batches=3)
        weights = rows_of(read(session), tensor_name="weight")
        assert [row.reference for row in weights] == [False] + [True] * 5
        assert len({row.path for row in weights}) == 1
        assert (weights[0].operation, weights[0].phase) == ("forward", "pre")
        assert [(row.operation, row.micro_batch) for row in weights[1:3]] == [("backward", 0), ("forward", 1)]
        assert len({row.checksum for row in weights}) == 1

    def test_the_next_optimizer_step_writes_it_again_even_if_equal(self, open_session):
        session, tensors = open_session(control_iter=2), linear_tensors()
        for iteration in range(2):
            run_iteration(session, iteration, tensors=tensors)
        weights = rows_of(read(session), tensor_name="weight", operation="forward")
        assert [row.reference for row in weights] == [False, False]

    def test_a_write_in_between_is_seen_though_no_version_counts_it(self, open_session):
        session, tensors = open_session(), linear_tensors()
        weight = torch.nn.Parameter(tensors["weight"])
        tensors = tensors | {"weight": weight}
        site = session.site(**LINEAR)
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        tap, version = site.tap(), weight._version
        before = weight.detach().clone()
        show_forward(tap, tensors)
        weight.data.add_(1)
        assert weight._version == version
        show_backward(tap, tensors)
        session.end_iteration({})
        capture = read(session)
        first, second = rows_of(capture, tensor_name="weight")
        assert not second.reference
        assert torch.equal(capture.load(first), before)
        assert torch.equal(capture.load(second), weight)

    def test_modules_do_not_share_files(self, open_session):
        session, tensors = open_session(), linear_tensors()
        session.begin_iteration(0)
        session.begin_micro_batch(0, [0])
        for name in ("linear_fc1", "linear_fc2"):
            show_forward(session.site(**(LINEAR | {"module": name})).tap(), tensors)
        session.end_iteration({})
        assert len({row.path for row in rows_of(read(session), tensor_name="weight")}) == 2
