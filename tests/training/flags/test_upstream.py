"""Flags that only Megatron-LM knows: told apart from mistyped ones, each with a reason where there is one."""

import pytest

from megatron.training.arguments import parse_arguments
from megatron.training.failure import UsageError
from megatron.training.flags import FLAG_GROUPS
from megatron.training.flags.upstream import NAMES_FILE, refusal
from megatron.training.main import main

NAMES = [line for line in NAMES_FILE.read_text(encoding="utf-8").splitlines() if line.startswith("--")]
OURS = {flag.name for group in FLAG_GROUPS for flag in group.flags}
KNOWN = ": known to Megatron-LM, not supported here"


def answer(command, *words):
    with pytest.raises(UsageError) as caught:
        parse_arguments([*command(), *words])
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--wandb-entity", "me"], ": only TensorBoard is supported (--tensorboard-dir)"),
        (["--one-logger-project=me"], ": only TensorBoard is supported (--tensorboard-dir)"),
        (["--optimizer-cpu-offload"], ": nothing is offloaded to the host's memory"),
        (["--use-flash-attn"], ": attention kernels are chosen by --attention-backend"),
        (["--save-dgrads-interval", "3"], ": this is what --save-tensors is for"),
        (["--enable-cuda-graph"], ": CUDA graphs would replay what capture and the quantised GEMMs do in Python"),
        (["--window-size", "-1,0"], ""),
    ],
)
def test_answer(command, words, reason):
    assert answer(command, *words) == [words[0].partition("=")[0] + KNOWN + reason]


def test_every_flag_is_answered_at_once(command, capsys):
    assert main([*command(), "--wandb-entity", "-1", "--rl-profile", "--xyzzy"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": error: ")[1].split(KNOWN)[0] for line in lines] == [
        "--wandb-entity",
        "--rl-profile",
        "unknown flag --xyzzy; --help lists all flags",
    ]


def test_no_flag_of_megatron_is_unknown(command):
    theirs = [name for name in NAMES if name not in OURS]
    lines = answer(command, *theirs)
    assert [line.split(KNOWN)[0] for line in lines] == theirs
    assert len(theirs) > 500  # else the list has not been read


def test_the_names_are_whole():
    assert sorted(set(NAMES)) == NAMES
    assert {"--num-layers", "--profile", "--moe-grouped-gemm", "--override-opt-param-scheduler"} <= set(NAMES)
    assert not any("_" in name for name in NAMES)


def test_a_name_of_nobody_is_not_refused_as_known():
    assert refusal("--xyzzy") is None
    assert refusal("# Names of Megatron-LM's flags") is None


@pytest.mark.parametrize("flag", ["--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"])
def test_megatron_has_names_with_underscores(command, flag):
    args = parse_arguments([*command(), flag])
    assert args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    assert parse_arguments([*command(), "--tensorboard-dir=a_b"]).tensorboard_dir == "a_b"
