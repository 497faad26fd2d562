import json

from script.driver.watch import ManifestWatch


def line(**fields):
    return json.dumps({"schema": 2, **fields}) + "\n"


def tensor(iteration=0, sample_idx=0, reference=False, bytes=100, store="pt"):
    fields = {"iteration": iteration, "sample_idx": sample_idx, "reference": reference, "bytes": bytes}
    return line(kind="tensor", store=store, **fields)


def new_run(folder, name="20260101_000000_abcdef", rank=0):
    path = folder / "runs" / name / f"manifest_rank{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_only_new_lines_of_new_runs_count(tmp_path):
    new_run(tmp_path, "20250101_000000_before").write_text(tensor())
    watch = ManifestWatch(tmp_path)
    assert not watch.poll()
    manifest = new_run(tmp_path)
    manifest.write_text(tensor() + tensor(reference=True))
    assert watch.poll()
    assert not watch.poll()
    with manifest.open("a") as file:
        file.write(tensor(sample_idx=1) + line(kind="commit", iteration=0, scalars={"lm loss": 2.5}))
    assert watch.poll()
    collected = watch.collected
    assert (collected.rows, collected.files, collected.file_bytes) == (3, 2, 200)
    assert (collected.iterations, collected.micro_batches, collected.loss) == (1, 2, 2.5)
    assert [path.name for path in watch.run_folders()] == [manifest.parent.name]


def test_ranks_add_up_and_the_loss_is_the_last_committed(tmp_path):
    watch = ManifestWatch(tmp_path)
    for rank in range(2):
        text = tensor(sample_idx=rank) + line(kind="commit", iteration=0, scalars={"lm loss": 2.5} if rank else {})
        text += tensor(iteration=1, sample_idx=2 + rank) + line(kind="commit", iteration=1, scalars={"lm loss": 2.0})
        new_run(tmp_path, rank=rank).write_text(text)
    watch.poll()
    assert (watch.collected.rows, watch.collected.micro_batches, watch.collected.iterations) == (4, 4, 2)
    assert watch.collected.scalars[0] == {"lm loss": 2.5}
    assert watch.collected.loss == 2.0


def test_a_line_that_is_being_written_waits(tmp_path):
    watch = ManifestWatch(tmp_path)
    manifest = new_run(tmp_path)
    whole = tensor()
    manifest.write_text(whole + whole[:20])
    watch.poll()
    assert watch.collected.rows == 1
    manifest.write_text(whole + whole)
    watch.poll()
    assert (watch.collected.rows, watch.collected.bad_lines) == (2, 0)


def test_foreign_lines_and_folders_do_no_harm(tmp_path):
    watch = ManifestWatch(tmp_path)
    new_run(tmp_path).write_text("not json\n" + line(kind="tensor") + line(kind="closed") + tensor())
    new_run(tmp_path, "notes").write_text(tensor())
    watch.poll()
    assert (watch.collected.rows, watch.collected.bad_lines) == (1, 2)


def test_the_reason_of_an_early_end_is_kept(tmp_path):
    watch = ManifestWatch(tmp_path)
    new_run(tmp_path).write_text(line(kind="stopped", reason="disk full"))
    watch.poll()
    assert watch.collected.stopped == ["disk full"]


def test_segments_are_the_files_of_their_tensors(tmp_path):
    watch = ManifestWatch(tmp_path)
    segment = line(kind="segment", iteration=0, file="iter000_rank0_000.safetensors", bytes=5000)
    new_run(tmp_path).write_text(segment + tensor(store="segment") + tensor(store="none", bytes=0))
    assert watch.poll()
    assert (watch.collected.rows, watch.collected.files, watch.collected.file_bytes) == (2, 1, 5000)
