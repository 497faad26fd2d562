"""What formats take from operands: each way of losing values planted, and its twin without."""

import pytest
import torch

from megatron.quantscope.analysis.findings import find
from megatron.quantscope.analysis.findings.reference import gaussian
from megatron.quantscope.formats import FORMATS, fake_quantize
from tests.quantscope.analysis import captures
from tests.quantscope.analysis.captures import write_capture

COUNT, WIDTH, LAYERS = 64 * 1024, 64, 8


def of_kind(study, kind):
    return [finding for finding in find(study) if finding.kind == kind]


class TestFormatLosses:
    def test_neighbouring_layers_are_one_sentence(self, table, study_with, plant):
        summary = table("mxfp4")
        for layer in (2, 3, 4, 6):
            plant(summary, "fc1.dy", layer, mxfp4__underflow=COUNT // 2)
        (finding,) = of_kind(study_with(summary), "underflow")
        assert "fc1.dy in layers 2-4, 6 (50 %)" in finding.text
        assert (finding.format, finding.metric, finding.severity) == ("mxfp4", "underflow", "warning")
        assert finding.numbers["threshold_percent"] == pytest.approx(2 * gaussian("mxfp4").underflow_percent)

    def test_the_second_gemm_counts_too(self, table, study_with, plant):
        summary = plant(table("mxfp8"), "fc1.x", 1, **{"mxfp8@2__underflow": COUNT // 20})
        (finding,) = of_kind(study_with(summary), "underflow")
        assert "fc1.x in its second GEMM in layer 1 (5 %)" in finding.text
        assert finding.severity == "note"

    def test_results_are_never_quantised(self, table, study_with, plant):
        assert find(study_with(plant(table("mxfp8"), "fc1.y", mxfp8__underflow=COUNT // 2))) == []

    def test_a_run_is_judged_by_its_own_format_and_a_plain_one_by_those_no_run_shows(self, table, study_with, plant):
        summary = plant(table("bf16", "mxfp8"), "fc1.x", mxfp4__underflow=COUNT // 2, mxfp8__saturated=COUNT // 20)
        found = find(study_with(summary))
        assert {(one.kind, one.format, one.place.quant_type) for one in found} == {
            ("underflow", "mxfp4", "bf16"),
            ("saturation", "mxfp8", "mxfp8"),
        }

    def test_values_lost_to_inf_are_critical(self, table, study_with, plant):
        (finding,) = find(study_with(plant(table("fp16"), "fc1.x", 4, fp16__lost=2)))
        assert (finding.kind, finding.severity, finding.numbers["lost"]) == ("saturation", "critical", 2)

    def test_lost_values_are_told_without_the_clipped_ones(self, table, study_with, plant):
        """Both GEMMs lose the same 31 neighbours of an Inf; half of another tensor is clipped."""
        summary = plant(table("mxfp8"), "fc1.dy", 1, **{"mxfp8__saturated": COUNT // 2})
        for treatment in ("mxfp8", "mxfp8@2"):
            plant(summary, "fc1.x", 4, **{f"{treatment}__lost": 31})
            plant(summary, "fc1.x", 6, **{f"{treatment}__lost": 93})
        (finding,) = of_kind(study_with(summary), "saturation")
        assert (finding.place.site, finding.place.layer, finding.severity) == ("fc1.x", 6, "critical")
        assert finding.numbers == {"lost": 124, "most_lost": 93, "sites": 1}
        assert finding.title == "MXFP8 E4M3: 124 values become Inf or NaN, most in fc1.x of layer 6"
        assert "fc1.x in layers 4, 6 (124)." in finding.text
        assert "fc1.dy" not in finding.text

    def test_gradients_are_scaled_as_in_training(self, table, study_with, plant):
        summary = plant(table("hifp8"), "fc1.dy", hifp8__underflow=COUNT // 2)
        assert find(study_with(summary)) == []
        (finding,) = find(study_with(plant(summary, "fc1.dy", hifp8_pow2__underflow=COUNT // 2)))
        assert finding.kind == "underflow"

    def test_dead_blocks(self, table, study_with, plant):
        summary = plant(table("mxfp8"), "fc1.x", 4, mxfp8__dead_blocks=20)
        (finding,) = of_kind(study_with(summary), "dead_blocks")
        assert finding.numbers["percent"] == pytest.approx(100 * 20 / (COUNT / 32))
        assert finding.numbers["blocks"] == 20
        assert of_kind(study_with(plant(summary, "fc1.x", 4, mxfp8__dead_blocks=2)), "dead_blocks") == []
        zeros = plant(summary, "fc1.x", 4, mxfp8__dead_blocks=2, live_blocks_32=4)
        assert of_kind(study_with(zeros), "dead_blocks")[0].numbers["percent"] == 50

    def test_dead_blocks_of_16(self, table, study_with, plant):
        summary = plant(table("nvfp4"), "fc1.x", 4, nvfp4__dead_blocks=COUNT // 16)
        (finding,) = of_kind(study_with(summary), "dead_blocks")
        assert finding.title == "NVFP4: 100 % of the blocks of 16 become zero altogether in fc1.x of layer 4"

    def test_a_format_without_blocks_tells_them_with_its_underflow(self, table, study_with, plant):
        summary = plant(table("fp16"), "fc1.x", 4, fp16__dead_blocks=COUNT // 64)
        assert find(study_with(summary)) == []
        (finding,) = find(study_with(plant(summary, "fc1.x", 4, fp16__underflow=COUNT // 2)))
        assert finding.kind == "underflow"
        assert finding.text.endswith("Whole blocks of 32 become zero in fc1.x in layer 4 (50 %).")
        assert finding.numbers["dead_blocks"] == COUNT // 64

    def test_dead_blocks_of_another_place_are_told_by_themselves(self, table, study_with, plant):
        summary = plant(table("mxfp8"), "fc1.x", 4, mxfp8__dead_blocks=500, mxfp8__underflow=COUNT // 2)
        plant(summary, "fc1.x", 5, mxfp8__dead_blocks=40)
        underflow, dead = find(study_with(summary))
        assert (underflow.kind, underflow.numbers["dead_blocks"]) == ("underflow", 500)
        assert (dead.kind, dead.place.layer, dead.numbers["blocks"]) == ("dead_blocks", 5, 40)

    def test_the_share_of_a_real_tensor_is_of_its_own_blocks(self, analysed, tmp_path):
        """One large value, and the rest far below: under NVFP4 no block but its own holds anything."""

        def spoil(module, layer, name, tensor):
            if (module, layer, name) != ("mlp.linear_fc1", 1, "input"):
                return tensor
            tensor = 1e-6 * tensor
            tensor[8:] = 0
            tensor[0, 0, 0] = 1e4
            return tensor

        study = analysed(write_capture(tmp_path / "capture", "nvfp4", layers=4, spoil=spoil), ("nvfp4",))
        (finding,) = [one for one in find(study) if one.kind == "underflow"]
        row = study.summary.query("site == 'fc1.x' and layer_idx == 1").iloc[0]
        tokens, width = 8, captures.WIDTH  # 8 tokens of 3 blocks; along the tokens one block of 16 a channel
        assert (row["live_blocks_16"], row["live_blocks_16@2"]) == (tokens * width // 16, width)
        assert finding.numbers["dead_blocks_percent"] == pytest.approx(100 * (width - 1) / width)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "fp16"])
def test_the_gaussian_reference_is_what_quantising_gives(name):
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    q = fake_quantize(x, name, backend="torch")
    assert gaussian(name).underflow_percent == pytest.approx(100 * float(((q == 0) & (x != 0)).float().mean()))
    if FORMATS[name].block:
        blocks = x.reshape(-1, 32)
        scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(1, keepdim=True))) - FORMATS[name].emax)
        clipped = (blocks.abs() / scale > FORMATS[name].max).float().mean()
        assert gaussian(name).saturated_percent == pytest.approx(100 * float(clipped), rel=0.05)
