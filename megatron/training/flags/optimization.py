"""Flags of the batch, the optimizer and the schedules of learning rate and weight decay."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import non_negative_int, positive_float, positive_int
from megatron.training.flags.values import fraction, non_negative_float

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WD_INCREMENT_STYLES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adam", "sgd")

BATCH_FLAGS = FlagGroup(
    "batch and length of training",
    (
        Flag(name="--micro-batch-size", type=positive_int, metavar="N", help="samples of one forward pass on a rank"),
        Flag(
            name="--global-batch-size",
            type=positive_int,
            metavar="N",
            help="samples of one optimizer step (default micro-batch size x data parallel size)",
        ),
        Flag(
            name="--rampup-batch-size",
            nargs=3,
            type=positive_int,
            metavar="N",
            help="START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES; needs "
            "--train-samples",
        ),
        Flag(name="--train-iters", type=positive_int, metavar="N", help="optimizer steps in all"),
        Flag(name="--train-samples", type=positive_int, metavar="N", help="samples in all, instead of --train-iters"),
        Flag(
            name="--exit-interval",
            type=positive_int,
            metavar="N",
            help="stop after an iteration that N divides",
        ),
        Flag(
            name="--exit-duration-in-mins",
            type=positive_float,
            metavar="X",
            help="stop after the iteration in which X minutes have passed",
        ),
        Flag(
            name="--calculate-per-token-loss",
            switch=True,
            default=False,
            help="weigh tokens alike over the whole batch, not micro-batches",
        ),
        Flag(
            name="--no-check-for-nan-in-loss-and-grad",
            dest="check_for_nan_in_loss_and_grad",
            switch=True,
            const=False,
            default=True,
            help="train on when loss or gradients are not finite (default: stop before the step)",
        ),
    ),
)

OPTIMIZER_FLAGS = FlagGroup(
    "optimizer and schedules",
    (
        Flag(name="--optimizer", choices=OPTIMIZERS, default="adam", help="adam (AdamW) or sgd (default adam)"),
        Flag(name="--lr", type=non_negative_float, metavar="X", help="largest learning rate"),
        Flag(
            name="--min-lr",
            type=non_negative_float,
            default=0.0,
            metavar="X",
            help="learning rate after the decay (default 0)",
        ),
        Flag(
            name="--decoupled-lr",
            type=positive_float,
            metavar="X",
            help="learning rate of embedding and output head (default --lr)",
        ),
        Flag(
            name="--decoupled-min-lr",
            type=non_negative_float,
            metavar="X",
            help="theirs after the decay (default --min-lr)",
        ),
        Flag(name="--lr-decay-style", choices=LR_DECAY_STYLES, default="linear", help="shape of the decay (linear)"),
        Flag(name="--lr-decay-iters", type=positive_int, metavar="N", help="length of the decay (default: all)"),
        Flag(name="--lr-decay-samples", type=positive_int, metavar="N", help="the same in samples"),
        Flag(name="--lr-warmup-iters", type=non_negative_int, default=0, metavar="N", help="length of the warm-up"),
        Flag(name="--lr-warmup-samples", type=non_negative_int, default=0, metavar="N", help="the same in samples"),
        Flag(name="--lr-warmup-fraction", type=fraction, metavar="X", help="the same as a share of the decay"),
        Flag(
            name="--lr-warmup-init",
            type=non_negative_float,
            default=0.0,
            metavar="X",
            help="learning rate where the warm-up starts (default 0)",
        ),
        Flag(
            name="--lr-wsd-decay-style",
            choices=WSD_DECAY_STYLES,
            default="exponential",
            help="shape of WSD's last part (default exponential)",
        ),
        Flag(name="--lr-wsd-decay-iters", type=positive_int, metavar="N", help="length of WSD's last part"),
        Flag(name="--lr-wsd-decay-samples", type=positive_int, metavar="N", help="the same in samples"),
        Flag(
            name="--weight-decay",
            type=non_negative_float,
            default=0.01,
            metavar="X",
            help="weight decay (default 0.01)",
        ),
        Flag(name="--start-weight-decay", type=non_negative_float, metavar="X", help="weight decay at the start"),
        Flag(name="--end-weight-decay", type=non_negative_float, metavar="X", help="weight decay at the end"),
        Flag(
            name="--weight-decay-incr-style",
            choices=WD_INCREMENT_STYLES,
            default="constant",
            help="how it grows (default constant)",
        ),
        Flag(
            name="--clip-grad",
            type=non_negative_float,
            default=1.0,
            metavar="X",
            help="largest norm of the gradient; 0: not clipped (default 1)",
        ),
        Flag(name="--adam-beta1", type=fraction, default=0.9, metavar="X", help="(default 0.9)"),
        Flag(name="--adam-beta2", type=fraction, default=0.999, metavar="X", help="(default 0.999)"),
        Flag(name="--adam-eps", type=positive_float, default=1e-8, metavar="X", help="(default 1e-8)"),
        Flag(name="--sgd-momentum", type=fraction, default=0.9, metavar="X", help="(default 0.9)"),
        Flag(
            name="--override-opt-param-scheduler",
            switch=True,
            default=False,
            help="take the schedules from the command line, not from the checkpoint",
        ),
        Flag(
            name="--use-checkpoint-opt-param-scheduler",
            switch=True,
            default=False,
            help="take the schedules from the checkpoint, whatever the command line says",
        ),
    ),
)
