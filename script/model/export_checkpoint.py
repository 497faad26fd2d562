"""Turn a Megatron checkpoint of a Llama-type model into a Hugging Face directory.

    python -m script.model.export_checkpoint CHECKPOINT_DIR --output HF_DIR

CHECKPOINT_DIR is what import_checkpoint or pretrain_gpt.py --save wrote, in any tensor and pipeline parallel layout,
with or without an optimizer's state. The weights keep the checkpoint's precision unless --dtype says otherwise, and are
read and written one tensor at a time. What Llama (or, with biases on queries, keys and values, Qwen2) can not express
is refused by name. HF_DIR is there completely or not at all, and takes the place of nothing but an earlier export.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

from script.data.cache import staged_directory
from script.data.command_line import InputError, Parser, existing_path, run
from script.model.architecture import DTYPES
from script.model.hf_checkpoint import CONFIG_FILE, INDEX_FILE, SAFETENSORS_SUFFIX, TOKENIZER_FILES
from script.model.hf_export import write_hugging_face
from script.model.megatron_checkpoint import LATEST_ITERATION, MegatronCheckpoint
from script.model.replacing import Product

logger = logging.getLogger(__name__)

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
DEFAULT_SHARD = "5GB"
HUGGING_FACE_MODEL = Product(
    kind="Hugging Face model",
    marker=CONFIG_FILE,
    contents=(CONFIG_FILE, f"*{SAFETENSORS_SUFFIX}", INDEX_FILE, *TOKENIZER_FILES),
)


def export_checkpoint(
    checkpoint_dir: Path,
    output: Path,
    *,
    iteration: str = LATEST_ITERATION,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: Path | None = None,
) -> None:
    """Write the Hugging Face directory of a Megatron checkpoint, replacing the model that is at `output`.

    Args:
        checkpoint_dir: the checkpoint's directory.
        output: the directory to write.
        iteration: "latest", "release" or a number of iterations.
        dtype: what the weights are rounded to, a key of DTYPES; None: the checkpoint's own.
        max_shard_bytes: of tensors in one file.
        tokenizer: a tokenizer's file or directory; None: the files beside the checkpoint, if there are any.

    Raises:
        InputError: the checkpoint can not be read or is no Llama-type model, or `output` holds something else than
            such a directory, or the checkpoint; nothing has changed then.
    """
    complaint = HUGGING_FACE_MODEL.overlap(checkpoint_dir, output)
    if complaint := complaint or HUGGING_FACE_MODEL.occupied(output, overwrite=True):
        raise InputError(complaint)
    checkpoint = MegatronCheckpoint(checkpoint_dir, iteration)
    dtype = dtype or _dtype_of(checkpoint)
    with staged_directory(output) as directory:
        eos = _copy_tokenizer(tokenizer or checkpoint_dir, directory)
        write_hugging_face(checkpoint, directory, dtype=dtype, max_shard_bytes=max_shard_bytes, eos=eos)


def _dtype_of(checkpoint: MegatronCheckpoint) -> str:
    import torch

    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    if checkpoint.dtype not in names:
        raise InputError(f"{checkpoint.path} holds weights in {checkpoint.dtype}; give --dtype {' or '.join(DTYPES)}")
    return names[checkpoint.dtype]


def _copy_tokenizer(source: Path, directory: Path) -> int | None:
    """Copy a tokenizer's files; return the id of its end of a document, if it has one."""
    files = [source] if source.is_file() else [source / name for name in TOKENIZER_FILES]
    files = [file for file in files if file.is_file()]
    for file in files:
        shutil.copyfile(file, directory / file.name)
    if not files:
        logger.warning("no tokenizer is written: there is none in %s; --tokenizer names one", source)
        return None
    from script.data.encoders import load_encoder

    try:
        return load_encoder(str(files[0])).eod
    except InputError as error:
        logger.warning("config.json names no end of sequence: %s", error)
        return None


def size_in_bytes(text: str) -> int:
    """Argument type: a size such as 500MB, 0.5GB or 2GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    unit = UNITS.get(match[2].upper(), 0) if match else 0
    size = int(Decimal(match[1]) * unit) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB, 0.5GB or 2GiB ({', '.join(UNITS)})")
    return size


def build_parser() -> Parser:
    """Return the command line."""
    parser = Parser(
        prog="python -m script.model.export_checkpoint",
        description="Turn a Megatron checkpoint of a Llama-type model into a Hugging Face directory.",
    )
    parser.add_argument(
        "checkpoint", type=existing_path, metavar="CHECKPOINT_DIR", help="of import_checkpoint or pretrain_gpt.py"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="HF_DIR", help="the directory to write")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights written (default: the checkpoint's)")
    parser.add_argument(
        "--iteration", default=LATEST_ITERATION, metavar="N", help="a number, release or latest (default latest)"
    )
    parser.add_argument(
        "--max-shard-size", type=size_in_bytes, default=DEFAULT_SHARD, metavar="SIZE", help="of a file (default 5GB)"
    )
    parser.add_argument(
        "--tokenizer", type=existing_path, metavar="PATH", help="to put beside (default: what is in CHECKPOINT_DIR)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the model that is in HF_DIR")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Export the checkpoint that the command line names."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    complaint = HUGGING_FACE_MODEL.overlap(options.checkpoint, options.output)
    if complaint := complaint or HUGGING_FACE_MODEL.occupied(options.output, overwrite=options.overwrite):
        parser.error(complaint)

    def program() -> None:
        export_checkpoint(
            options.checkpoint,
            options.output,
            iteration=options.iteration,
            dtype=options.dtype,
            max_shard_bytes=options.max_shard_size,
            tokenizer=options.tokenizer,
        )
        logger.info("%s is ready", options.output)

    return run(program, parser.prog)


if __name__ == "__main__":
    sys.exit(main())
