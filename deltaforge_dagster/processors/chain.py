"""Run the processors of a pipeline in order over the rows of whole segments.

The chain runs once per segment, and its output is journaled before any sink sees it. So state,
clocks and random numbers in a processor cannot make sinks differ, and a retry sends the same as the
first attempt. The chain guarantees, whatever its processors do:

- a call gets at most `batch.max_events` rows and `batch.max_bytes` of images (2,000 and 4 MiB by
  default), in log order;
- events that a processor creates are marked, and every event has a unique id (`identified`);
- the resulting rows are renumbered without gaps;
- `tx_end` is true on the last remaining row of each transaction, and on no other.

SQL processors divide the chain into *stages*: Spark's own engine computes between them (`sql`).
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
from deltaforge_dagster.processors.base import Processor, replaced
from deltaforge_dagster.processors.code import chain_hash
from deltaforge_dagster.processors.filter import Filter
from deltaforge_dagster.processors.flatten import Flatten
from deltaforge_dagster.processors.javascript import JavaScript
from deltaforge_dagster.processors.messages.envelope import EventOrigin
from deltaforge_dagster.processors.messages.expansion import copy_id
from deltaforge_dagster.processors.outbox import Outbox
from deltaforge_dagster.processors.plugins import custom
from deltaforge_dagster.processors.python import Python
from deltaforge_dagster.processors.sql import Sql
from deltaforge_dagster.processors.v8 import CallLimits

CALL_ROWS = 2_000
CALL_BYTES = 4 << 20
"""The default limits of one call of a processor: rows, and bytes of row images."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Processors that run in the same Python worker, in order.

    Attributes:
        sql: The processor whose expressions Spark computes before this stage; None for the first
            stage.
        processors: The stage's processors; if `sql` is set, it is the first of them.
    """

    sql: config.SqlProcessor | None
    processors: Sequence[config.Processor]


@dataclass(frozen=True, slots=True)
class ChainSpec:
    """The definition of a chain, which is sent to Spark tasks.

    Attributes:
        processors: The processors of the pipeline file, in order.
        origin: The constant source fields of every event.
        max_rows: The maximum number of rows of one call.
        max_bytes: The maximum size of the row images of one call, unless a single row is larger.
        code: Hashes of the modules of Python functions, by processor id, for modules found on this
            machine.
    """

    processors: Sequence[config.Processor]
    origin: EventOrigin
    max_rows: int = CALL_ROWS
    max_bytes: int = CALL_BYTES
    code: Mapping[str, str] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """A hash that differs between chains whose output for the same rows may differ."""
        return chain_hash(self.processors, self.code)

    @property
    def stages(self) -> list[Stage]:
        """The stages of the chain: each `sql` processor begins a new one."""
        stages: list[Stage] = [Stage(None, [])]
        for processor in self.processors:
            if isinstance(processor, config.SqlProcessor):
                stages.append(Stage(processor, [processor]))
            else:
                stages[-1] = Stage(stages[-1].sql, [*stages[-1].processors, processor])
        return stages

    def sql_behind(self, stage: int) -> config.SqlProcessor | None:
        """Return the SQL processor whose expressions Spark computes after a stage.

        It is None after the last stage.
        """
        stages = self.stages
        return stages[stage + 1].sql if stage + 1 < len(stages) else None

    def problems(self) -> Iterator[tuple[int, str]]:
        """Yield the index of each processor that cannot be created, and the reason."""
        for number, processor in enumerate(self.processors):
            try:
                _build(processor, self).close()
            except (SpecError, ProcessorFailed) as error:
                yield number, str(error)


class Chain:
    """The processors of one stage in one task; a context manager that closes them.

    Args:
        spec: The whole chain.
        stage: The index of the stage, from 0.

    Attributes:
        counts: By processor id: `events_in`, `events_out`, `calls`, the duration of the calls in
            microseconds (`busy_us`), and the processor's own counters.

    Raises:
        SpecError: A processor cannot be created.
    """

    def __init__(self, spec: ChainSpec, stage: int = 0) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self._spec = spec
        self._stack = ExitStack()
        self._processors: list[tuple[str, Processor]] = []
        try:
            for block in spec.stages[stage].processors:
                processor = _build(block, spec)
                self._stack.callback(processor.close)
                self._processors.append((block.id, processor))
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
        """Close the processors. Safe to call twice."""
        self._stack.close()

    def run(self, segment: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the stage's output for one segment, given its rows from first to last.

        Raises:
            ProcessorFailed: A processor failed.
        """
        ordinal = 0
        for rows in _with_tx_end(self._called(segment)):
            numbers = pa.array(np.arange(ordinal, ordinal + rows.num_rows))
            index = rows.schema.get_field_index("ordinal")
            ordinal += rows.num_rows
            yield rows.set_column(index, rows.schema.field(index), numbers)

    def _called(self, segment: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in segment:
            for rows in _cut(batch, self._spec.max_rows, self._spec.max_bytes):
                current = rows
                for name, processor in self._processors:
                    counts = self.counts.setdefault(name, Counter(events_in=0, events_out=0))
                    if not current.num_rows:
                        continue
                    counts["events_in"] += current.num_rows
                    began = time.perf_counter_ns()
                    returned = processor.process(current)
                    counts["busy_us"] += (time.perf_counter_ns() - began) // 1000
                    counts["calls"] += 1
                    current = identified(name, current, returned)
                    counts["events_out"] += current.num_rows
                    counts.update(_drained(processor.counts))
                if current.num_rows:
                    yield current


def _drained(counts: Counter[str]) -> Counter[str]:
    taken = Counter(counts)
    counts.clear()
    return taken


def _with_tx_end(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches with `tx_end` set on the last row of each transaction."""
    before: pa.RecordBatch | None = None
    for batch in batches:
        if before is not None:
            yield _with_ends(before, batch.column("tx_id")[0].as_py())
        before = batch
    if before is not None:
        yield _with_ends(before, None)


def _with_ends(batch: pa.RecordBatch, following: str | None) -> pa.RecordBatch:
    """Set `tx_end` in a batch, given the transaction of the row that follows it."""
    column = batch.column("tx_id")
    assert isinstance(column, pa.DictionaryArray)
    names: list[Any] = column.dictionary.to_pylist()
    # -1 stands for no transaction, so -2 differs from every code: the batch's last row ends its
    # transaction.
    behind = names.index(following) if following in names else -2
    codes = np.append(column.indices.fill_null(-1).to_numpy(zero_copy_only=False), behind)
    last = codes[1:] != codes[:-1]
    # Rows outside transactions, which are rows of snapshots, keep their value.
    own = batch.column("tx_end").to_numpy(zero_copy_only=False)
    ends = pa.array(np.where(codes[:-1] >= 0, last, own))
    index = batch.schema.get_field_index("tx_end")
    return batch.set_column(index, batch.schema.field(index), ends)


def _cut(batch: pa.RecordBatch, max_rows: int, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Split a batch into slices within the limits of one call."""
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


def _build(block: config.Processor, spec: ChainSpec) -> Processor:
    if isinstance(block, config.CustomProcessor):
        return custom(block)
    return _KINDS[block.type](block, spec)


def _javascript(block: config.JavascriptProcessor, spec: ChainSpec) -> Processor:
    limits = CallLimits(block.limits.cpu_ms, block.limits.mem_mb, block.limits.timeout_ms)
    return JavaScript(block.id, block.inline, limits, spec.origin)


_KINDS: Mapping[str, Callable[[Any, ChainSpec], Processor]] = {
    "javascript": _javascript,
    "flatten": lambda block, _: Flatten(block),
    "outbox": lambda block, _: Outbox(block),
    "filter": lambda block, _: Filter(block),
    "sql": lambda block, _: Sql(block),
    "python": lambda block, spec: Python(block, spec.code.get(block.id)),
}


def identified(name: str, received: pa.RecordBatch, returned: pa.RecordBatch) -> pa.RecordBatch:
    """Return a processor's output with unique ids and marks.

    Consumers distinguish events by their ids, and synthetic events from those of the source by
    their mark:

    - a row with an id that was not in the processor's input was created by it: the row is
      *synthetic* and is marked with the processor's id, unless the processor set the mark itself. A
      row without an id gets one that is a function of the nearest input row before it;
    - an input row that is returned several times is an event and its copies, which are not marked.
      The first keeps the id; the others get ids that are functions of it.

    The same rows from the same processor always get the same ids.

    Args:
        name: Id of the processor.
        received: The rows that the processor got; at least one if it returned any.
        returned: The rows that it returned; their `event_id` may repeat, or be null.
    """
    ids, input_ids = returned.column("event_id"), received.column("event_id")
    if ids.equals(input_ids):
        return returned
    created = ~pc.is_in(ids, value_set=input_ids).to_numpy(zero_copy_only=False)
    if not created.any() and pc.count_distinct(ids).as_py() == len(ids):
        return returned
    changes: dict[str, dict[int, Any]] = {
        "event_id": _own_ids(name, input_ids[0].as_py(), ids.to_pylist(), created.tolist())
    }
    unmarked = created & returned.column("synthetic").is_null().to_numpy(zero_copy_only=False)
    changes["synthetic"] = dict.fromkeys(np.flatnonzero(unmarked).tolist(), name)
    return replaced(returned, {column: rows for column, rows in changes.items() if rows})


def _own_ids(name: str, first: str, ids: list[str | None], new_rows: list[bool]) -> dict[int, str]:
    """Return new ids, by row, for rows without an id and for those that repeat an earlier row's id.

    The id of a row without one derives from the nearest row before it that was in the input;
    `first` is the id of the first input row. `new_rows` says which rows were not in the input.
    """
    own: dict[int, str] = {}
    times: dict[str, int] = {}
    anchor = first
    for row, (event_id, created) in enumerate(zip(ids, new_rows, strict=True)):
        if not event_id:
            own[row] = copy_id(anchor, row + 1, f"{name}/new")
            continue
        if not created:
            anchor = event_id
        times[event_id] = times.get(event_id, 0) + 1
        if times[event_id] > 1:
            own[row] = copy_id(event_id, times[event_id], name)
    return own
