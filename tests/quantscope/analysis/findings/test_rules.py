"""Every rule on a planted fault, and on its twin without."""

import math
from types import SimpleNamespace

import numpy as np
import pandas
import pytest

from megatron.quantscope.analysis.findings import KINDS, MOST_SHOWN, SEVERITIES, Finding, Place, find, unseen
from megatron.quantscope.analysis.findings.finding import ranked
from megatron.quantscope.analysis.findings.nonfinite import in_order
from megatron.quantscope.analysis.findings.ranks import replicas
from megatron.quantscope.analysis.findings.rules import RULES
from tests.quantscope.analysis import captures
from tests.quantscope.analysis.captures import write_capture

COUNT, WIDTH, LAYERS = 64 * 1024, 64, 8


def of_kind(study, kind):
    return [finding for finding in find(study) if finding.kind == kind]


def peaked(channel, value):
    values = np.linspace(3.0, 4.2, WIDTH).astype("f4")
    values[channel] = value
    return values


def massive(channel, value):
    """Columns of a tensor with one massive value."""
    ends = {"max": value, "min": -4.2} if value > 0 else {"max": 4.2, "min": value}
    return {"amax": abs(value), "channel_amax": peaked(channel, abs(value)), **ends}


def test_a_table_without_faults_has_no_finding(table, study_with):
    types = ("bf16", "fp16", "mxfp8", "mxfp4", "hifp8")
    commits = {name: {0: {"lm loss": 3.0}} for name in types}
    assert find(study_with(table("bf16"))) == []
    assert find(study_with(table(*types, ranks=2), commits=commits)) == []
    assert find(study_with(table("bf16").iloc[:0])) == []


class TestNonfinite:
    def test_the_first_place_is_that_of_the_execution(self, table, study_with, plant):
        summary = plant(table(), "fc1.y", 2, nan=3, inf=1)
        summary = plant(summary, "fc1.x", 5, nan=1)
        (finding,) = of_kind(study_with(summary.sample(frac=1, random_state=0)), "nonfinite")
        assert finding.severity == "critical"
        assert finding.place == Place(quant_type="bf16", site="fc1.y", layer=2, rank=0, iteration=0, micro_batch=0)
        assert finding.numbers == {"tensors": 2, "nan": 4, "inf": 1, "first_nan": 3, "first_inf": 1}
        assert "first in fc1.y, layer 2" in finding.title

    def test_of_two_pipeline_stages_the_first_is_where_values_come_from(self, table, study_with, plant):
        """A NaN that the first stage makes last floods the second from its first tensor on, and comes back."""
        summary = plant(table("bf16", ranks=2), "fc1.y", 3, rank=0, nan=1)
        stage = summary["layer_idx"] >= LAYERS // 2
        summary = summary[stage == (summary["rank"] == 1)]
        counter = summary.groupby("rank").cumcount()
        summary = summary.assign(counter=counter, sample_idx=0).reset_index(drop=True)
        plant(summary, "fc1.x", rank=1, nan=7)
        plant(summary, "fc1.dy", nan=7)
        assert summary.query("rank == 1")["counter"].min() < summary.query("rank == 0 and nan == 1")["counter"].min()
        (finding,) = of_kind(study_with(summary.sample(frac=1, random_state=0)), "nonfinite")
        assert (finding.place.site, finding.place.layer, finding.place.rank) == ("fc1.y", 3, 0)
        (finding,) = of_kind(study_with(summary[summary["operation"] == "backward"]), "nonfinite")
        assert (finding.place.site, finding.place.layer, finding.place.rank) == ("fc1.dy", LAYERS - 1, 1)

    def test_modules_outside_the_layers_are_at_the_ends(self, table):
        rows = table(ranks=2).query("site in ('fc1.y', 'fc1.dy')").reset_index(drop=True)
        for module in ("embedding.word_embeddings", "output_layer"):
            ends = rows[rows["layer_idx"] == 0].assign(layer_idx=math.nan, module=module)
            rows = pandas.concat([rows, ends], ignore_index=True)
        ordered = in_order(rows.sample(frac=1, random_state=0), several_ranks=True)
        modules = ordered.query("rank == 0")["module"].tolist()
        assert modules[:2] == ["embedding.word_embeddings", "decoder.layers.0.mlp.linear_fc1"]
        assert modules[LAYERS + 1 : LAYERS + 3] == ["output_layer", "output_layer"]
        assert modules[-1] == "embedding.word_embeddings"

    def test_an_earlier_iteration_is_before_a_smaller_counter(self, table, study_with, plant):
        later = plant(table().assign(iteration=1), "fc1.x", 0, nan=1)
        first = plant(table(), "fc1.dy", 7, inf=2)
        (finding,) = of_kind(study_with(pandas.concat([later, first], ignore_index=True)), "nonfinite")
        assert (finding.place.site, finding.place.iteration) == ("fc1.dy", 0)


