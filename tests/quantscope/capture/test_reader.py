"""Reading back: every layout of a directory, every age of a name, and everything that can lie in between."""

import json
import shutil

import pytest
import torch

from megatron.quantscope.capture import CaptureError, TensorSaver, open_capture
from megatron.quantscope.capture.state import STATE
from tests.quantscope.capture.conftest import (
    FILES_A_PASS,
    LINEAR,
    ROWS_A_PASS,
    linear_tensors,
    run_iteration,
    show_forward,
)

FULL = "20241201_143022_{:04d}_iter000_linear_L0_forward_post_linear_bf16_rank0_sample0_output.pt"


@pytest.fixture
def capture_root(open_session):
    """Two types, two iterations each."""
    for quant_type in ("mxfp8", "hifp8"):
        session = open_session(quant_type=quant_type, control_iter=2)
        for iteration in range(2):
            run_iteration(session, iteration)
        session.close()
    return session.config.directory


def save(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


class TestLayouts:
    def test_root(self, capture_root):
        capture = open_capture(str(capture_root))
        assert capture.quant_types == ["hifp8", "mxfp8"]
        assert len(capture.records) == 2 * 2 * ROWS_A_PASS
        assert {quant_type: sorted(commits) for quant_type, commits in capture.commits.items()} == {
            "mxfp8": [0, 1],
            "hifp8": [0, 1],
        }
        assert set(capture.run_info) == {"mxfp8", "hifp8"}

    def test_one_type_folder(self, capture_root):
        capture = open_capture(capture_root / "mxfp8")
        assert capture.quant_types == ["mxfp8"]
        assert capture.problems == []
        assert list(capture.run_info) == ["mxfp8"]

    def test_chosen_types(self, capture_root):
        capture = open_capture(capture_root, quant_types=["hifp8"])
        assert capture.quant_types == ["hifp8"]
        assert list(capture.commits) == list(capture.run_info) == list(capture.runs) == ["hifp8"]
        with pytest.raises(CaptureError, match=r"no captures of type mxfp4 in .*: there are hifp8, mxfp8"):
            open_capture(capture_root, quant_types=["mxfp4"])

    def test_a_moved_capture(self, capture_root, tmp_path):
        shutil.move(capture_root, tmp_path / "elsewhere")
        capture = open_capture(tmp_path / "elsewhere")
        assert capture.problems == []
        assert all(capture.load(record) is not None for record in capture.records)

    def test_type_folders_of_other_names(self, capture_root):
        (capture_root / "mxfp8").rename(capture_root / "copy of mxfp8")
        capture = open_capture(capture_root)
        assert capture.quant_types == ["hifp8", "mxfp8"]
        assert set(capture.run_info) == {"hifp8", "mxfp8"}


class TestBareFiles:
    def test_all_forms_in_one_flat_folder(self, tmp_path):
        tensor = torch.randn(3, 4).bfloat16()
        names = [
            FULL.format(1),
            "20240601_101112_2_attention_L3_forward_mxfp8_query.pt",
            "20240601_101112_0003_linear_L1_backward_pre_linear_hifp8_input.pt",
        ]
        for name in names:
            save(tmp_path / name, {"tensor": tensor, "metadata": {}})
        capture = open_capture(tmp_path)
        assert capture.problems == []
        by_type = {record.quant_type: record for record in capture.records}
        assert set(by_type) == {"bf16", "mxfp8", "hifp8"}
        assert (by_type["mxfp8"].layer_idx, by_type["mxfp8"].tensor_name) == (3, "query")
        assert by_type["hifp8"].tensor_name == "grad_output"
        assert by_type["bf16"].sample_idx == 0
        assert by_type["mxfp8"].rank is None
        for record in capture.records:
            assert record.statistics is None
            assert record.run_id is None
            assert torch.equal(capture.load(record), tensor)

    def test_a_bare_tensor(self, tmp_path):
        save(tmp_path / FULL.format(1), torch.ones(2))
        capture = open_capture(tmp_path)
        assert torch.equal(capture.load(capture.records[0]), torch.ones(2))
        assert capture.describe(capture.records[0]).shape == (2,)

    def test_torch_s_old_format(self, tmp_path):
        torch.save(torch.ones(2), tmp_path / FULL.format(1), _use_new_zipfile_serialization=False)
        capture = open_capture(tmp_path)
        assert torch.equal(capture.load(capture.records[0]), torch.ones(2))

    def test_metadata_inside_the_file_completes_the_record(self, tmp_path):
        metadata = {"rank": 3, "module": "decoder.layers.0.mlp.linear_fc1", "iteration": 5, "note": "mine"}
        save(tmp_path / FULL.format(1), {"tensor": torch.ones(2, 3), "metadata": metadata})
        capture = open_capture(tmp_path)
        record = capture.describe(capture.records[0])
        assert (record.rank, record.module, record.iteration) == (3, "decoder.layers.0.mlp.linear_fc1", 5)
        assert (record.shape, record.dtype, record.extra) == ((2, 3), "float32", {"note": "mine"})

    def test_an_older_name_keeps_its_gradient_s_own_name(self, tmp_path):
        metadata = {"tensor_name": "input", "iteration": 4, "phase": "pre"}
        save(
            tmp_path / "20240601_101112_1_linear_L0_backward_bf16_input.pt",
            {"tensor": torch.ones(2), "metadata": metadata},
        )
        capture = open_capture(tmp_path)
        record = capture.describe(capture.records[0])
        assert (record.tensor_name, record.iteration, record.phase) == ("grad_output", 4, "pre")

    def test_a_user_s_own_saves_beside_a_run(self, capture_root):
        run_id = open_capture(capture_root / "mxfp8").run_info["mxfp8"]["run_id"]
        saver = TensorSaver(capture_root, state=type(STATE)())
        saver.save_tensor(torch.ones(2), "linear", "forward", "mxfp8", "of_no_run")
        saver._state.run_id = run_id
        saver.save_tensor(torch.ones(2), "linear", "forward", "mxfp8", "of_this_run")
        saver._state.run_id = "another"
        saver.save_tensor(torch.ones(2), "linear", "forward", "mxfp8", "of_another_run")
        names = {record.tensor_name for record in open_capture(capture_root / "mxfp8").records}
        assert {"of_no_run", "of_this_run"} < names
        assert "of_another_run" not in names
        named = {record.tensor_name for record in open_capture(capture_root / "mxfp8", run=run_id).records}
        assert "of_this_run" in named
        assert "of_no_run" not in named


class TestRuns:
    def test_the_latest_by_default_and_any_by_name(self, open_session):
        sessions = []
        for seed in range(3):
            sessions.append(open_session())
            run_iteration(sessions[-1], 0, tensors=linear_tensors(seed))
            sessions[-1].close()
        ids = [session.identity["run_id"] for session in sessions]
        root = sessions[0].config.directory
        assert open_capture(root).runs == {"mxfp8": ids}
        for seed, run in enumerate(ids):
            capture = open_capture(root, run=run)
            assert torch.equal(capture.load(capture.records[0]), linear_tensors(seed)["input"])
        latest = open_capture(root)
        assert {record.run_id for record in latest.records} == {ids[-1]}

    def test_an_unknown_run(self, capture_root):
        with pytest.raises(CaptureError, match=r"no run nope in .*: there are 2"):
            open_capture(capture_root, run="nope")

    def test_a_latest_run_that_kept_nothing_is_passed_over(self, open_session, capture_root):
        session = open_session(quant_type="mxfp8")
        session.begin_iteration(0)
        session.end_iteration({})
        session.close()
        capture = open_capture(capture_root / "mxfp8")
        assert len(capture.records) == 2 * ROWS_A_PASS
        assert capture.problems == [f"run {session.identity['run_id']} kept nothing"]

    def test_an_iteration_that_was_not_completed_is_told(self, open_session):
        session = open_session(control_iter=2)
        run_iteration(session, 0)
        session.begin_iteration(1)
        session.begin_micro_batch(0, [1])
        show_forward(session.site(**LINEAR).tap(), linear_tensors())
        session.close()
        capture = open_capture(session.config.directory)
        assert capture.problems == [
            "mxfp8/manifest_rank0.jsonl: collecting ended early: the training ended within iteration 1",
            "mxfp8/iteration 1 of rank 0 was not completed: 3 tensors of it are there",
        ]
        assert [record.committed for record in capture.records] == [True] * ROWS_A_PASS + [False] * 3


class TestDamage:
    def files(self, root, quant_type="mxfp8"):
        return sorted((root / quant_type).glob("*.pt"))

    def manifest(self, root, quant_type="mxfp8"):
        return next((root / quant_type).glob("runs/*/manifest_rank0.jsonl"))

    def test_a_truncated_file_is_named_and_left_out(self, capture_root):
        path = self.files(capture_root)[0]
        size = path.stat().st_size
        path.write_bytes(path.read_bytes()[: size // 2])
        capture = open_capture(capture_root / "mxfp8")
        assert capture.problems == [f"{path.name}: damaged, {size // 2} bytes instead of {size}"]
        assert len(capture.records) == 2 * ROWS_A_PASS - 1

    def test_a_missing_weight_is_told_once_though_two_rows_name_it(self, capture_root):
        path = next(path for path in self.files(capture_root) if path.stem.endswith("weight"))
        path.unlink()
        capture = open_capture(capture_root / "mxfp8")
        assert capture.problems == [f"{path.name}: missing"]
        assert len(capture.records) == 2 * ROWS_A_PASS - 2

    def test_bytes_that_changed_are_told_when_loaded(self, capture_root):
        path = self.files(capture_root)[0]
        path.write_bytes(b"PK\x03\x04" + bytes(path.stat().st_size - 26) + b"PK\x05\x06" + bytes(18))
        capture = open_capture(capture_root / "mxfp8")
        record = next(record for record in capture.records if record.path == path)
        with pytest.raises(CaptureError, match=f"{path.name} can not be loaded: ") as raised:
            capture.load(record)
        assert "\n" not in str(raised.value)

    def test_torn_and_foreign_lines(self, capture_root):
        manifest = self.manifest(capture_root)
        lines = manifest.read_text().splitlines()
        escape = json.loads(lines[0]) | {"file": "../../secret.pt"}
        future = json.loads(lines[1]) | {"schema": 99}
        lines[:2] = ["not json", json.dumps(escape), json.dumps(future), "[]", '{"schema": 1, "kind": "tensor"}']
        manifest.write_text("\n".join(lines) + '\n{"schema": 1, "ki')
        capture = open_capture(capture_root / "mxfp8")
        broken = [problem for problem in capture.problems if "is broken and left out" in problem]
        assert [int(problem.split("line ")[1].split()[0]) for problem in broken] == [1, 2, 3, 4, 5, len(lines) + 1]
        listed = [record for record in capture.records if record.checksum]
        assert len(listed) == 2 * ROWS_A_PASS - 2
        assert all(record.path.parent == capture_root / "mxfp8" for record in capture.records)

    def test_a_row_without_its_fields(self, capture_root):
        manifest = self.manifest(capture_root)
        lines = manifest.read_text().splitlines()
        row = json.loads(lines[0])
        del row["layer_type"]
        manifest.write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
        capture = open_capture(capture_root / "mxfp8")
        assert len(capture.problems) == 1
        assert "its manifest row can not be read" in capture.problems[0]

    def test_a_lost_run_json(self, capture_root):
        for path in (capture_root / "mxfp8").glob("runs/*/run.json"):
            path.write_text("{broken")
        capture = open_capture(capture_root / "mxfp8")
        assert len(capture.records) == 2 * ROWS_A_PASS
        assert capture.run_info == {"mxfp8": {}}

    def test_lost_manifests_leave_bare_files(self, capture_root):
        shutil.rmtree(capture_root / "mxfp8" / "runs")
        capture = open_capture(capture_root / "mxfp8")
        assert len(capture.records) == 2 * FILES_A_PASS
        assert capture.problems == []
        record = capture.describe(capture.records[0])
        assert record.module == "decoder.layers.0.mlp.linear_fc1"

    @pytest.mark.parametrize(
        ("content", "message"),
        [(b"", "is empty"), (b"hello world", "is not a torch file"), (b"PK\x03\x04" + bytes(40), "is truncated")],
    )
    def test_broken_bare_files(self, tmp_path, content, message):
        (tmp_path / FULL.format(1)).write_bytes(content)
        save(tmp_path / FULL.format(2), torch.ones(1))
        capture = open_capture(tmp_path)
        assert capture.problems == [f"{FULL.format(1)}: {message}"]
        assert len(capture.records) == 1

    def test_foreign_files(self, tmp_path):
        save(tmp_path / FULL.format(1), torch.ones(1))
        for name in ("model.pt", "notes.txt", "a.png", "b.png", "c.png", ".hidden"):
            (tmp_path / name).write_text("x")
        (tmp_path / ".writing-1-2-3").write_text("half")
        assert open_capture(tmp_path).problems == [
            "1 unfinished files of a run that was killed or still goes on",
            "a.png, b.png, c.png and 1 more: not captured, left out",
            "model.pt: no name that a captured file has, left out",
        ]

    @pytest.mark.parametrize("content", [{"weight": torch.ones(1)}, [1, 2], {"tensor": "text"}])
    def test_a_file_without_a_tensor(self, tmp_path, content):
        save(tmp_path / FULL.format(1), content)
        capture = open_capture(tmp_path)
        with pytest.raises(CaptureError, match="holds no tensor"):
            capture.load(capture.records[0])

    def test_a_pickle_that_would_run_code_is_refused(self, tmp_path):
        class Bomb:
            def __reduce__(self):
                return (open, (str(tmp_path / "exploded"), "w"))

        save(tmp_path / FULL.format(1), {"tensor": Bomb()})
        capture = open_capture(tmp_path)
        with pytest.raises(CaptureError, match="can not be loaded: ") as raised:
            capture.load(capture.records[0])
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "exploded").exists()


class TestNothingThere:
    def test_no_such_directory(self, tmp_path):
        with pytest.raises(CaptureError, match=f"no such directory: {tmp_path}/none"):
            open_capture(tmp_path / "none")

    def test_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(CaptureError, match=r"can not read .*file: Not a directory"):
            open_capture(tmp_path / "file")

    def test_an_empty_directory(self, tmp_path):
        with pytest.raises(CaptureError, match=r"no captures in .*: neither .pt files nor folders of them"):
            open_capture(tmp_path)

    def test_nothing_but_foreign_files(self, tmp_path):
        (tmp_path / "model.pt").write_text("x")
        with pytest.raises(CaptureError, match=r"no captures in .*: model.pt: no name that a captured file has"):
            open_capture(tmp_path)

    def test_the_first_few_things_that_are_wrong_are_named(self, tmp_path):
        cut = "20241201_143022_0001_iter000_linear_L0_forward_post_linear_bf16_rank0_sample0_output.pt"
        (tmp_path / cut).write_bytes(b"PK\x03\x04 and no more")
        (tmp_path / "notes.txt").write_text("x")
        with pytest.raises(CaptureError) as error:
            open_capture(tmp_path)
        assert cut in str(error.value)
        assert "notes.txt" in str(error.value)
        assert "\n" not in str(error.value)


def test_frame(capture_root):
    capture = open_capture(capture_root)
    frame = capture.frame()
    assert len(frame) == len(capture.records)
    assert {"module", "tp_rank", "amax", "rms", "path", "reference", "shape", "quant_type"} <= set(frame.columns)
    loaded = capture.load(capture.records[0]).float()
    assert frame["amax"][0] == loaded.abs().max().item()
    assert frame.groupby("quant_type").size().to_dict() == {"hifp8": 2 * ROWS_A_PASS, "mxfp8": 2 * ROWS_A_PASS}


def test_opening_reads_no_tensor(capture_root, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("a tensor was read"))
    assert len(open_capture(capture_root).records) == 4 * ROWS_A_PASS


def test_loading_maps_the_file(tmp_path):
    save(tmp_path / FULL.format(1), {"tensor": torch.arange(1000), "metadata": {}})
    capture = open_capture(tmp_path)
    tensor = capture.load(capture.records[0])
    tensor[0] = 7  # a private mapping: the file stays as it is
    assert capture.load(capture.records[0])[0] == 0
