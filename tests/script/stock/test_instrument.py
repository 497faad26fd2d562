"""script/instrument.py over a made-up Megatron-LM tree: whose packages win, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron.core
from script.instrument import OURS, ROOT

INSTRUMENT = ROOT / "script" / "instrument.py"
ARGUMENTS = """
import argparse
def add_megatron_arguments(parser):
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--transformer-impl", default="transformer_engine")
    return parser
def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
"""
TRAINING = """
def initialize_megatron(allow_no_cuda=False): return allow_no_cuda
def set_jit_fusion_options(): raise RuntimeError
def setup_model_and_optimizer(): pass
def train_step(): pass
def checkpoint_and_decide_exit(): pass
"""
SCRIPT = """
import sys
import beside
import megatron.core, megatron.training
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.training.arguments import parse_args
import megatron.quantscope
if __name__ == "__main__":
    args = parse_args()
    print(megatron.core.__path__[0], megatron.core.__path__[1], megatron.training.__file__, beside.__file__, sep="|")
    probed = hasattr(ColumnParallelLinear, "attach_probe")
    print(probed, args.num_layers, args.quant_type, args.transformer_impl, sep="|")
    sys.exit({code})
"""


@pytest.fixture
def tree(tmp_path):
    """A checkout: the installed megatron-core under a trainer of a few lines."""
    checkout = tmp_path / "Megatron-LM"
    training = checkout / "megatron" / "training"
    training.mkdir(parents=True)
    (checkout / "megatron" / "core").symlink_to(megatron.core.__path__[1])
    for name, text in {"__init__": "", "arguments": ARGUMENTS, "training": TRAINING}.items():
        (training / f"{name}.py").write_text(text)
    (checkout / "beside.py").touch()
    (checkout / "pretrain_gpt.py").write_text(SCRIPT.format(code=0))
    return checkout


def instrument(*arguments, **environment):
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    command = [sys.executable, str(INSTRUMENT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.matrix
def test_core_is_ours_over_theirs_and_everything_else_is_theirs(tree):
    """Also where this tree is first on PYTHONPATH, with its own megatron.training."""
    result = instrument(tree / "pretrain_gpt.py", "--num-layers", 2, "--quant-type", "mxfp8", PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr
    places, facts = result.stdout.splitlines()
    ours, theirs, training, beside = map(Path, places.split("|"))
    assert ours == ROOT / "megatron" / "core"
    assert theirs == tree / "megatron" / "core"
    assert training == tree / "megatron" / "training" / "__init__.py"
    assert beside == tree / "beside.py"
    assert facts == "True|2|mxfp8|local"  # without a GPU TransformerEngine is not the default


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--quant-type", "mxfp7"), "argument --quant-type: invalid choice: 'mxfp7'"),
        (("--tensor-dry-run",), "--tensor-dry-run: needs the pretrain_gpt.py of this tree"),
        (("--tensor-filter", "planets=1"), "--tensor-filter"),
    ],
)
def test_our_flags_are_checked_at_once(tree, flags, said):
    result = instrument(tree / "pretrain_gpt.py", *flags)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("instrument.py: error: ")
    assert said in line


def test_a_version_outside_the_range_is_refused(tree):
    core = tree / "megatron" / "core"
    core.unlink()
    core.mkdir()
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 0\n")
    result = instrument(tree / "pretrain_gpt.py")
    assert result.returncode == 2
    assert result.stderr.startswith(
        "instrument.py: error: megatron-core 0.20.0 is not supported: this tree needs >= 0.14"
    )


@pytest.mark.parametrize(("arguments", "code"), [((), 2), (("--help",), 0), (("nowhere.py",), 2)])
def test_usage(arguments, code):
    result = instrument(*arguments)
    assert result.returncode == code
    assert "/path/to/Megatron-LM/pretrain_gpt.py FLAGS" in result.stdout + result.stderr


def test_only_packages_of_ours_are_answered_for():
    assert all((folder / name.rpartition(".")[2] / "__init__.py").is_file() for name, folder in OURS.items())
    assert "megatron.training" not in OURS
