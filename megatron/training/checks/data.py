"""Sources of data and tokenizers that contradict each other, or are missing."""

from __future__ import annotations

from megatron.training.checks.table import Check

DATA_CHECKS: tuple[Check, ...] = (
    (
        lambda a: bool(a.mock_data) + bool(a.data_path) + bool(a.train_data_path) != 1,
        "give one of --data-path, --train-data-path and --mock-data",
    ),
    (
        lambda a: a.split and a.train_data_path,
        "--split goes with --data-path, not with --train-data-path",
    ),
    (
        lambda a: not a.tokenizer_type,
        "--tokenizer-type is needed; with --mock-data, NullTokenizer and --vocab-size will do",
    ),
    (
        lambda a: a.tokenizer_type == "NullTokenizer" and not a.vocab_size,
        "--tokenizer-type NullTokenizer needs --vocab-size",
    ),
    (
        lambda a: a.tokenizer_type == "GPT2BPETokenizer" and not (a.vocab_file and a.merge_file),
        "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file",
    ),
    (
        lambda a: (
            a.tokenizer_type not in ("NullTokenizer", "ByteLevelTokenizer", "GPT2BPETokenizer")
            and not a.tokenizer_model
        ),
        "--tokenizer-type {tokenizer_type} needs --tokenizer-model",
    ),
)
