"""TransformerEngine's settings, and what is said where it can not be used."""

import os

import pytest
import torch

from megatron.core.extensions import transformer_engine
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.flash_attention import FlashAttention
from megatron.training import te_layer_spec
from megatron.training.attention_backend import core_attention
from megatron.training.failure import UsageError
from megatron.training.main import main
from megatron.training.model import model_config
from megatron.training.te_layer_spec import engine_fields, require_engine, te_layer

ENGINE = {"transformer_impl": "transformer_engine"}
MXFP8 = {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}
DELAYED = {
    "fp8_format": "hybrid",
    "fp8_margin": 2,
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "max",
    "no_fp8_wgrad": True,
    "tp_only_amax_red": True,
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    """The package can be found, and is not looked at."""
    monkeypatch.setattr("megatron.training.checks.kernels._engine_is_missing", lambda: False)


def test_local_layers_are_named_as_such(parse):
    assert engine_fields(parse()) == {"transformer_impl": "local"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (MXFP8, {"fp8": "e4m3", "fp8_recipe": "mxfp8", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}),
        (
            DELAYED,
            {
                "fp8": "hybrid",
                "fp8_recipe": "delayed",
                "fp8_margin": 2,
                "fp8_amax_history_len": 1024,
                "fp8_amax_compute_algo": "max",
                "fp8_wgrad": False,
                "tp_only_amax_red": True,
            },
        ),
        ({"fp8_format": "hybrid", "fp8_param_gather": True, "use_distributed_optimizer": True}, {"fp8_param": True}),
        ({"attention_backend": "fused"}, {"attention_backend": AttnBackend.fused, "fp8": None}),
    ],
    ids=["mxfp8", "delayed", "weights", "attention"],
)
def test_flags_become_settings(parse, changes, expected):
    config = model_config(parse(**ENGINE, **changes))
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_setting_that_this_core_does_not_have_is_refused_by_its_flag(parse, monkeypatch):
    kept = [field for field in te_layer_spec.fields(TransformerConfig) if field.name not in ("fp4", "fp4_recipe")]
    monkeypatch.setattr(te_layer_spec, "fields", lambda _: kept)
    assert "fp4" not in engine_fields(parse(**ENGINE))
    with pytest.raises(UsageError, match=r"^--fp4-format: the installed megatron-core has no such setting"):
        engine_fields(parse(**ENGINE, fp4_format="e2m1"))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        (ENGINE, "--transformer-impl transformer_engine"),
        ({"cross_entropy_fusion_impl": "te"}, "--cross-entropy-fusion-"),
    ],
)
def test_without_a_gpu_it_is_said_before_anything_is_built(command, monkeypatch, capsys, changes, flag):
    monkeypatch.setattr(te_layer_spec, "has_gpu", lambda: False)
    monkeypatch.setattr("megatron.training.training.initialize", lambda args: pytest.fail("nothing was refused"))
    assert main(command(**changes)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pretrain_gpt.py: error: {flag}")
    assert error.endswith("needs a CUDA device, and this machine has none\n")
    assert error.count("\n") == 1


def test_local_layers_need_no_gpu(parse):
    require_engine(parse())


def test_the_engine_is_told_of_deterministic_mode(parse, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "restored by this fixture")
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    require_engine(parse())
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO" not in os.environ
    require_engine(parse(deterministic_mode=True))
    assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"


def test_a_package_that_can_not_be_imported_is_named(parse, monkeypatch):
    monkeypatch.setattr(te_layer_spec, "has_gpu", lambda: True)
    monkeypatch.setattr(transformer_engine, "HAVE_TE", False)
    with pytest.raises(UsageError, match="the package transformer-engine is there and can not be imported"):
        te_layer(parse(**ENGINE), None)


@pytest.mark.parametrize("backend", ["auto", "unfused", "local", "flash"])
def test_the_backend_chooses_the_class(parse, backend):
    found = core_attention(parse(attention_backend=backend, attention_dropout=0, bf16=True))
    assert found is (FlashAttention if backend == "flash" else DotProductAttention)


@pytest.mark.parametrize(
    ("on_gpu", "changes", "line"),
    [
        (
            False,
            {},
            "--attention-backend flash has no dropout on a CPU, and --attention-dropout is 0.1; set it to 0, or use "
            "unfused",
        ),
        (True, {}, "--attention-backend flash needs --bf16 or --fp16 on a GPU; or use unfused"),
        (
            True,
            {"bf16": True, "kv_channels": 320},
            "--attention-backend flash takes heads of up to 256 features, not 320; use unfused",
        ),
    ],
    ids=["dropout", "dtype", "heads"],
)
def test_what_the_flash_kernel_of_this_machine_can_not_do(parse, monkeypatch, on_gpu, changes, line):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    with pytest.raises(UsageError) as caught:
        core_attention(parse(attention_backend="flash", **changes))
    assert str(caught.value) == line
