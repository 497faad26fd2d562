"""Which rows of a capture are looked at: the filters that every sub-command has, as a table.

    --type mxfp8 --layer 0-3,10 --tensor dy,fc2.* --rank 0

keeps the rows that match every filter that is given, and any value of each. A row that does not know what is asked for
(a file of another tool has no iteration) does not match. The parsers of the command line are made from the same table,
so all of them spell a filter alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.quantscope.analysis.roles import module_label, role_of
from megatron.quantscope.capture.ranges import any_in_ranges, parse_ranges

if TYPE_CHECKING:
    from megatron.quantscope.capture import Capture
    from megatron.quantscope.capture.record import TensorRecord

Values = tuple[Hashable, ...]
Value = TypeVar("Value")
Matches = Callable[[Any, Iterable[Any]], bool]


def _numbers(text: str) -> Values:
    try:
        return parse_ranges(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{str(error)!r} is not allowed: give numbers such as 0-3,10") from None


def _patterns(text: str) -> Values:
    if not all(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give names or patterns such as fc2.*,dy")
    return tuple(text.split(","))


def _any_matches(patterns: Values, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, str(pattern)) for name in names for pattern in patterns)


@dataclass(frozen=True, kw_only=True)
class Filter:
    """One filter.

    Attributes:
        name: Of the option, without dashes.
        of: What of a record it looks at: all that it may match, () where nothing is known.
        parse: Text -> values.
        matches: Whether these values hold one of those.
        metavar, help: For the command line.
    """

    name: str
    of: Callable[[TensorRecord], Iterable[Any]]
    parse: Callable[[str], Values]
    matches: Matches
    metavar: str
    help: str

    @property
    def option(self) -> str:
        """As the command line spells it."""
        return f"--{self.name}"


def _known(value: Any) -> tuple[Any, ...]:
    return () if value is None else (value,)


def _module_names(record: TensorRecord) -> tuple[str, ...]:
    label = module_label(record.module, record.layer_type)
    return (label, record.module, record.module.rpartition(".")[2]) if record.module else (label,)


def _tensor_names(record: TensorRecord) -> tuple[str, ...]:
    symbol = role_of(record.layer_type, record.tensor_name).symbol
    return record.tensor_name, symbol, f"{module_label(record.module, record.layer_type)}.{symbol}"


def _number_filter(name: str, of: Callable[[TensorRecord], Iterable[int]], help: str) -> Filter:
    return Filter(name=name, of=of, parse=_numbers, matches=any_in_ranges, metavar="N[-M],...", help=help)


def _name_filter(name: str, of: Callable[[TensorRecord], Iterable[str]], help: str) -> Filter:
    return Filter(name=name, of=of, parse=_patterns, matches=_any_matches, metavar="NAME,...", help=help)


FILTERS = (
    _name_filter("type", lambda record: (record.quant_type,), "quant types of the runs: bf16,mxfp*"),
    _number_filter("layer", lambda record: _known(record.layer_idx), "global layers from 0: 0-3,10"),
    _name_filter("module", _module_names, "modules: linear_fc2, fc2, or a pattern of the whole name"),
    _name_filter("tensor", _tensor_names, "tensors by name, symbol or site: grad_output, dy, fc2.x, *.w"),
    _name_filter("operation", lambda record: (record.operation,), "forward or backward"),
    _number_filter("rank", lambda record: _known(record.rank), "global ranks"),
    _number_filter("iteration", lambda record: _known(record.iteration), "iterations, as captured"),
    _number_filter("micro-batch", lambda record: _known(record.micro_batch), "micro-batches of an iteration"),
    _number_filter(
        "sample",
        lambda record: record.sample_indices or _known(record.sample_idx),
        "global sample indices; a micro-batch that holds one is kept whole",
    ),
)


@dataclass(frozen=True)
class Selection:
    """The filters that were given.

    Attributes:
        values: Name of a filter -> what it lets through.
    """

    values: Mapping[str, Values] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether any filter was given."""
        return bool(self.values)

    def __str__(self) -> str:
        """As one would write it on the command line; "everything" without filters."""
        words = (f"--{name} {','.join(map(_word, values))}" for name, values in self.values.items())
        return " ".join(words) or "everything"

    def keeps(self, record: TensorRecord) -> bool:
        """Whether a record matches every filter."""
        given = (each for each in FILTERS if each.name in self.values)
        return all(each.matches(self.values[each.name], each.of(record)) for each in given)

    def of(self, capture: Capture) -> Capture:
        """The capture with the records that match, and the losses and run records of their types."""
        if not self:
            return capture
        records = [record for record in capture.records if self.keeps(record)]
        types = {record.quant_type for record in records}
        return replace(
            capture,
            records=records,
            commits=_only(capture.commits, types),
            run_info=_only(capture.run_info, types),
            runs=_only(capture.runs, types),
        )


def _only(by_type: Mapping[str, Value], types: set[str]) -> dict[str, Value]:
    return {name: value for name, value in by_type.items() if name in types}


def _word(value: Hashable) -> str:
    if isinstance(value, tuple):
        first, last = value
        return str(first) if first == last else f"{first}-{last}"
    return str(value)


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of `FILTERS`."""
    group = parser.add_argument_group("filters", "rows that match all of them; values may be joined by commas")
    for each in FILTERS:
        group.add_argument(
            each.option, dest=_destination(each), type=each.parse, metavar=each.metavar, help=each.help, default=None
        )


def selection_of(options: argparse.Namespace) -> Selection:
    """The filters that a parser found."""
    found = {each.name: getattr(options, _destination(each)) for each in FILTERS}
    return Selection({name: values for name, values in found.items() if values is not None})


def _destination(each: Filter) -> str:
    return "filter_" + each.name.replace("-", "_")
