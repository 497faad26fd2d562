"""What a dry run counts is what a run writes, to the byte."""

import pytest

from tests.quantscope.capture.conftest import (
    LINEAR,
    MODES,
    linear_tensors,
    manifest_of,
    run_iteration,
)


class TestDryRun:
    def run(self, session, micro_batches=2):
        sites = [session.site(**(LINEAR | {"module": f"decoder.layers.{n}.fc", "layer_idx": n})) for n in range(3)]
        for iteration in range(2):
            session.begin_iteration(iteration)
            for micro_batch in range(micro_batches):
                session.begin_micro_batch(micro_batch, [10, 11])
                for number, site in enumerate(sites):
                    tap = site.tap()
                    for name, tensor in linear_tensors(iteration, tokens=7, inputs=40 + number).items():
                        tap("backward" if name.startswith("grad") else "forward", "pre", name, tensor)
            session.end_iteration({"lm loss": 2.5})
        session.close()
        assert session.failed is None
        return session.summary()

    @pytest.mark.parametrize("save_format", ["pt", "segment"])
    @pytest.mark.parametrize("mode", MODES)
    def test_counts_are_those_of_the_files(self, open_session, tmp_path, mode, save_format):
        options = {"control_iter": 2, "collect_micro_batches": 2, "mode": mode, "save_format": save_format}
        dry = self.run(open_session(dry_run=True, directory=tmp_path / "dry", **options))
        assert not (tmp_path / "dry").exists()
        session = open_session(directory=tmp_path / "real", run_id="20250101_000000_abcdef", **options)
        real = self.run(session)
        files = [path for path in (tmp_path / "real").rglob("*") if path.suffix in (".pt", ".safetensors")]
        assert (dry.files, dry.bytes) == (len(files), sum(path.stat().st_size for path in files))
        assert (dry.rows, dry.files, dry.bytes) == (real.rows, real.files, real.bytes)
        assert dry.rows == len(manifest_of(session, "tensor")) == 2 * 2 * 3 * 6
        assert (dry.iterations, real.iterations) == (2, 2)

    def test_of_a_budget_that_will_not_do(self, open_session, tmp_path, caplog):
        session = open_session(dry_run=True, directory=tmp_path / "dry", budget_bytes=20_000)
        run_iteration(session, 0)
        session.close()
        assert "budget" in session.failed
        assert not (tmp_path / "dry").exists()
