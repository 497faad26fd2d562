"""Forward loss of a checkpoint on a piece of text, with or without quantised GEMMs.

    python -m script.model.evaluate_loss --quant-type mxfp4

prints the mean cross-entropy per token of one window of text: `--tokens` tokens from character `--skip` of a document,
each predicted from those before it in the window. Without --checkpoint and --text it is SmolLM2-135M on the Wikipedia
article "Anarchism" (fetched once), where 512 tokens from character 20000 give in bfloat16

    none 3.10    hifp8 3.12    mxfp8 3.14    mxfp4 5.26

so a wrong import (a wrong rotary layout: 5.59) or a wrong quantiser shows at once. The order of summation inside a GEMM
moves a bfloat16 loss by about 0.015: the third digit after the point means nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.flags import QUANTIZATION_FLAGS, add_flags
from script.data.command_line import (
    InputError,
    Parser,
    existing_file,
    existing_path,
    non_negative_int,
    positive_int,
    run,
)
from script.model.architecture import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.quantscope.gemm import QuantConfig

DEFAULT_TOKENS = 512
DEFAULT_SKIP = 20_000


def window(text: Path, title: str | None, tokenizer: Path, *, skip: int, tokens: int) -> list[int]:
    """Token ids of a piece of text, one more than `tokens`: each but the last is input, each but the first a label.

    Args:
        text: a file that script/data/articles.py reads.
        title: the document's title; None: the first document.
        tokenizer: what script/data/encoders.py reads.
        skip: characters of the document before the piece.
        tokens: length of the piece.

    Raises:
        InputError: there is no such document, or not enough of it.
    """
    from script.data.articles import read_articles
    from script.data.encoders import load_encoder

    article = next((a for a in read_articles(text) if title in (None, a.title)), None)
    if article is None:
        raise InputError(f"{text}: there is no document{'' if title is None else f' with the title {title!r}'} in it")
    ids = load_encoder(str(tokenizer)).encode_batch([article.text[skip:]])[0]
    if len(ids) <= tokens:
        raise InputError(
            f"{text}: {len(ids)} tokens follow character {skip}, {tokens + 1} are needed; lower --tokens or --skip"
        )
    return ids[: tokens + 1]


def forward_loss(
    checkpoint: Path, ids: Sequence[int], *, dtype: str = "bf16", recipe: QuantConfig | None = None
) -> float:
    """Mean cross-entropy of predicting each token of `ids` but the first.

    Args:
        checkpoint: a Megatron checkpoint directory with its model.json.
        ids: token ids.
        dtype: compute dtype, a key of DTYPES.
        recipe: which GEMMs are quantised, and how; None: upstream's own forward.

    Raises:
        InputError: the checkpoint can not be used, or the text is longer than the model takes.
    """
    from script.model.single_process import model_parallel

    with model_parallel():
        import torch

        model = load_model(checkpoint, dtype, recipe).eval()
        if max(ids) >= model.vocab_size or len(ids) - 1 > model.max_sequence_length:
            raise InputError(
                f"{checkpoint} takes {model.max_sequence_length} tokens below {model.vocab_size}, the text has "
                f"{len(ids) - 1} up to {max(ids)}"
            )
        row = torch.tensor([ids], device=next(model.parameters()).device)
        positions = torch.arange(len(ids) - 1, device=row.device)[None]
        with torch.no_grad():
            losses: Tensor = model(row[:, :-1], positions, None, labels=row[:, 1:])
        return losses.float().mean().item()


def load_model(checkpoint: Path, dtype: str, recipe: QuantConfig | None = None) -> Any:
    """Build a checkpoint's GPTModel, bare, with its weights; inside script/model/single_process.py's `model_parallel`.

    Raises:
        InputError: there is no checkpoint in the directory, or the recipe file does not fit the model.
    """
    from megatron.core.instrumentation import instrument
    from megatron.core.resolution import resolve
    from megatron.training.arguments import arguments_with
    from megatron.training.checkpoint import checkpoint_directory
    from megatron.training.checkpoint.architecture import read_architecture
    from megatron.training.checkpoint.checkpointing import Progress, TrainingState, load_checkpoint
    from megatron.training.model import build_model

    architecture = read_architecture(checkpoint)
    if architecture is None or checkpoint_directory.latest(checkpoint) is None:
        raise InputError(f"{checkpoint} is no checkpoint of import_checkpoint or pretrain_gpt.py")
    args = arguments_with(**architecture, **DTYPES[dtype], load=str(checkpoint), finetune=True)
    args.weights_are_loaded = True  # not worth initialising
    model = build_model(args, pre_process=True, post_process=True)
    with redirect_stdout(sys.stderr):  # standard output is for the result
        load_checkpoint(args, TrainingState([model], None, None, Progress()))
    if recipe is not None:
        try:
            resolve(recipe, [model], args.num_layers)
        except ValueError as error:
            raise InputError(str(error)) from error
        instrument([model], recipe=recipe, session=None, num_layers=args.num_layers)
    return model


def build_parser() -> Parser:
    """Return the command line."""
    parser = Parser(
        prog="python -m script.model.evaluate_loss",
        description="Print the forward loss of a checkpoint on a piece of text, with or without quantised GEMMs.",
    )
    parser.add_argument("--checkpoint", type=existing_path, metavar="DIR", help="Megatron checkpoint (default SmolLM2)")
    parser.add_argument("--text", type=existing_file, metavar="FILE", help=".jsonl, dump or text (default Wikipedia)")
    parser.add_argument("--title", help="title of the document (default: the first one)")
    parser.add_argument("--tokenizer", type=existing_path, help="default: the checkpoint's own tokenizer.json")
    parser.add_argument("--tokens", type=positive_int, default=DEFAULT_TOKENS, metavar="N", help="length (default 512)")
    parser.add_argument(
        "--skip", type=non_negative_int, default=DEFAULT_SKIP, metavar="N", help="characters before (default 20000)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="compute dtype (default bf16)")
    add_flags(parser, (QUANTIZATION_FLAGS,))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the loss that the command line asks for."""
    parser = build_parser()
    options = parser.parse_args(arguments)

    def program() -> None:
        from megatron.quantscope.gemm import QuantConfig
        from script.data.default import ensure_default_assets

        try:
            recipe = QuantConfig.from_namespace(options)
        except ValueError as error:
            raise InputError(str(error)) from error
        if None in (options.checkpoint, options.text):
            assets = ensure_default_assets()
            options.checkpoint = options.checkpoint or assets.checkpoint
            options.text = options.text or assets.text
        tokenizer = options.tokenizer or options.checkpoint / "tokenizer.json"
        ids = window(options.text, options.title, tokenizer, skip=options.skip, tokens=options.tokens)
        print(f"{forward_loss(options.checkpoint, ids, dtype=options.dtype, recipe=recipe):.4f}")

    return run(program, parser.prog)


if __name__ == "__main__":
    sys.exit(main())
