"""Blocks and pairs of one operand, against plain loops over its blocks."""

import numpy as np
import torch

from megatron.quantscope.analysis.quantised_view import (
    BINS_PER_BINADE,
    EXACT_DB,
    MAP_BLOCKS,
    MAP_ROWS,
    quantised_view,
)
from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.formats import fake_quantize

X = role_of("linear", "input")


def gaussian(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_every_block_has_its_own_sqnr():
    x = gaussian(6, 1, 96)
    x[2, 0, 40] = 200.0  # its block keeps little else
    x[4, 0, :32] = 0.0
    x[5, 0, 64:] = 1.0
    view = quantised_view(x, X, "mxfp4")
    assert (view.format, view.gemm, view.rows, view.blocks) == ("mxfp4", "fprop", 6, 3)
    q = fake_quantize(x, "mxfp4", backend="torch")
    for row in range(6):
        for block in range(3):
            part = slice(32 * block, 32 * (block + 1))
            original, quantised = x[row, 0, part].double(), q[row, 0, part].double()
            signal, error = float((original**2).sum()), float(((original - quantised) ** 2).sum())
            found = view.sqnr_db[row, block]
            if signal == 0:
                assert np.isnan(found)
            else:
                expected = EXACT_DB if error == 0 else 10 * np.log10(signal / error)
                np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert view.sqnr_db[5, 2] == EXACT_DB


def test_blocks_run_along_the_axis_of_the_gemm():
    value = role_of("attention", "value")  # [keys, b, groups, d], blocks along keys
    view = quantised_view(gaussian(64, 1, 2, 8), value, "mxfp8")
    assert (view.gemm, view.rows, view.blocks) == ("context", 16, 2)


def test_tiles_show_the_worst_block():
    x = gaussian(4 * MAP_ROWS, 1, 32)
    x[17, 0, 3] = 1e4
    view = quantised_view(x, X, "mxfp8")
    assert view.sqnr_db.shape == (MAP_ROWS, 1)
    alone = quantised_view(x[16:20], X, "mxfp8")
    assert view.sqnr_db[4, 0] == alone.sqnr_db.min()
    assert quantised_view(gaussian(2, 1, 32 * 200), X, "mxfp8").sqnr_db.shape == (2, MAP_BLOCKS)


def test_pairs_count_every_element_once():
    x = gaussian(16, 1, 64)
    x[0, 0, :5] = 0.0
    view = quantised_view(x, X, "mxfp4")
    q = fake_quantize(x, "mxfp4", backend="torch")
    assert view.pairs.sum() == (x != 0).sum()
    assert view.pairs[0].sum() == ((q == 0) & (x != 0)).sum()
    column = int(np.floor(BINS_PER_BINADE * (np.log2(float(x.abs().max())) - view.first)))
    assert view.pairs[:, column].sum() > 0
    assert view.pairs[:, column + 1 :].sum() == 0


def test_pairs_of_a_large_operand_see_every_channel_alike():
    x = torch.ones(1 << 12, 1, 1 << 11)
    x[:, :, 1::2] = 0.5
    view = quantised_view(x, X, "mxfp8")
    columns = view.pairs.sum(axis=0)
    assert sorted(columns[columns > 0] / columns.sum()) == [0.5, 0.5]


def test_operands_of_any_real_dtype():
    x = gaussian(4, 1, 64)
    narrow = x.to(torch.float8_e4m3fn)
    found, same = quantised_view(narrow, X, "mxfp4"), quantised_view(narrow.float(), X, "mxfp4")
    np.testing.assert_array_equal(found.pairs, same.pairs)
    np.testing.assert_array_equal(found.sqnr_db, same.sqnr_db)
    assert quantised_view(torch.arange(64).reshape(2, 1, 32), X, "mxfp8").rows == 2


def test_nothing_to_show():
    assert quantised_view(torch.zeros(4, 1, 32), X, "mxfp8") is None
    assert quantised_view(torch.full((4, 1, 32), float("nan")), X, "mxfp8") is None
    assert quantised_view(torch.zeros(0, 1, 32), X, "mxfp8") is None


def test_non_finite_values_do_not_spread():
    x = gaussian(4, 1, 64)
    x[1, 0, 2] = float("inf")
    view = quantised_view(x, X, "mxfp8")
    assert np.isfinite(np.delete(view.sqnr_db, 1, axis=0)).all()
    assert view.pairs.sum() < 4 * 64
