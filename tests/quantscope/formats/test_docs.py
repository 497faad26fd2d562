"""docs/formats.md against the code: its tables, its examples, and the numbers that it says are measured."""

import doctest
import inspect
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron.quantscope.formats import ALIASES, FORMATS, fake_quantize
from tests.quantscope.formats.test_oracles import PINNED

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "formats.md").read_text(encoding="utf-8")
SCALES = {"-": None, "E8M0": "e8m0", "E4M3 + float32": "e4m3+fp32", "float32": "fp32"}
ROUNDINGS = {"even": "half_even", "away": "half_away"}
OVERFLOWS = {"saturates": "saturate", "Inf": "infinity", "NaN": "nan"}
ANSWERS = {"yes": True, "no": False}


def table(first_header: str, last_header: str) -> list[dict[str, str]]:
    """The rows of the table whose header begins and ends with these."""
    lines = iter(PAGE.splitlines())
    for line in lines:
        headers = cells(line)
        if line.startswith("|") and (headers[0], headers[-1]) == (first_header, last_header):
            break
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(headers, cells(line), strict=True)))
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("`", "").strip().strip("|").split("|")]


def number(text: str) -> float:
    """7.5, 2^-14 or 255 * 2^120."""
    product = 1.0
    for factor in text.split(" * "):
        base, _, exponent = factor.partition("^")
        product *= float(base) ** int(exponent or 1)
    return product


def test_table_of_formats_is_the_catalog():
    rows = table("format", "source")
    assert [row["format"] for row in rows] == list(FORMATS)
    for row in rows:
        fmt = FORMATS[row["format"]]
        assert (int(row["bits"]), int(row["exponent"]), int(row["mantissa"])) == (
            fmt.bits,
            fmt.exponent_bits,
            fmt.mantissa_bits,
        )
        limits = [number(row[key]) for key in ("max", "min normal", "min subnormal")]
        assert limits == [fmt.max, fmt.min_normal, fmt.min_subnormal]
        assert (None if row["block"] == "-" else int(row["block"])) == fmt.block
        assert (SCALES[row["scale"]], row["source"]) == (fmt.scale, fmt.source)
        assert (ROUNDINGS[row["rounding"]], OVERFLOWS[row["overflow"]]) == (fmt.rounding, fmt.overflow)
        assert [ANSWERS[row[key]] for key in ("Inf", "NaN", "-0")] == [
            fmt.has_inf,
            fmt.has_nan,
            fmt.has_negative_zero,
        ]
    assert all(f"`{alias}` is another name of `{name}`" in PAGE for alias, name in ALIASES.items())


def test_table_of_bands_is_the_record_of_hif8():
    rows = table("magnitude of e", "mantissa bits")
    found = [(int(row["magnitude of e"].removeprefix("up to ")), int(row["mantissa bits"])) for row in rows]
    assert found == [(band.limit, band.mantissa_bits) for band in FORMATS["hifp8"].bands]


def test_arguments_are_those_of_fake_quantize():
    assert [row["argument"] for row in table("argument", "meaning")] == list(
        inspect.signature(fake_quantize).parameters
    )


def test_versions_are_those_that_are_pinned():
    constraints = (REPOSITORY / "requirements" / "constraints.txt").read_text(encoding="utf-8")
    for package, version in PINNED.items():
        assert re.search(rf"^{package.replace('_', '-')}=={re.escape(version)}$", constraints, re.MULTILINE)
        assert f"{package} {version}" in PAGE


def test_examples_print_what_they_say():
    source = "\n".join(re.findall(r"^```pycon\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(source, {}, "docs/formats.md", "docs/formats.md", 0)
    assert len(test.examples) >= 8
    assert doctest.DocTestRunner().run(test).failed == 0


@cache
def gaussian() -> torch.Tensor:
    """The tensor that the page's numbers are measured on: bf16 values, [8192, 32] float32."""
    return torch.randn(8192, 32, generator=torch.Generator().manual_seed(0)).bfloat16().float()


def share(text: str) -> float:
    return float(text.removesuffix("%")) / 100


@pytest.mark.parametrize("row", table("format", "the same in float32"), ids=lambda row: row["format"])
def test_share_of_ties(row):
    """With the other rule by the reference, on the first quarter of the tensor (it takes a block at a time)."""
    fmt = FORMATS[row["format"]]
    other = replace(fmt, rounding="half_away" if fmt.rounding == "half_even" else "half_even")
    bf16 = gaussian()[:2048]
    float32 = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    differing = [
        (fake_quantize(x, fmt) != fake_quantize(x, other, backend="reference")).double().mean().item()
        for x in (bf16, float32)
    ]
    assert differing[0] == pytest.approx(share(row["bf16: elements that RNE and half-away round differently"]), rel=0.1)
    assert differing[1] == share(row["the same in float32"]) == 0.0


@pytest.mark.parametrize("row", table("format", "SQNR rceil"), ids=lambda row: row["format"])
def test_floor_and_rceil_in_numbers(row):
    x, fmt = gaussian(), FORMATS[row["format"]]
    floor, rceil = (fake_quantize(x, fmt, scale_rule=rule) for rule in ("floor", "rceil"))
    scaled = x.abs().double() / torch.exp2(torch.floor(torch.log2(x.abs().amax(1, keepdim=True).double())) - fmt.emax)
    beyond = scaled > fmt.max
    found = beyond.any(1).double().mean().item(), beyond.double().mean().item()
    assert found == pytest.approx(
        (share(row["blocks with another scale"]), share(row["elements that floor saturates"])), rel=0.02
    )
    for rule, y in (("SQNR floor", floor), ("SQNR rceil", rceil)):
        ratio = x.double().square().sum() / (x.double() - y.double()).square().sum()
        assert 10 * torch.log10(ratio).item() == pytest.approx(float(row[rule].removesuffix(" dB")), abs=0.01)


@pytest.mark.parametrize("name", ["mxfp8", "hifp8"])
def test_half_away_makes_magnitudes_larger_by_0_3_percent(name):
    x = gaussian()[:2048]
    even, away = (
        fake_quantize(x, replace(FORMATS[name], rounding=rounding), backend="reference").abs().double().mean()
        for rounding in ("half_even", "half_away")
    )
    assert (away / even - 1).item() == pytest.approx(0.003, rel=0.1)


@pytest.mark.parametrize("fmt", ["mxfp8", "bf16"])
def test_fp16_may_round_up_to_inf(fmt):
    x = torch.tensor([65504.0], dtype=torch.float16)
    assert fake_quantize(x, fmt, scale_rule="rceil").isinf().all()
    assert fake_quantize(x, fmt, scale_rule="floor").isinf().all() == (fmt == "bf16")
