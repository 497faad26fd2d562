"""Layers that can not be dealt over the pipeline's stages as they were asked to be."""

from __future__ import annotations

import argparse

from megatron.training.checks.table import Check
from megatron.training.layout import is_uneven, middle_layers


def _is_interleaved(args: argparse.Namespace) -> bool:
    return args.virtual_pipeline_model_parallel_size is not None


def _stages_layers(args: argparse.Namespace) -> list[int]:
    """Layers of the first, a middle and the last stage, as far as they differ."""
    layers, stages = middle_layers(args)
    ends = (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    return [each for each in (*ends, layers // stages if stages > 0 else None) if each is not None]


PIPELINE_CHECKS: tuple[Check, ...] = (
    (
        lambda a: is_uneven(a) and a.pipeline_model_parallel_size == 1,
        "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need "
        "--pipeline-model-parallel-size > 1",
    ),
    (
        lambda a: is_uneven(a) and (middle_layers(a)[0] < 0 or bool(middle_layers(a)[0]) != bool(middle_layers(a)[1])),
        "--num-layers {num_layers} in {pipeline_model_parallel_size} stages: the first has "
        "{decoder_first_pipeline_num_layers} and the last {decoder_last_pipeline_num_layers} (None: as the others); "
        "every stage needs a layer, and every layer a stage",
    ),
    (
        lambda a: is_uneven(a) and middle_layers(a)[1] and middle_layers(a)[0] % middle_layers(a)[1],
        "--num-layers {num_layers}: what --decoder-first-pipeline-num-layers {decoder_first_pipeline_num_layers} and "
        "--decoder-last-pipeline-num-layers {decoder_last_pipeline_num_layers} leave is not a multiple of the stages "
        "that are left of --pipeline-model-parallel-size {pipeline_model_parallel_size}",
    ),
    (
        lambda a: not is_uneven(a) and a.num_layers % a.pipeline_model_parallel_size,
        "--num-layers {num_layers} is not a multiple of --pipeline-model-parallel-size {pipeline_model_parallel_size}",
    ),
    (
        lambda a: a.num_layers_per_virtual_pipeline_stage and a.num_virtual_stages_per_pipeline_rank,
        "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank exclude each other",
    ),
    (
        lambda a: a.num_layers_per_virtual_pipeline_stage and is_uneven(a),
        "--num-layers-per-virtual-pipeline-stage does not go with stages of uneven length; give "
        "--num-virtual-stages-per-pipeline-rank",
    ),
    (
        lambda a: (
            a.num_layers_per_virtual_pipeline_stage
            and a.num_layers // a.pipeline_model_parallel_size % a.num_layers_per_virtual_pipeline_stage
        ),
        "--num-layers {num_layers} in {pipeline_model_parallel_size} pipeline stages can not be cut into chunks of "
        "--num-layers-per-virtual-pipeline-stage {num_layers_per_virtual_pipeline_stage}",
    ),
    (
        lambda a: _is_interleaved(a) and a.pipeline_model_parallel_size == 1,
        "the interleaved schedule needs --pipeline-model-parallel-size > 1",
    ),
    (
        lambda a: _is_interleaved(a) and not a.overlap_p2p_comm and a.pipeline_model_parallel_size == 2,
        "the interleaved schedule with --no-overlap-p2p-communication needs --pipeline-model-parallel-size > 2, as in "
        "Megatron-LM",
    ),
    (
        lambda a: (
            _is_interleaved(a) and any(layers % a.virtual_pipeline_model_parallel_size for layers in _stages_layers(a))
        ),
        "--num-layers {num_layers} in {pipeline_model_parallel_size} pipeline stages: the layers of a stage are not a "
        "multiple of its {virtual_pipeline_model_parallel_size} model chunks",
    ),
)
