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
        ),
        Flag(
            name="--expert-tensor-parallel-size",
            type=positive_int,
            metavar="N",
            help="ranks that share each expert's weights (default --tensor-model-parallel-size)",
        ),
        Flag(
            name="--num-layers-per-virtual-pipeline-stage",
            type=positive_int,
            metavar="N",
            help="interleaved pipeline schedule, with model chunks of N layers",
        ),
        Flag(
            name="--num-virtual-stages-per-pipeline-rank",
            type=positive_int,
            metavar="N",
            help="interleaved pipeline schedule, with N model chunks in each stage",
        ),
        Flag(
            name="--decoder-first-pipeline-num-layers",
            type=positive_int,
            metavar="N",
            help="layers of the first pipeline stage (default: as many as in the others)",
        ),
        Flag(
            name="--decoder-last-pipeline-num-layers",
            type=positive_int,
            metavar="N",
            help="layers of the last pipeline stage (default: as many as in the others)",
        ),
        Flag(
            name="--no-overlap-p2p-communication",
            dest="overlap_p2p_comm",
            switch=True,
            const=False,
            default=True,
            help="pipeline stages of the interleaved schedule wait for what they send and receive",
        ),
        Flag(
            name="--pipeline-model-parallel-layout",
            metavar="LAYOUT",
            help="layers of every stage, one by one",
            refused="give --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers instead",
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
            refused="TransformerEngine overlaps them through user buffers, which this trainer does not set up",
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
