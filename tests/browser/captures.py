"""The captures whose reports are opened: a small one of two runs, and one with every hostile name there is."""

import torch

from megatron.quantscope.analysis.analyse import analyse
from megatron.quantscope.capture import open_capture
from megatron.quantscope.report.html.build import write_report
from megatron.quantscope.report.progress import Progress
from tests.quantscope.analysis.captures import save, write_capture

TYPES = ("bf16", "mxfp8")
FORMATS = ("mxfp8", "mxfp4", "nvfp4", "hifp8")  # one of each way to scale
HOSTILE = (
    '<img src=x onerror="window.hacked=1">',
    "</script><script>window.hacked=2</script>",
    "'\"><svg/onload=window.hacked=3>",
    "${window.hacked=4}{{7*7}}{% raw %}",
    "=cmd|'/c calc'!A1",
    "__proto__",
    "constructor",
    "%3Cscript%3E%2F#?&=;",
    "模块 ünïcode \U0001f642 \u202egnp",
    "line\nbreak\ttab\u2028separator",
    "x" * 3000,
)


def report_of(directory, target):
    """(study, path of its report) of a capture."""
    study = analyse(open_capture(directory), target, 1, Progress(), FORMATS)
    return study, write_report(study, target / "report.html")


def write_small(directory):
    """Two runs of two layers, two ranks and two iterations, a loud channel, and a row with a NaN."""

    def spoil(module, layer, name, tensor):
        if (module, layer, name) == ("mlp.linear_fc2", 1, "output"):
            tensor[..., 5] *= 5000
        if (module, layer, name) == ("mlp.linear_fc1", 0, "grad_output"):
            tensor[0, 0, 0] = float("nan")
        return tensor

    for quant_type in TYPES:
        write_capture(directory, quant_type, layers=2, ranks=2, iterations=2, spoil=spoil)
    return directory


def write_hostile(directory):
    """Files of another tool, whose metadata tells every hostile name as module, tensor and type of layer."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(HOSTILE):
        for layer in range(2):
            stamp, place = f"20261121_120000_{2 * number + layer:04d}", f"linear_L{layer}_forward_pre_linear"
            save(
                directory / f"{stamp}_iter000_{place}_bf16_rank0_sample0_input.pt",
                torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(number)),
                module=f"decoder.layers.{layer}.{name}",
                tensor_name=name,
                layer_type="linear",
                component=name,
                layer_idx=layer,
                iteration=0,
                rank=0,
            )
    return directory
