"""Flags that say how the work is split over ranks."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import positive_int

PARALLELISM_FLAGS = FlagGroup(
    "parallelism",
    (
        Flag(
            name="--tensor-model-parallel-size",
            type=positive_int,
            default=1,
            metavar="N",
            help="ranks that share each layer's weights (default 1)",
        ),
        Flag(
            name="--pipeline-model-parallel-size",
            type=positive_int,
            default=1,
            metavar="N",
            help="stages the layers are split into (default 1)",
        ),
        Flag(
            name="--sequence-parallel",
            switch=True,
            default=False,
            help="split norms and dropout over the tensor parallel ranks along the sequence; off with one such rank",
        ),
        Flag(
            name="--context-parallel-size",
            type=positive_int,
            default=1,
            metavar="N",
            help="ranks that share each sequence (default 1)",
        ),
        Flag(
            name="--expert-model-parallel-size",
            type=positive_int,
            default=1,
            metavar="N",
            help="ranks that share the experts (default 1)",
            refused="expert parallelism is not supported yet",
        ),
        Flag(
            name="--num-layers-per-virtual-pipeline-stage",
            type=positive_int,
            metavar="N",
            help="interleaved pipeline schedule",
            refused="the interleaved pipeline schedule is not supported yet",
        ),
        Flag(
            name="--use-distributed-optimizer",
            switch=True,
            default=False,
            help="split the optimizer's state over the data parallel ranks",
        ),
        Flag(
            name="--overlap-grad-reduce",
            switch=True,
            default=False,
            help="reduce gradients while backward runs",
        ),
        Flag(
            name="--overlap-param-gather",
            switch=True,
            default=False,
            help="gather parameters while forward runs; needs --use-distributed-optimizer and --overlap-grad-reduce",
        ),
        Flag(
            name="--distributed-backend",
            choices=("nccl", "gloo"),
            help="communication library (default nccl with a GPU, gloo without)",
        ),
        Flag(
            name="--distributed-timeout-minutes",
            type=positive_int,
            default=10,
            metavar="N",
            help="a collective that takes longer is an error (default 10)",
        ),
        Flag(
            name="--tp-comm-overlap",
            switch=True,
            default=False,
            help="overlap tensor parallel communication with GEMMs",
            refused="needs TransformerEngine's modules, which are not supported yet",
        ),
        Flag(
            name="--use-torch-fsdp2",
            switch=True,
            default=False,
            help="fully sharded data parallelism of torch",
            refused="fully sharded data parallelism is not supported; use --use-distributed-optimizer",
        ),
        Flag(
            name="--local-rank",
            type=int,
            metavar="N",
            help="accepted and without effect: torchrun sets LOCAL_RANK",
        ),
    ),
)