class TestMassiveActivations:
    def test_its_course_is_told_from_the_data(self, table, study_with, plant):
        summary = plant(table("bf16", "mxfp8"), "fc1.y", 3, **massive(17, 22592.0))
        summary = plant(summary, "fc1.y", 6, **massive(17, -14208.0))
        place = SimpleNamespace(quant_type="bf16", site="fc1.y", layer=3)
        surface = SimpleNamespace(place=place, peak=(5, 17))
        (finding,) = of_kind(study_with(summary, surfaces=[surface]), "massive_activation")
        assert finding.severity == "warning"
        assert finding.title == "Massive activation: channel 17 of fc1.y reaches 22,592 in layer 3"
        assert "at token 5, in the runs of all 2 types" in finding.text
        assert "-14,208 in layer 6" in finding.text
        assert "taken out again" in finding.text
        assert finding.numbers["token"] == 5
        assert finding.numbers["times_median"] == pytest.approx(22592 / 0.67)

    def test_sites_that_share_the_channel_are_one_finding(self, table, study_with, plant):
        summary = plant(table(), "fc1.y", 3, **massive(17, 5000.0))
        summary = plant(summary, "fc1.x", 4, **massive(17, 6000.0))
        (finding,) = of_kind(study_with(summary), "massive_activation")
        assert finding.place.site == "fc1.y"  # where it is made
        assert "Channel 17 of fc1.x reaches 6,000, in layer 4" in finding.text

    @pytest.mark.parametrize("value", [99.0, 600.0])
    def test_large_is_not_massive(self, table, study_with, plant, value):
        assert of_kind(study_with(plant(table(), "fc1.y", 3, **massive(17, value))), "massive_activation") == []

    def test_weights_and_gradients_are_no_activations(self, table, study_with, plant):
        summary = plant(plant(table(), "fc1.w", 3, **massive(1, 5000.0)), "fc1.dy", 3, **massive(1, 5000.0))
        assert of_kind(study_with(summary), "massive_activation") == []


