"""Compare what two chains of processors make of the same rows, and the Spark job that does so.

The job of a preview runs a chain over segments, and compares its output with what is recorded,
batch by batch; the output is discarded: nothing is written. Workers import this module: it needs no
Spark.

The report names the fields that differ, not their values.

Events are matched by event id. Both sides are read in delivery order, a batch at a time, and a
matched pair is discarded at once; only events that one side alone has had so far stay in memory.

A matched event is `changed` if a column differs that processors can change, and `moved` if it now
comes after an event that it preceded. For row images and headers the differing fields inside them
are named, for other columns the column. JSON is compared as text: `1.10` is not `1.1`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.kernels.message_text import Mask
from deltaforge_dagster.kernels.runtime import Longs
from deltaforge_dagster.pipeline.process.stages import Counts
from deltaforge_dagster.processors.chain import ChainSpec
from deltaforge_dagster.processors.exact_json import dumps, loads

_OBJECTS = ("before", "after", "key", "headers")
_COMPARED = (
    "op", "ts_us", "db", "schema", "table", *_OBJECTS, "ddl", "topic", "route_key", "raw_payload",
    "tags", "synthetic",
)  # fmt: skip
_SHOWN = {
    "ts_us": "ts_ms", "db": "source.db", "schema": "source.schema", "table": "source.table",
    "headers": "route.headers", "topic": "route.topic", "route_key": "route.key",
    "raw_payload": "route.raw_payload",
}  # fmt: skip
"""Names of columns in an event, where they differ from the column's name."""
_READ = ("ordinal", "event_id", *_COMPARED)
_KINDS = {"ordinal": pa.int64(), "ts_us": pa.int64(), "raw_payload": pa.bool_()}
_SCHEMA = pa.schema([pa.field(name, _KINDS.get(name, pa.string())) for name in (*_READ, "name")])
_NOTHING = _SCHEMA.empty_table()
_BATCH_ROWS = 20_000


@dataclass(slots=True)
class ReplayDifference:
    """How today's output differs from the recorded one; accumulated over segments.

    Attributes:
        tables: By full table name, the number of events that are `same`, `changed`, `added` and
            `dropped`, and of matched events that are `moved`.
        fields: By table, the number of changed events in which a field differs, such as
            `after.email`.
        sample: Some events that differ, in order: `kind`, `table`, `op`, `event_id`, `fields`, and,
            if values were requested, the columns of both sides as `recorded` and `made`.
    """

    tables: dict[str, Counter[str]] = field(default_factory=dict)
    fields: dict[str, Counter[str]] = field(default_factory=dict)
    sample: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        tables: Mapping[str, Mapping[str, int]],
        fields: Mapping[str, Mapping[str, int]],
        sample: Iterable[dict[str, Any]],
    ) -> None:
        """Add the difference of further segments."""
        for total, more in ((self.tables, tables), (self.fields, fields)):
            for name, counts in more.items():
                total.setdefault(name, Counter()).update(counts)
        self.sample += sample

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, under the names of the arguments of `add`."""
        return {"tables": self.tables, "fields": self.fields, "sample": self.sample}

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return all(not (counts.keys() - {"same"}) for counts in self.tables.values())


def compared(
    recorded: Iterable[pa.RecordBatch],
    current: Iterable[pa.RecordBatch],
    *,
    sample: int,
    values: bool,
) -> ReplayDifference:
    """Return how today's output of a segment differs from the recorded one.

    Args:
        recorded: The recorded rows in order, as batches of the change frame.
        current: The rows that today's processors make, likewise.
        sample: Maximum number of events of each kind in the sample.
        values: Whether the sample contains values.
    """
    return _Comparison(sample, values=values).run(recorded, current)


@dataclass(frozen=True, slots=True)
class PreviewJob:
    """One Spark job over the segments of a range.

    Attributes:
        chain: The processors.
        key: Unique for each preview, so that it shares no processor state with runs.
        journal_url: Where the segments are.
        segments: For each segment its captured file, and the file that sinks get; the latter is
            empty if processors left no rows.
        sample: Maximum number of events of each kind that a segment adds to the sample.
        values: Whether the sample contains values.
    """

    chain: ChainSpec
    key: str
    journal_url: str
    segments: Sequence[tuple[str, str]]
    sample: int
    values: bool

    def rows(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a segment as they were captured."""
        captured, _ = self.segments[number]
        return _rows(Journal(self.journal_url), captured)

    def finish(
        self, number: int, output: Iterator[pa.RecordBatch], counts: Callable[[], Counts]
    ) -> dict[str, Any]:
        """Compare the chain's output of a segment with the recorded rows."""
        _, recorded = self.segments[number]
        journal = Journal(self.journal_url)
        difference = compared(
            _rows(journal, recorded), output, sample=self.sample, values=self.values
        )
        return {**difference.to_json(), "processors": counts()}


