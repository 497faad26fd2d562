"""Which tensor meets which: by module and samples, by names alone, once a step for weights, the n-th with the n-th."""

import pytest
import torch

from megatron.quantscope.analysis.comparison import pair_runs, runs_of
from megatron.quantscope.capture import open_capture
from tests.quantscope.analysis.captures import save, write_capture
from tests.quantscope.capture.handwritten import Writer, parallel


def paired(*directories):
    return pair_runs(runs_of([open_capture(directory) for directory in directories]))


def what(record):
    return record.iteration, record.sample_indices, record.module, record.operation, record.tensor_name


def test_every_tensor_meets_its_own_of_the_same_samples(tmp_path):
    for quant_type in ("mxfp4", "bf16", "hifp8"):
        write_capture(tmp_path, quant_type, layers=2, iterations=2, micro_batches=2)
    pairing = paired(tmp_path)
    assert pairing.notes == []
    assert {(pair.run, pair.baseline) for pair in pairing.pairs} == {("mxfp4", "bf16"), ("hifp8", "bf16")}
    for pair in pairing.pairs:
        assert what(pair.tensor.records[0]) == what(pair.reference.records[0])
        assert pair.tensor.records[0].quant_type == pair.run
        assert pair.reference.records[0].quant_type == "bf16"
    of_pass = 2 * (4 * 5 + 8)  # layers x (linears x rows but the weight's two, attention's rows)
    weights = 2 * 4
    assert len(pairing.pairs) == 2 * (2 * 2 * of_pass + 2 * weights)


def test_weights_once_an_optimizer_step(tmp_path):
    for quant_type in ("bf16", "fp16"):
        write_capture(tmp_path, quant_type, layers=1, iterations=3, micro_batches=2)
    records = [pair.reference.records[0] for pair in paired(tmp_path).pairs]
    weights = [record for record in records if record.tensor_name == "weight"]
    assert len(weights) == 3 * 4
    assert {(record.operation, record.micro_batch) for record in weights} == {("forward", 0)}


def test_in_the_order_of_execution(tmp_path):
    for quant_type in ("bf16", "fp16"):
        write_capture(tmp_path, quant_type, layers=2, iterations=2, micro_batches=2)
    pairs = paired(tmp_path).pairs
    counters = [pair.reference.records[0].counter for pair in pairs]
    assert counters == sorted(counters)
    assert [pair.order for pair in pairs] == list(range(len(pairs)))


def test_stages_of_a_pipeline_take_turns(tmp_path):
    """Each counts for itself; forward goes up the layers and backward down, micro-batch by micro-batch."""
    for quant_type in ("bf16", "fp16"):
        for stage in range(2):
            writer = Writer(
                tmp_path,
                quant_type=quant_type,
                rank=stage,
                coordinates=parallel(pp_rank=stage, pp_size=2),
                world_size=2,
            )
            for micro_batch in (0, 1):
                for operation, name in (("forward", "output"), ("backward", "grad_input")):
                    for layer in (2 * stage, 2 * stage + 1)[:: -1 if operation == "backward" else 1]:
                        writer.add(
                            torch.ones(2) * layer, operation=operation, tensor_name=name, layer_idx=layer,
                            micro_batch=micro_batch, sample_indices=[micro_batch], module=f"layers.{layer}.fc1",
                        )  # fmt: skip
            writer.commit().close()
    found = [
        (record.micro_batch, record.operation, record.layer_idx)
        for record in (pair.reference.records[0] for pair in paired(tmp_path).pairs)
    ]
    one = [("forward", layer) for layer in range(4)] + [("backward", layer) for layer in (3, 2, 1, 0)]
    assert found == [(micro_batch, *place) for micro_batch in (0, 1) for place in one]


