"""What was found is where a reader looks: in the texts, on the quick sheet, and in figures that say it themselves."""

from dataclasses import replace

import numpy as np
import pytest

from megatron.quantscope.analysis.findings import find
from megatron.quantscope.report import massive, quick, surfaces
from megatron.quantscope.report.figures import FIGURES
from megatron.quantscope.report.style import house_style
from megatron.quantscope.report.survival import survival
from megatron.quantscope.report.text import findings_text, global_text, tensor_text
from tests.quantscope.analysis.captures import write_capture

CHANNEL, VALUE = 17, 20480.0


def _massive(module, layer, name, tensor):
    if module == "mlp.linear_fc2" and name == "output" and layer in (1, 3):
        tensor = tensor.clone()
        tensor[0, 0, CHANNEL] = VALUE if layer == 1 else -VALUE / 2
    return tensor


@pytest.fixture(scope="module")
def spoilt(study_of, tmp_path_factory):
    study = study_of(write_capture(tmp_path_factory.mktemp("massive"), layers=4, spoil=_massive))
    return replace(study, findings=find(study))


def texts(figure):
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_gaussian_data_have_no_finding(small_study, wide_study):
    assert find(small_study) == []
    of_runs = ("loss", "divergence")  # whose samples and losses this capture makes up for each type
    assert [finding for finding in find(wide_study) if finding.kind not in of_runs] == []


def test_the_massive_activation_is_found_with_its_token(spoilt):
    (finding,) = [one for one in spoilt.findings if one.kind == "massive_activation"]
    assert f"channel {CHANNEL} of fc2.y reaches 20,480 in layer 1" in finding.title
    assert (finding.numbers["token"], finding.numbers["value"]) == (0, VALUE)
    assert "-10,240 in layer 3" in finding.text


def test_every_finding_names_a_figure_that_there_is(spoilt):
    paths = {f"{spec.topic}/{spec.name}{'_mxfp8' if spec.per_type else ''}.png" for spec in FIGURES}
    assert {finding.figure for finding in spoilt.findings} <= paths


def test_figures_name_the_channel_by_themselves(spoilt):
    with house_style():
        along = texts(massive.draw_massive_activations(spoilt, "mxfp8"))
        assert f"channel {CHANNEL}" in along
        assert "20,480" in along
        assert "-10,240" in along
        named = texts(surfaces.draw_channel_images(spoilt, "mxfp8"))
        assert any(text.strip() == str(CHANNEL) for text in named)


def test_texts_and_the_quick_sheet_begin_with_the_findings(spoilt, small_study):
    title = spoilt.findings[0].title
    for text in (tensor_text(spoilt), global_text({"source": "x", "types": {}, "problems": []}, spoilt.findings)):
        assert text.index(title) < 400
    with house_style():
        assert title in texts(quick.draw_quick_analysis(spoilt))
        assert "What stands out" not in texts(quick.draw_quick_analysis(small_study))
    assert findings_text([]) == "== Findings: nothing stands out"


def test_survival_is_the_share_of_elements_at_or_beyond(small_study):
    rows = small_study.of_type("mxfp8").query("site == 'fc1.w' and layer_idx == 0")
    binades, shares = survival(rows)
    weight = _weight(rows)
    rms = np.sqrt(np.mean(weight**2))
    for binade, share in zip(binades[:-1], shares[:-1], strict=True):
        assert 10**share == pytest.approx(np.mean(np.abs(weight) >= 0.999999 * rms * 2**binade), rel=1e-9)
    assert 2 ** binades[-1] * rms == pytest.approx(np.abs(weight).max())


def _weight(rows):
    import torch

    return torch.load(rows["file"].iloc[0], weights_only=True)["tensor"].double().numpy()