class _Comparison:
    """A comparison in progress."""

    def __init__(self, sample: int, *, values: bool) -> None:
        self._difference = ReplayDifference()
        self._sample = sample
        self._values = values
        self._sampled: Counter[str] = Counter()
        self._pairs: list[tuple[npt.NDArray[Any], Longs, Longs]] = []

    def run(
        self, recorded: Iterable[pa.RecordBatch], current: Iterable[pa.RecordBatch]
    ) -> ReplayDifference:
        old = new = _NOTHING
        for more_old, more_new in zip_longest(
            _tables(recorded), _tables(current), fillvalue=_NOTHING
        ):
            old, new = self._settle(
                pa.concat_tables([old, more_old]), pa.concat_tables([new, more_new])
            )
        self._one_sided("dropped", old)
        self._one_sided("added", new)
        self._count_moved()
        return self._difference

    def _settle(self, old: pa.Table, new: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Compare the events that are on both sides; return the unmatched events of each side."""
        indexes = pc.index_in(new.column("event_id"), value_set=old.column("event_id"))
        both = indexes.is_valid()
        pair_new, pair_old = new.filter(both), old.take(indexes.drop_null())
        self._pair(pair_old, pair_new)
        left = pc.invert(pc.is_in(old.column("event_id"), value_set=new.column("event_id")))
        return old.filter(left), new.filter(pc.invert(both))

    def _pair(self, old: pa.Table, new: pa.Table) -> None:
        differs = {name: _differs(old.column(name), new.column(name)) for name in _COMPARED}
        anywhere = np.logical_or.reduce(list(differs.values()))
        names = np.array(old.column("name").to_pylist(), np.object_)
        self._pairs.append((names, _numbers(old), _numbers(new)))
        self._count("same", names[~anywhere])
        self._count("changed", names[anywhere])
        rows = np.flatnonzero(anywhere)
        which = {name: mask[rows].tolist() for name, mask in differs.items()}
        pairs = zip(old.take(rows).to_pylist(), new.take(rows).to_pylist(), strict=True)
        for number, (before, after) in enumerate(pairs):
            fields = [
                path
                for name in _COMPARED
                if which[name][number]
                for path in _fields(name, before[name], after[name])
            ]
            self._difference.fields.setdefault(before["name"], Counter()).update(fields)
            self._show("changed", after, fields, before, after)

    def _one_sided(self, kind: str, rows: pa.Table) -> None:
        self._count(kind, map(str, rows.column("name").to_pylist()))
        for row in rows.slice(0, self._sample).to_pylist():
            self._show(kind, row, [], *((row, None) if kind == "dropped" else (None, row)))

    def _count(self, kind: str, names: Iterable[str]) -> None:
        for name, count in Counter(names).items():
            self._difference.tables.setdefault(name, Counter())[kind] += count

    def _count_moved(self) -> None:
        """Count the matched events that now come after an event that they preceded."""
        if not self._pairs:
            return
        names, old, new = (np.concatenate(parts) for parts in zip(*self._pairs, strict=True))
        # In the new order, an event whose old ordinal is below an earlier one's was overtaken.
        order = np.argsort(new)
        ordinals = old[order]
        self._count("moved", names[order][ordinals < np.maximum.accumulate(ordinals)])

    def _show(
        self,
        kind: str,
        row: dict[str, Any],
        fields: list[str],
        recorded: dict[str, Any] | None,
        current: dict[str, Any] | None,
    ) -> None:
        if self._sampled[kind] == self._sample:
            return
        self._sampled[kind] += 1
        shown = {
            "kind": kind,
            "table": row["name"],
            "op": row["op"],
            "event_id": row["event_id"],
            "fields": fields,
        }
        if self._values:
            shown |= {"recorded": _values(recorded), "made": _values(current)}
        self._difference.sample.append(shown)


def _tables(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the compared columns, with full names of tables, in parts of `_BATCH_ROWS` or more.

    The last part may have fewer rows.
    """
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        plain = [batch.column(name).cast(_SCHEMA.field(name).type) for name in _READ]
        first = pc.coalesce(plain[_READ.index("schema")], plain[_READ.index("db")])
        parts: Any = (first, plain[_READ.index("table")], ".")
        names = pc.binary_join_element_wise(*parts)
        waiting.append(pa.RecordBatch.from_arrays([*plain, names], schema=_SCHEMA))
        if sum(part.num_rows for part in waiting) >= _BATCH_ROWS:
            yield pa.Table.from_batches(waiting)
            waiting.clear()
    if waiting:
        yield pa.Table.from_batches(waiting)


def _numbers(rows: pa.Table) -> Longs:
    numbers: Longs = rows.column("ordinal").to_numpy()
    return numbers


def _differs(old: Any, new: Any) -> Mask:
    differs: Mask = ~pc.fill_null(pc.equal(old, new), False).to_numpy()
    both_null: Mask = old.is_null().to_numpy() & new.is_null().to_numpy()
    return differs & ~both_null


def _fields(column: str, old: Any, new: Any) -> list[str]:
    """Return the fields that differ inside a column.

    Returns the column's own name if it is no JSON object.
    """
    whole = _SHOWN.get(column, column)
    if column not in _OBJECTS or old is None or new is None:
        return [whole]
    before, after = loads(old), loads(new)
    if not isinstance(before, dict) or not isinstance(after, dict):
        return [whole]
    names = dict.fromkeys((*before, *after))
    paths = [
        f"{whole}.{name}"
        for name in names
        if (name in before) != (name in after) or dumps(before.get(name)) != dumps(after.get(name))
    ]
    return paths or [whole]


def _values(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    row = {**row, "ts_us": row["ts_us"] // 1000}
    filled = {name: row[name] for name in _COMPARED if row[name] not in {None, False}}
    return {_SHOWN.get(name, name): value for name, value in filled.items()}


def _rows(journal: Journal, path: str) -> Iterator[pa.RecordBatch]:
    if path:
        yield from journal.share(path, FRAME.names, ordinals=None, part=0, of=1)
