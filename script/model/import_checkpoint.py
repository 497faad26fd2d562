"""Turn a pretrained Llama-type model into a Megatron checkpoint that pretrain_gpt.py loads.

    python -m script.model.import_checkpoint MODEL.gguf --output DIR
    python -m script.model.import_checkpoint HUGGING_FACE_DIRECTORY --output DIR

(of which also the one .safetensors file may be named).

What DIR holds then:

    release/                             the weights, by megatron-core's dist_checkpointing
    latest_checkpointed_iteration.txt    "release"
    model.json                           the architecture flags; --use-checkpoint-args reads them
    tokenizer.json, ...                  the model's tokenizer, where the source has one

The weights are read, laid out anew and rounded to --dtype one tensor at a time, so that no second copy of the model is
held. DIR is there completely or not at all, and takes the place of nothing but an earlier import.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.training.checkpoint.architecture import FILE_NAME as ARCHITECTURE_FILE
from megatron.training.checkpoint.checkpoint_directory import LATEST, RELEASE
from script.data.cache import staged_directory
from script.data.command_line import InputError, Parser, existing_path, run
from script.data.encoders import CONFIG_FILE, TOKENIZER_FILE, end_of_document
from script.model.architecture import DTYPES
from script.model.gguf_checkpoint import GgufCheckpoint
from script.model.hf_checkpoint import PICKLED, SAFETENSORS_SUFFIX, TOKENIZER_FILES, HuggingFaceCheckpoint
from script.model.llama_weights import load_into
from script.model.replacing import Product

if TYPE_CHECKING:
    from script.model.llama_weights import LlamaCheckpoint

logger = logging.getLogger(__name__)

GGUF_SUFFIX = ".gguf"
IMPORTED = Product(
    kind="checkpoint of an imported model",
    marker=LATEST,
    contents=(
        LATEST, ARCHITECTURE_FILE, *TOKENIZER_FILES, RELEASE,
        *(f"{RELEASE}/{name}" for name in (".metadata", "*.distcp", "common.pt", "metadata.json")),
    ),
)  # fmt: skip


def open_checkpoint(source: Path) -> LlamaCheckpoint:
    """Open a GGUF file or a Hugging Face directory.

    Raises:
        InputError: it is neither, or not of Llama's type.
    """
    if source.is_dir() or source.suffix == SAFETENSORS_SUFFIX:
        return HuggingFaceCheckpoint(source)
    if source.suffix == GGUF_SUFFIX:
        return GgufCheckpoint(source)
    if source.suffix in PICKLED:
        raise InputError("pickled weights are never read here: opening one runs what is in it; save it as safetensors")
    raise InputError("neither a .gguf file nor a directory with config.json and *.safetensors")


def import_checkpoint(source: Path, output: Path, *, dtype: str = "bf16") -> None:
    """Write the Megatron checkpoint of a pretrained model, replacing the import that is at `output`.

    Args:
        source: a GGUF file or a Hugging Face directory.
        output: the checkpoint's directory.
        dtype: what the weights are rounded to, a key of DTYPES.

    Raises:
        InputError: the source can not be used, or `output` holds something else than an import, or the source; nothing
            has changed then.
    """
    if complaint := IMPORTED.overlap(source, output) or IMPORTED.occupied(output, overwrite=True):
        raise InputError(complaint)
    with _naming(source), staged_directory(output) as directory:
        checkpoint = open_checkpoint(source)
        _write_weights(checkpoint, directory, dtype)
        _write_tokenizer(checkpoint, source, directory)


@contextmanager
def _naming(source: Path) -> Iterator[None]:
    """Name the source in front of complaints that don't."""
    try:
        yield
    except InputError as error:
        raise error if str(source) in str(error) else InputError(f"{source}: {error}") from error


def _write_weights(checkpoint: LlamaCheckpoint, directory: Path, dtype: str) -> None:
    from script.model.single_process import model_parallel

    with model_parallel():
        from megatron.training.arguments import arguments_with
        from megatron.training.checkpoint.checkpointing import save_model_only
        from megatron.training.model import build_model

        args = arguments_with(**checkpoint.architecture.flags(), **DTYPES[dtype])
        args.weights_are_loaded = True  # not worth initialising
        model = build_model(args, pre_process=True, post_process=True)
        load_into(model, checkpoint)
        save_model_only(model, directory, args)


def _write_tokenizer(checkpoint: LlamaCheckpoint, source: Path, directory: Path) -> None:
    """Write the tokenizer that the source has; a checkpoint without one is of use too."""
    if not isinstance(checkpoint, GgufCheckpoint):
        home = source if source.is_dir() else source.parent
        for name in TOKENIZER_FILES:
            if (home / name).is_file():
                shutil.copyfile(home / name, directory / name)
        return
    from script.model.gguf_tokenizer import build_tokenizer

    try:
        tokenizer, eos = build_tokenizer(checkpoint)
        ends = {"eos_token": tokenizer.id_to_token(end_of_document(tokenizer, eos))}
    except InputError as error:
        logger.warning("no tokenizer is written: %s", error)
        return
    tokenizer.save(str(directory / TOKENIZER_FILE), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **ends}
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def build_parser() -> Parser:
    """Return the command line."""
    parser = Parser(
        prog="python -m script.model.import_checkpoint",
        description="Turn a Llama-type model (GGUF file or Hugging Face directory) into a Megatron checkpoint.",
    )
    parser.add_argument("source", type=existing_path, metavar="SOURCE", help="a .gguf file or a directory")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="the checkpoint's directory")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights written (default bf16)")
    parser.add_argument("--overwrite", action="store_true", help="replace the import that is in DIR")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Import the model that the command line names."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    complaint = IMPORTED.overlap(options.source, options.output)
    if complaint := complaint or IMPORTED.occupied(options.output, overwrite=options.overwrite):
        parser.error(complaint)

    def program() -> None:
        import_checkpoint(options.source, options.output, dtype=options.dtype)
        logger.info("%s is ready: --load %s --use-checkpoint-args", options.output, options.output)

    return run(program, parser.prog)


if __name__ == "__main__":
    sys.exit(main())