def test_a_module_that_is_called_twice(tmp_path):
    for quant_type, calls in (("bf16", 3), ("fp16", 2)):
        writer = Writer(tmp_path, quant_type=quant_type)
        for call in range(calls):
            writer.add(torch.full((2,), float(call)))
        writer.commit().close()
    pairing = paired(tmp_path)
    values = [[source.load().tolist() for source in (pair.tensor, pair.reference)] for pair in pairing.pairs]
    assert values == [[[0.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]]
    assert pairing.notes == ["bf16: 1 tensors have no partner in fp16"]


def test_what_has_no_partner_is_counted_on_both_sides(tmp_path):
    write_capture(tmp_path, "bf16", layers=2)
    write_capture(tmp_path, "fp16", layers=3, micro_batches=2)
    pairing = paired(tmp_path)
    of_pass = 4 * 5 + 8
    alone = 2 * of_pass + of_pass + 4 + of_pass  # its second micro-batch, and its third layer in both
    assert pairing.notes == [f"fp16: {alone} tensors have no partner in bf16"]
    assert len(pairing.pairs) == 2 * (of_pass + 4)


def test_rows_without_a_tensor_are_said(tmp_path):
    for quant_type in ("bf16", "fp16"):
        writer = Writer(tmp_path, quant_type=quant_type)
        writer.add(torch.ones(3), kept=quant_type == "bf16")
        writer.add(torch.ones(3), tensor_name="output")
        writer.commit().close()
    pairing = paired(tmp_path)
    assert len(pairing.pairs) == 1
    assert pairing.notes == [
        "fp16: 1 rows hold statistics only, and no tensor to compare",
        "bf16: 1 tensors have no partner in fp16",
    ]


def test_one_run_alone(tmp_path):
    assert paired(write_capture(tmp_path, layers=1)).pairs == []


class TestChecksums:
    def of(self, tmp_path, one, other, **fields):
        for quant_type, tensor in (("bf16", one), ("fp16", other)):
            writer = Writer(tmp_path, quant_type=quant_type)
            writer.add(tensor, **{name: value[quant_type == "fp16"] for name, value in fields.items()})
            writer.commit().close()
        (pair,) = paired(tmp_path).pairs
        return pair

    def test_equal_content_need_not_be_read(self, tmp_path):
        assert self.of(tmp_path, torch.ones(4), torch.ones(4)).equal_by_checksum

    def test_other_content(self, tmp_path):
        assert not self.of(tmp_path, torch.ones(4), torch.zeros(4)).equal_by_checksum

    @pytest.mark.parametrize("other", [torch.ones(2, 2), torch.ones(4).view(torch.int32)])
    def test_the_same_bytes_in_another_shape_or_dtype(self, tmp_path, other):
        assert not self.of(tmp_path, torch.ones(4), other).equal_by_checksum

    def test_gradients_of_another_scale(self, tmp_path):
        scales = {"tensor_name": ("grad_input", "grad_input"), "grad_scale": (1.0, 2.0)}
        assert not self.of(tmp_path, torch.ones(4), torch.ones(4), **scales).equal_by_checksum


FULL = "20241201_143022_{n:04d}_iter{i:03d}_linear_L{l}_forward_pre_linear_{t}_rank0_sample{s}_{name}.pt"
PHASED = "20241201_143022_{n}_linear_L{l}_forward_pre_linear_{t}_{name}.pt"
PLAIN = "20241201_143022_{n}_linear_L{l}_forward_{t}_{name}.pt"


def write_bare(folder, quant_type, form, *, layers=2, samples=(0,), first=1):
    """Files of another tool: four modules in each layer that their names do not tell apart."""
    folder.mkdir(parents=True, exist_ok=True)
    number = first
    for sample in samples:
        for layer in range(layers):
            for module in range(4):
                for name in ("input", "weight"):
                    file = form.format(n=number, i=0, l=layer, t=quant_type, s=sample, name=name)
                    save(
                        folder / file,
                        torch.full((2,), 1000.0 * sample + 100 * layer + 10 * module + (name == "weight")),
                    )
                    number += 1
    return folder


class TestBareFiles:
    @pytest.mark.parametrize("form", [FULL, PHASED, PLAIN])
    def test_names_tell_and_the_order_does_the_rest(self, tmp_path, form):
        write_bare(tmp_path / "bf16", "bf16", form)
        write_bare(tmp_path / "mxfp8", "mxfp8", form, first=40)
        pairing = paired(tmp_path)
        assert (len(pairing.pairs), pairing.notes) == (16, [])
        for pair in pairing.pairs:
            assert torch.equal(pair.tensor.load(), pair.reference.load())
            assert not pair.equal_by_checksum

    @pytest.mark.parametrize("other", [PHASED, PLAIN])
    def test_what_one_form_does_not_tell_does_not_part_it_from_another(self, tmp_path, other):
        write_bare(tmp_path / "bf16", "bf16", FULL)
        write_bare(tmp_path / "mxfp8", "mxfp8", other)
        pairing = paired(tmp_path)
        assert (len(pairing.pairs), pairing.notes) == (16, [])
        assert all(torch.equal(pair.tensor.load(), pair.reference.load()) for pair in pairing.pairs)

    def test_of_several_samples(self, tmp_path):
        write_bare(tmp_path / "bf16", "bf16", FULL, samples=(0, 1))
        write_bare(tmp_path / "mxfp8", "mxfp8", FULL, samples=(1,))
        pairing = paired(tmp_path)
        assert pairing.notes == ["bf16: 16 tensors have no partner in mxfp8"]
        assert all(torch.equal(pair.tensor.load(), pair.reference.load()) for pair in pairing.pairs)

    @pytest.mark.parametrize(("form", "met"), [(PLAIN, 2), (FULL, 2)])
    def test_ranks_that_the_other_does_not_have_are_counted(self, tmp_path, form, met):
        (tmp_path / "bf16").mkdir()
        for layer in range(2):
            save(tmp_path / "bf16" / form.format(n=layer, i=0, l=layer, t="bf16", s=0, name="input"), torch.ones(2))
        (tmp_path / "mxfp8").mkdir()
        for rank in range(2):
            for layer in range(2):
                file = FULL.format(n=layer, i=0, l=layer, t="mxfp8", s=0, name="input")
                save(tmp_path / "mxfp8" / file.replace("rank0", f"rank{rank}"), torch.full((2,), 1.0 - 101 * rank))
        pairing = paired(tmp_path)
        assert len(pairing.pairs) == met
        assert pairing.notes == ["mxfp8: 2 tensors have no partner in bf16"]

    def test_files_without_their_manifest_meet_those_of_a_run(self, tmp_path):
        import shutil

        for quant_type in ("bf16", "fp16"):
            write_capture(tmp_path, quant_type, layers=2)
        shutil.rmtree(tmp_path / "fp16" / "runs")
        pairing = paired(tmp_path)
        assert pairing.notes == []
        assert len(pairing.pairs) == 2 * (4 * 6 + 8)
        assert all(torch.equal(pair.tensor.load(), pair.reference.load()) for pair in pairing.pairs)
