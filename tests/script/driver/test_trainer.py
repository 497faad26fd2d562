import sys

import pytest

from script.driver import trainer
from script.driver.inputs import BadInput
from script.driver.options import COLLECTION, parse


def options_of(*argv):
    return parse(COLLECTION, argv)


def read(options, quant_type="mxfp8"):
    return trainer.arguments(options, trainer.flags(options, quant_type, trainer.QUICK_INPUTS))


def test_the_trainer_reads_what_was_asked_for(tmp_path):
    args = read(options_of("quick", "--control-iter", "3", "--collect-micro-batches", "2"), "hifp8")
    assert (args.quant_type, args.control_iter, args.collect_micro_batches) == ("hifp8", 3, 2)
    assert (args.save_tensors, args.tensor_save_dir) == (True, str(tmp_path / "enhanced_tensor_logs"))
    assert (args.global_batch_size, args.micro_batch_size) == (2, 1)
    assert (args.bf16, args.fp16, args.mock_data) == (True, False, True)


@pytest.mark.parametrize(
    ("dtype", "bf16", "fp16"), [("bf16", True, False), ("fp16", False, True), ("fp32", False, False)]
)
def test_dtype(dtype, bf16, fp16):
    args = read(options_of("--dtype", dtype))
    assert (args.bf16, args.fp16) == (bf16, fp16)


def test_what_follows_the_dashes_wins():
    args = read(
        options_of("--control-iter", "2", "--", "--lr", "0.5", "--micro-batch-size", "4", "--control-iter", "5")
    )
    assert (args.lr, args.micro_batch_size, args.global_batch_size, args.control_iter) == (0.5, 4, 4, 5)


def test_every_data_parallel_rank_gets_its_micro_batches():
    options = options_of("--nproc", "4", "--collect-micro-batches", "3", "--", "--tensor-model-parallel-size", "2")
    args = read(options)
    assert (args.world_size, args.data_parallel_size, args.global_batch_size) == (4, 2, 6)


def test_training_goes_on_at_least_as_long_as_collecting():
    assert read(options_of("--control-iter", "250")).train_iters == 250
    assert read(options_of("--control-iter", "0")).train_iters == trainer.ITERATIONS


def test_launch():
    one = trainer.launch(options_of(), ["--lr", "1"])
    assert one == [sys.executable, "-u", str(trainer.TRAINER), "--lr", "1"]
    two = trainer.launch(options_of("--nproc", "2"), [])
    assert two[2:4] == ["-m", "torch.distributed.run"]
    assert "--nproc_per_node=2" in two


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--", "--learning-rate", "1"], "the trainer has no flag --learning-rate"),
        (["--", "--fp4-recipe", "custom"], "--fp4-recipe"),
        (["--", "--num-layers", "no"], "--num-layers"),
        (["--nproc", "3", "--", "--tensor-model-parallel-size", "2"], "--nproc 3 is not a multiple"),
        (["--", "--pipeline-model-parallel-size", "2"], "--nproc 1 is not a multiple of .* \\(1 x 2 x 1\\)"),
    ],
)
def test_flags_of_the_trainer_are_checked_before_anything_is_set_up(argv, line):
    with pytest.raises(BadInput, match=line):
        trainer.check_flags(options_of(*argv))


def test_the_trainers_own_checks_are_passed_on():
    with pytest.raises(BadInput, match="--num-attention-heads 7"):
        read(options_of("--", "--num-attention-heads", "7"))


def test_a_preset_or_a_recipe_after_the_dashes_says_the_type(tmp_path, monkeypatch):
    monkeypatch.delenv("CUSTOM_QUANT_TYPE", raising=False)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: mine\ndefault: mxfp4\n")
    for given in ("--quant-preset te-mxfp8", f"--quant-recipe {recipe}"):
        options = options_of("--", *given.split())
        trainer.check_flags(options)
        assert "--quant-type" not in trainer.flags(options, "mxfp8", trainer.QUICK_INPUTS)
    assert read(options).quant_recipe == str(recipe)
    by_hand = options_of("single", "hifp8", "--", "--quant-preset", "te-mxfp8")
    assert read(by_hand, "hifp8").quant_type == "hifp8"


@pytest.mark.parametrize("type_by_hand", [("single", "mxfp8"), ("batch",)])
def test_a_recipe_has_no_type_beside_it(tmp_path, type_by_hand):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("default: mxfp4\n")
    with pytest.raises(BadInput, match="--quant-recipe says what is quantised how: leave out the type"):
        trainer.check_flags(options_of(*type_by_hand, "--", "--quant-recipe", str(recipe)))
    with pytest.raises(BadInput, match="--quant-recipe: there is no file nowhere"):
        trainer.check_flags(options_of("--", "--quant-recipe", "nowhere.yaml"))