class TestOutlierChannels:
    def test_a_channel_of_many_layers(self, table, study_with, plant):
        summary = table()
        for layer in range(3):
            plant(summary, "fc1.x", layer, channel_amax=peaked(9, 40.0 + layer))
        (finding,) = of_kind(study_with(summary), "outlier_channels")
        assert (finding.place.site, finding.numbers["channel"], finding.numbers["layers"]) == ("fc1.x", 9, 3)
        assert finding.numbers["times_median_channel"] == pytest.approx(42 / np.median(peaked(9, 42.0)), rel=1e-5)

    def test_few_layers_and_small_channels_are_none(self, table, study_with, plant):
        summary = table()
        for layer in range(2):
            plant(summary, "fc1.x", layer, channel_amax=peaked(9, 40.0))
        for layer in range(LAYERS):
            plant(summary, "fc1.dy", layer, channel_amax=peaked(9, 20.0))
        assert of_kind(study_with(summary), "outlier_channels") == []

    def test_parts_of_different_scale_are_none(self, table, study_with, plant):
        values = np.where(np.arange(WIDTH) < WIDTH // 3, 40.0, 4.0).astype("f4")
        summary = plant(table(), "fc1.dy", channel_amax=values)
        assert of_kind(study_with(summary), "outlier_channels") == []


class TestLayersToKeep:
    def test_the_worst_layers_and_what_is_gained(self, table, study_with, plant):
        summary = plant(table("mxfp8"), "fc1.x", 5, mxfp8__error_squares=0.05 * COUNT)
        (finding,) = of_kind(study_with(summary), "keep_precision")
        assert finding.title == "MXFP8 E4M3: keep layer 5 in higher precision"
        spoilt = (0.05 + 5 * 7e-4) / 6  # three operands, two GEMMs each
        assert finding.numbers["below_median_db"] == pytest.approx(10 * math.log10(spoilt / 7e-4))
        assert finding.numbers["gain_db"] == pytest.approx(10 * math.log10(1 + spoilt / (7 * 7e-4)))

    def test_a_format_that_is_bad_everywhere_has_none(self, table, study_with, plant):
        summary = table("mxfp8")
        for layer in range(4):
            plant(summary, "fc1.x", layer, mxfp8__error_squares=0.05 * COUNT)
        assert of_kind(study_with(summary), "keep_precision") == []

    def test_noise_that_nobody_hears_is_none(self, table, study_with, plant):
        summary = plant(table("fp16"), "fc1.x", 5, fp16__error_squares=1e-5 * COUNT)
        assert of_kind(study_with(summary), "keep_precision") == []


class TestRanks:
    def test_weights_of_data_parallel_ranks(self, table, study_with, plant):
        summary = plant(table(ranks=3), "fc1.w", 4, rank=1, sum_squares=1.1 * COUNT, rms=1.1**0.5)
        (finding,) = of_kind(study_with(summary), "rank_disagreement")
        assert finding.severity == "critical"
        assert (finding.place.site, finding.place.layer) == ("fc1.w", 4)
        assert finding.numbers["tensors"] == 1
        assert finding.numbers["compared"] == LAYERS  # weights only: the samples of the ranks differ
        assert finding.numbers["rms_percent"] == pytest.approx(100 * (1.1**0.5 - 1))

    @pytest.mark.parametrize("spoilt_copy", [None, 2, 3])
    def test_weights_of_a_real_data_parallel_capture(self, analysed, tmp_path, spoilt_copy):
        seen = []  # forward and backward of rank 0, then of rank 1

        def spoil(module, layer, name, tensor):
            if (module, layer, name) == ("mlp.linear_fc2", 1, "weight"):
                seen.append(tensor)
                return 1.25 * tensor if len(seen) - 1 == spoilt_copy else tensor
            return tensor

        study = analysed(write_capture(tmp_path / "capture", ranks=2, spoil=spoil))
        found = of_kind(study, "rank_disagreement")
        assert len(found) == (spoilt_copy is not None)
        kept = 2 * 2 * len(captures.LINEARS)  # of 2 ranks and 2 layers; the backward's are the forward's again
        assert len(replicas(study.of_type("mxfp8"))) == kept + len(found)
        for finding in found:
            assert (finding.severity, finding.place.site, finding.place.layer) == ("critical", "fc2.w", 1)
            assert finding.numbers["tensors"] == 1

    def test_bare_files_say_nothing_of_copies(self, table):
        assert len(replicas(table(ranks=2).assign(shard=None))) == 0

    def test_activations_of_data_parallel_ranks_are_no_copies_though_samples_are_not_known(self, table):
        assert set(replicas(table(ranks=2).assign(sample_idx=0))["site"]) == {"fc1.w"}

    def test_activations_of_other_samples_may_differ(self, table, study_with, plant):
        assert find(study_with(plant(table(ranks=2), "fc1.x", rank=1, sum_squares=2.0 * COUNT))) == []

    def test_activations_of_the_same_samples_must_not(self, table, study_with, plant):
        summary = table(ranks=2).assign(sample_idx=0, dp_rank=0, tp_rank=lambda rows: rows["rank"])
        assert find(study_with(summary)) == []
        plant(summary, "fc1.x", 2, rank=1, sum=5.0)
        (finding,) = of_kind(study_with(summary), "rank_disagreement")
        assert (finding.severity, finding.place.site) == ("warning", "fc1.x")

    def test_shards_summands_and_experts_are_no_copies(self, table):
        summary = table(ranks=2).assign(sample_idx=0, dp_rank=0, tp_rank=lambda rows: rows["rank"])
        assert len(replicas(summary)) == len(summary)
        for changed in (
            {"shard": '[{"over": "tp", "dim": 0}]'},
            {"shard": '[{"over": "cp", "dim": 0}]'},
            {"shard": '[{"over": "tp", "reduce": "sum"}]'},
            {"stage": "partial"},
            {"module": "decoder.layers.0.mlp.experts.linear_fc1"},
            {"module": None},
        ):
            assert len(replicas(summary.assign(**changed))) == 0
        divided = summary.assign(shard='[{"over": "tp", "dim": 0}]', tp_rank=0)  # of data-parallel ranks
        assert len(replicas(divided)) == len(summary)


class TestRuns:
    def rows(self, *sqnr_db):
        return pandas.DataFrame(
            {
                "run": "mxfp4", "baseline": "bf16", "iteration": 0, "micro_batch": 0, "rank": 0,
                "layer_idx": range(len(sqnr_db)), "site": "fc1.y", "operation": "forward", "phase": "post",
                "order": range(len(sqnr_db)), "sqnr_db": sqnr_db, "equal": False,
            }
        )  # fmt: skip

    def test_where_a_run_parts(self, table, study_with):
        rows = self.rows(30.0, 18.0, 8.0, 12.0).sample(frac=1, random_state=1)
        (finding,) = of_kind(study_with(table(), comparison=rows), "divergence")
        assert finding.title == "MXFP4 parts from BF16 at fc1.y of layer 1: 18.0 dB"
        assert "fc1.y of layer 2, in the forward pass, with 8.0 dB" in finding.text
        assert finding.severity == "warning"

    def test_the_same_samples_are_said_where_they_are_known(self, table, study_with):
        said = "The samples are the same."
        for sample, known in ((3, True), (math.nan, False)):
            rows = self.rows(30.0, 8.0).assign(sample_idx=sample)
            (finding,) = of_kind(study_with(table(), comparison=rows), "divergence")
            assert (said in finding.text) is known
        (finding,) = of_kind(study_with(table(), comparison=self.rows(30.0, 8.0)), "divergence")
        assert said not in finding.text

    def test_runs_that_stay_together(self, table, study_with):
        assert find(study_with(table(), comparison=self.rows(30.0, math.inf, 25.0))) == []
        assert find(study_with(table(), comparison=self.rows().iloc[:0])) == []

    def test_losses(self, table, study_with):
        commits = {
            "bf16": {0: {"lm loss": 3.0}, 1: {"lm loss": 2.0}},
            "mxfp8": {0: {"lm loss": 3.0}, 1: {"lm loss": 2.1}},
        }
        (finding,) = find(study_with(table("bf16", "mxfp8"), commits=commits))
        assert finding.numbers["difference_percent"] == pytest.approx(5)
        assert (finding.kind, finding.severity, finding.place.iteration) == ("loss", "warning", 1)
        commits["mxfp8"][1]["lm loss"] = 2.009
        assert find(study_with(table("bf16", "mxfp8"), commits=commits)) == []

    def test_a_loss_that_is_not_finite(self, table, study_with):
        (finding,) = find(study_with(table(), commits={"bf16": {3: {"lm loss": math.nan}}}))
        assert (finding.severity, finding.title) == ("critical", "BF16: the loss is nan in iteration 3")


def test_the_list_is_short_and_the_worst_comes_first():
    many = [
        Finding(kind=kind, severity=severity, title="", text="", weight=float(weight))
        for kind in KINDS
        for severity in SEVERITIES[1:]
        for weight in range(4)
    ]
    critical = Finding(kind="loss", severity="critical", title="", text="")
    shown = ranked([*many, critical])
    assert shown[0] is critical
    assert len(shown) == MOST_SHOWN
    assert [one.severity for one in shown[1:]] == ["warning"] * (MOST_SHOWN - 1)
    assert max(sum(one.kind == kind for one in shown) for kind in KINDS) <= 3


def test_every_rule_has_a_test_of_its_own_kind():
    assert len(RULES) == 8  # a new rule wants its planted fault above


def test_what_statistics_do_not_show_is_said(table, study_with, plant):
    assert unseen(study_with(table())) == ""
    said = unseen(study_with(table().assign(file=None)))
    assert said.startswith("Of this capture statistics alone were kept: they do not show massive activations, ")
    assert "NaN" not in said
    assert unseen(study_with(plant(table(), "fc1.y", 3, file=None))).startswith("Of 1 row of this capture")


def test_a_capture_of_statistics_says_so(analysed, tmp_path):
    study = analysed(write_capture(tmp_path / "capture", mode="statistics"))
    assert find(study) == []
    assert unseen(study).startswith("Of this capture")
