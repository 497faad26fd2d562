"""Flags that say what the model reads: tokenizer, data files, sequence length."""

from __future__ import annotations

from megatron.quantscope.flags import Flag, FlagGroup
from megatron.quantscope.flags.values import non_negative_int, positive_int
from megatron.training.flags.values import split_weights

TOKENIZERS = (
    "NullTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "GPT2BPETokenizer",
    "ByteLevelTokenizer",
)
DATA_FLAGS = FlagGroup(
    "data",
    (
        Flag(name="--seq-length", type=positive_int, metavar="N", help="tokens of a sample"),
        Flag(
            name="--data-path",
            nargs="+",
            metavar="PREFIX",
            help="PREFIX.bin and PREFIX.idx, or a blend: PREFIX PREFIX ... or WEIGHT PREFIX WEIGHT PREFIX ...",
        ),
        Flag(name="--train-data-path", nargs="+", metavar="PREFIX", help="the same for training data alone"),
        Flag(name="--valid-data-path", nargs="+", metavar="PREFIX", help="the same for validation data alone"),
        Flag(name="--test-data-path", nargs="+", metavar="PREFIX", help="the same for test data alone"),
        Flag(
            name="--data-args-path",
            metavar="FILE",
            help="a file that holds what --data-path would: names or weights and names, separated by blanks or lines",
        ),
        Flag(
            name="--per-split-data-args-path",
            metavar="FILE",
            help='JSON: {"train": [...], "valid": [...], "test": [...]}, each as --train-data-path would have it',
        ),
        Flag(name="--mock-data", switch=True, default=False, help="made-up data: counting sequences, no files"),
        Flag(
            name="--split",
            type=split_weights,
            metavar="A,B,C",
            help="shares of training, validation and test data in --data-path (default 969,30,1); no matter with "
            "--mock-data, as in Megatron-LM",
        ),
        Flag(
            name="--data-cache-path",
            metavar="DIR",
            help="where sample indices are kept (default: the folder PREFIX/cache)",
        ),
        Flag(
            name="--no-mmap-bin-files",
            dest="mmap_bin_files",
            switch=True,
            const=False,
            default=True,
            help="read .bin files by seek instead of mapping them into memory",
        ),
        Flag(
            name="--num-workers",
            type=non_negative_int,
            metavar="N",
            help="processes that read data (default 2; 0 without GPU, where the cores are the model's)",
        ),
        Flag(
            name="--dataloader-type",
            default="single",
            metavar="NAME",
            help="order of the samples: single (as the dataset shuffled them)",
            refused="only single is supported",
        ),
        Flag(name="--reset-position-ids", switch=True, default=False, help="positions start anew after each document"),
        Flag(name="--reset-attention-mask", switch=True, default=False, help="no attention across documents"),
        Flag(name="--eod-mask-loss", switch=True, default=False, help="no loss on end-of-document tokens"),
        Flag(
            name="--no-create-attention-mask-in-dataloader",
            dest="create_attention_mask_in_dataloader",
            switch=True,
            const=False,
            default=True,
            help="accepted and without effect: a mask is made only for --reset-attention-mask, since attention is "
            "causal by itself",
        ),
        Flag(
            name="--tokenizer-type",
            choices=TOKENIZERS,
            metavar="NAME",
            help="one of " + ", ".join(TOKENIZERS),
        ),
        Flag(
            name="--tokenizer-model",
            metavar="PATH",
            help="its file or directory; for HuggingFaceTokenizer a directory or a tokenizer.json",
        ),
        Flag(name="--vocab-file", metavar="FILE", help="vocabulary of GPT2BPETokenizer"),
        Flag(name="--merge-file", metavar="FILE", help="merges of GPT2BPETokenizer"),
        Flag(name="--tiktoken-pattern", metavar="NAME", help="splitting pattern of TikTokenizer, v1 or v2"),
        Flag(
            name="--tiktoken-num-special-tokens",
            type=non_negative_int,
            default=1000,
            metavar="N",
            help="special tokens of TikTokenizer (default 1000)",
        ),
    ),
)
