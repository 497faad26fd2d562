"""The comparison of a capture's runs, kept in OUT so that it is made once: comparison.parquet.

Comparing reads every tensor of every run again. So the table carries, in the metadata of its schema, a digest of all
that it follows from: the keys (`identity`) of both sides of every pair, and what their rows show. Where the digest is
that of the pairs of a later call, the table is read back instead of the tensors. It is not given where a file can not
be found, or a pair could not be compared: those are tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.comparison import COLUMNS, Pair, Pairing
from megatron.quantscope.analysis.identity import key_of
from megatron.quantscope.analysis.replaced_files import replaced
from megatron.quantscope.capture.record import TensorRecord

if TYPE_CHECKING:
    import pandas

logger = logging.getLogger(__name__)

COMPARISON_TABLE = "comparison.parquet"
_VERSION = 1  # to be raised whenever the figures of a row change: tables of another version are made again
_DIGEST = b"quantscope.compared"  # in the metadata of the schema
_DIGEST_BYTES = 16
_SHOWN = (
    "iteration", "micro_batch", "sample_idx", "layer_type", "layer_idx", "module", "operation", "phase", "tensor_name",
    "grad_scale", "shard", "parallel",
)  # fmt: skip


def digest_of(pairing: Pairing) -> str | None:
    """Equal for pairs whose comparison is equal; None when a file of theirs can not be found."""
    digest = hashlib.blake2b(json.dumps([_VERSION, list(COLUMNS)]).encode(), digest_size=_DIGEST_BYTES)
    for pair in pairing.pairs:
        sides = _sides(pair)
        if any(key is None for key, *_ in sides):
            return None
        line = [pair.run, pair.baseline, pair.order, pair.rank, pair.tensor.assembled, pair.reference.assembled, sides]
        digest.update(json.dumps(line, default=str).encode())
    return digest.hexdigest()


def kept_comparison(target: Path, digest: str | None) -> pandas.DataFrame | None:
    """The comparison in the directory `target`, as it was made; None where there is none with this digest."""
    import pyarrow.parquet

    path = target / COMPARISON_TABLE
    if digest is None or not path.is_file():
        return None
    try:
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
        if metadata.get(_DIGEST) != digest.encode():
            return None
        return pyarrow.parquet.read_table(path).to_pandas()
    except (OSError, pyarrow.ArrowException) as error:
        logger.warning("%s: %s, made again", path, str(error).partition("\n")[0])
        return None


def keep_comparison(target: Path, table: pandas.DataFrame, digest: str | None) -> None:
    """Write the comparison; the file is complete or absent.

    Args:
        target: The directory.
        table: What `compare_pairs` gave.
        digest: Of its pairs; None: it is not to be read back.
    """
    import pyarrow.parquet

    types = [(name, pyarrow.type_for_alias(kind)) for name, kind in COLUMNS.items()]
    schema = pyarrow.schema(types, metadata=None if digest is None else {_DIGEST: digest.encode()})
    rows = pyarrow.Table.from_pandas(table, schema=schema, preserve_index=False)
    with replaced(target / COMPARISON_TABLE) as temporary:
        pyarrow.parquet.write_table(rows.replace_schema_metadata(schema.metadata), temporary)


def _sides(pair: Pair) -> list[list[object]]:
    return [_identity(record) for side in (pair.tensor, pair.reference) for record in side.records]


def _identity(record: TensorRecord) -> list[object]:
    return [key_of(record), *(getattr(record, name) for name in _SHOWN)]
