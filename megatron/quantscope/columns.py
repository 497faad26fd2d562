"""Tables as plain text: every column as wide as its widest cell."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

_GAP = "  "


def aligned(rows: Iterable[Sequence[str]], *, right: Container[int] = ()) -> str:
    """Rows as lines, one text without a newline at its end.

    Args:
        rows: Cells, as many in each row.
        right: Numbers of the columns that are flush right, from 0.

    Raises:
        ValueError: A row has another number of cells than the first.
    """
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    aligns = [str.rjust if column in right else str.ljust for column in range(len(widths))]
    return "\n".join(
        _GAP.join(align(cell, width) for align, cell, width in zip(aligns, row, widths, strict=True)).rstrip()
        for row in table
    )
