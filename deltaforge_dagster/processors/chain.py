"""The processors of a pipeline, one behind the other, over the rows of whole segments.

The chain runs once per segment, and what comes out of it is journaled before any sink sees it. So
state, clocks and random numbers in a processor cannot make sinks differ, and a retry sends what the
first try sent. What the chain guarantees, whatever its processors do:

- a call gets at most `batch.max_events` rows and `batch.max_bytes` of images (2,000 and 4 MiB unless
  the file says otherwise), in log order;
- events that it makes are marked, and each has an id of its own (`identity`);
- rows that come out are numbered anew, without gaps;
- `tx_end` is true on the last row of each transaction that is left, and on no other.

Where SQL is in it the chain is cut into *stages*: Spark's own engine computes between them (`transit`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.config import processors as config
from deltaforge_dagster.errors import ProcessorFailed, SpecError
from deltaforge_dagster.processors.base import Processor
from deltaforge_dagster.processors.code import chain_hash
from deltaforge_dagster.processors.envelope import Origin
from deltaforge_dagster.processors.filter import Filter
from deltaforge_dagster.processors.flatten import Flatten
from deltaforge_dagster.processors.identity import identified
from deltaforge_dagster.processors.javascript import JavaScript
from deltaforge_dagster.processors.outbox import Outbox
from deltaforge_dagster.processors.plugins import custom
from deltaforge_dagster.processors.python import Python
from deltaforge_dagster.processors.script import Limits
from deltaforge_dagster.processors.sql import Sql

CALL_ROWS = 2_000
CALL_BYTES = 4 << 20
"""What a processor gets at once, unless the pipeline file says otherwise."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Processors that run in one Python worker, one behind the other.

    Attributes:
        sql: What Spark computes before them; None at the beginning of a chain.
        processors: Where there is `sql`, it is the first of them.
    """

    sql: config.SqlProcessor | None
    processors: Sequence[config.Processor]


@dataclass(frozen=True, slots=True)
class ChainSpec:
    """What a chain is made of; goes to Spark's tasks as it is.

    Attributes:
        processors: As the pipeline file has them, in order.
        origin: What every event says about where it comes from.
        max_rows: Most rows of one call.
        max_bytes: Most bytes of images in one call, unless a single row has more.
        code: Hashes of the source of Python functions, by processor, as far as it is found here.
    """

    processors: Sequence[config.Processor]
    origin: Origin
    max_rows: int = CALL_ROWS
    max_bytes: int = CALL_BYTES
    code: Mapping[str, str] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """Tells chains apart that may make different things of the same rows."""
        return chain_hash(self.processors, self.code)

    @property
    def stages(self) -> list[Stage]:
        """The chain in its parts: each `sql` processor begins another."""
        stages: list[Stage] = [Stage(None, [])]
        for one in self.processors:
            if isinstance(one, config.SqlProcessor):
                stages.append(Stage(one, [one]))
            else:
                stages[-1] = Stage(stages[-1].sql, [*stages[-1].processors, one])
        return stages

    def sql_behind(self, stage: int) -> config.SqlProcessor | None:
        """Return what Spark computes of what a stage makes, None behind the last one."""
        stages = self.stages
        return stages[stage + 1].sql if stage + 1 < len(stages) else None

    def problems(self) -> Iterator[tuple[int, str]]:
        """Yield what is wrong with processors: the number of each in the list, and why."""
        for number, one in enumerate(self.processors):
            try:
                _made(one, self).close()
            except (SpecError, ProcessorFailed) as error:
                yield number, str(error)


class Chain:
    """The processors of one stage in one task; a context manager that ends them.

    Args:
        spec: The whole chain.
        stage: Which of its stages, from 0.

    Attributes:
        counts: By processor: `events_in`, `events_out`, `calls`, the microseconds that these took as
            `busy_us`, and what it counts itself.

    Raises:
        SpecError: A processor cannot be made.
    """

    def __init__(self, spec: ChainSpec, stage: int = 0) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self._spec = spec
        self._stack = ExitStack()
        self._processors: list[tuple[str, Processor]] = []
        try:
            for one in spec.stages[stage].processors:
                made = _made(one, spec)
                self._stack.callback(made.close)
                self._processors.append((one.id, made))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processors. Safe to call twice."""
        self._stack.close()

    def run(self, segment: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what becomes of the rows of one segment, given from its first row to its last.

        Raises:
            ProcessorFailed: A processor broke.
        """
        ordinal = 0
        for rows in _ended(self._called(segment)):
            numbers = pa.array(np.arange(ordinal, ordinal + rows.num_rows))
            place = rows.schema.get_field_index("ordinal")
            ordinal += rows.num_rows
            yield rows.set_column(place, rows.schema.field(place), numbers)

    def _called(self, segment: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in segment:
            for rows in _cut(batch, self._spec.max_rows, self._spec.max_bytes):
                made = rows
                for name, processor in self._processors:
                    counts = self.counts.setdefault(name, Counter(events_in=0, events_out=0))
                    if not made.num_rows:
                        continue
                    counts["events_in"] += made.num_rows
                    began = time.perf_counter_ns()
                    found = processor.process(made)
                    counts["busy_us"] += (time.perf_counter_ns() - began) // 1000
                    counts["calls"] += 1
                    made = identified(name, made, found)
                    counts["events_out"] += made.num_rows
                    counts.update(_taken(processor.counts))
                if made.num_rows:
                    yield made


def _taken(counts: Counter[str]) -> Counter[str]:
    taken = Counter(counts)
    counts.clear()
    return taken


def _ended(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches with `tx_end` on the last row of each transaction."""
    before: pa.RecordBatch | None = None
    for batch in batches:
        if before is not None:
            yield _with_ends(before, batch.column("tx_id")[0].as_py())
        before = batch
    if before is not None:
        yield _with_ends(before, None)


def _with_ends(batch: pa.RecordBatch, following: str | None) -> pa.RecordBatch:
    """Set `tx_end` of a batch, given the transaction of the row behind it."""
    column = batch.column("tx_id")
    assert isinstance(column, pa.DictionaryArray)
    names: list[Any] = column.dictionary.to_pylist()
    behind = names.index(following) if following in names else -2
    codes = np.append(column.indices.fill_null(-1).to_numpy(zero_copy_only=False), behind)
    last = codes[1:] != codes[:-1]
    # Rows outside transactions, those of snapshots, are what they were.
    own = batch.column("tx_end").to_numpy(zero_copy_only=False)
    ends = pa.array(np.where(codes[:-1] >= 0, last, own))
    place = batch.schema.get_field_index("tx_end")
    return batch.set_column(place, batch.schema.field(place), ends)


def _cut(batch: pa.RecordBatch, max_rows: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Cut a batch into what a processor gets at once."""
    ends = np.zeros(batch.num_rows + 1, np.int64)
    for name in ("before", "after"):
        lengths = pc.binary_length(cast("pa.StringArray", batch.column(name))).fill_null(0)
        ends[1:] += np.cumsum(lengths.to_numpy(zero_copy_only=False))
    start = 0
    while start < batch.num_rows:
        most = int(np.searchsorted(ends, ends[start] + max_bytes, "right")) - 1
        stop = min(max(most, start + 1), start + max_rows, batch.num_rows)
        yield batch.slice(start, stop - start)
        start = stop


def _made(one: config.Processor, spec: ChainSpec) -> Processor:
    if isinstance(one, config.CustomProcessor):
        return custom(one)
    return _KINDS[one.type](one, spec)


def _javascript(one: config.JavascriptProcessor, spec: ChainSpec) -> Processor:
    limits = Limits(one.limits.cpu_ms, one.limits.mem_mb, one.limits.timeout_ms)
    return JavaScript(one.id, one.inline, limits, spec.origin)


_KINDS: Mapping[str, Callable[[Any, ChainSpec], Processor]] = {
    "javascript": _javascript,
    "flatten": lambda one, _: Flatten(one),
    "outbox": lambda one, _: Outbox(one),
    "filter": lambda one, _: Filter(one),
    "sql": lambda one, _: Sql(one),
    "python": lambda one, spec: Python(one, spec.code.get(one.id)),
}
