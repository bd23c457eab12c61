"""`deltaforge bench seam`: measure how fast journaled segments pass through Spark to senders.

The benchmark builds segments of realistic changes in a temporary journal, starts a separate Spark
server, and encodes and reads the segments as a run does: one job, one memory-mapped result, one
thread per sender. A sender copies destination, key and value of every message into a command buffer
and discards it, which is the least that any client has to do. The raw limit is the rate of reading
the same Parquet file without Spark; the ratio to it makes results of different machines comparable.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer
from rich.console import Console
from rich.table import Table

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.pipeline.encode.segments import EncodedSegments
from deltaforge_dagster.resources.spark import SparkSessions
from deltaforge_dagster.state.records import SegmentRow

_PIPELINE = """\
metadata: {{name: seam, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: shop, dsn: "postgres://u@localhost/shop", slot: s, publication: p, tables: [a]}}
  sinks:
{sinks}
"""
_SINK = """\
    - type: redis
      config: {{id: s{n}, uri: "redis://localhost", stream: "{stream}"}}
"""
_STREAMS = ("df:${source.schema}.${source.table}", "all:${source.db}", "changes-${tenant_id}.${op}")
_SMALL_ROWS = 100


@dataclass(frozen=True, slots=True)
class SeamResult:
    """The measured values; rates are in events per second, times in seconds.

    Attributes:
        rows: Events of the large segment.
        value_bytes: Mean size of a message's value.
        one_sender: Rate to one sender, median of the rounds.
        one_sender_best: Rate of the best round.
        three_senders: Rate to three concurrent senders, each of which gets every event; median.
        three_senders_best: Rate of the best round.
        small: Time to encode and send a segment of 100 events, median.
        small_p99: The same, 99th percentile.
        raw: Rate of reading the large segment with pyarrow, without Spark.
        raw_ratio: `one_sender / raw`.
        server_start: Time until the Spark server responded.
    """

    rows: int
    value_bytes: int
    one_sender: int
    one_sender_best: int
    three_senders: int
    three_senders_best: int
    small: float
    small_p99: float
    raw: int
    raw_ratio: float
    server_start: float


def seam(
    rows: Annotated[
        int, typer.Option(min=1, help="Number of events in the large segment.")
    ] = 200_000,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measured rounds of each kind.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure journal -> Spark -> senders: rates, small-segment latency, and the raw limit."""
    with tempfile.TemporaryDirectory(prefix="deltaforge-seam-") as folder:
        result = measure(Path(folder), rows, rounds)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    table = Table("measure", "value")
    for name, value in asdict(result).items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.3f}")
    Console().print(table)


def measure(home: Path, rows: int, rounds: int) -> SeamResult:
    """Run the measurement in `home`, with a separate Spark server that is stopped afterwards."""
    journal = Journal((home / "journal").as_uri())
    large, small = _segment(journal, 1, rows), _segment(journal, 2, min(rows, _SMALL_ROWS))
    began = time.monotonic()
    server = SparkServer.ensure(home)
    started = time.monotonic() - began
    try:
        settings = Settings.from_env(
            {"DELTAFORGE_HOME": str(home), "DELTAFORGE_SPARK_REMOTE": server.remote}
        )
        sessions = SparkSessions(settings, None, lambda _: None)

        def rate(senders: int) -> tuple[int, int, int]:
            encoder = Encoder(_spec(home, senders), journal, sessions, "bench")
            times = []
            for _ in range(rounds + 2):  # the first two compile kernels
                seconds, size = _deliver(encoder, large, senders)
                times.append(seconds)
            del times[:2]
            return round(rows / statistics.median(times)), round(rows / min(times)), size

        single, single_best, size = rate(1)
        three, three_best, _ = rate(3)
        encoder = Encoder(_spec(home, 1), journal, sessions, "bench")
        smalls = [_deliver(encoder, small, 1)[0] for _ in range(5 * rounds + 5)][5:]
        raw = round(rows / min(_timed(lambda: _read(journal, large)) for _ in range(3)))
    finally:
        server.stop()
    return SeamResult(
        rows=rows,
        value_bytes=size,
        one_sender=single,
        one_sender_best=single_best,
        three_senders=three,
        three_senders_best=three_best,
        small=statistics.median(smalls),
        small_p99=float(np.quantile(smalls, 0.99)),
        raw=raw,
        raw_ratio=single / raw,
        server_start=started,
    )


def _spec(home: Path, sinks: int) -> Any:
    file = home / f"seam{sinks}.yaml"
    blocks = (_SINK.format(n=n, stream=stream) for n, stream in enumerate(_STREAMS[:sinks]))
    file.write_text(_PIPELINE.format(sinks="".join(blocks)))
    return load_pipeline(file).spec


def _deliver(encoder: Encoder, segment: SegmentRow, senders: int) -> tuple[float, int]:
    """Encode a segment and send it from one thread per sink; return seconds and mean value size."""
    began = time.monotonic()
    encoded = encoder.encode([segment])
    sizes: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: sizes.append(_send(encoded, f"s{n}", segment)))
        for n in range(senders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    encoded.discard()
    if len(sizes) != senders:
        raise RuntimeError("a sender failed")
    return seconds, sizes[0]


def _send(encoded: EncodedSegments, sink_id: str, segment: SegmentRow) -> int:
    """Pack every message into command bytes, a batch at a time; return the mean value size."""
    sent = size = 0
    for batch in encoded.batches(sink_id, segment.segment, -1):
        messages = batch.messages
        columns: list[Any] = [messages.column(name) for name in ("destination", "key", "value")]
        sent += len(pc.binary_join_element_wise(*columns, pa.scalar("\r\n")))
        size += pc.sum(pc.binary_length(columns[-1])).as_py() or 0
    if sent != segment.rows:
        raise RuntimeError(f"{sent} of {segment.rows} messages arrived")
    return round(size / sent)


def _read(journal: Journal, segment: SegmentRow) -> None:
    for _ in journal.batches(segment):
        pass


def _timed(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _segment(journal: Journal, number: int, rows: int) -> SegmentRow:
    writer = journal.writer("seam", "bench", number, 1)
    for start in range(0, rows, 20_000):
        writer.write(_changes(range(start, min(rows, start + 20_000))))
    written = writer.close()
    return SegmentRow(
        segment=number,
        start_position="{}",
        end_position="{}",
        **written.recorded,
        range=1,
        epoch=1,
        created_at=0.0,
    )


def _changes(ids: Sequence[int]) -> pa.RecordBatch:
    """Return inserts of ten columns into two tables, ten per transaction."""
    number = np.random.default_rng(ids[0])
    texts = [
        f'{{"id":{i},"customer_id":{n % 9999},"status":"{"paid" if n % 3 else "new"}","amount":'
        f'"{n % 997}.{i % 100:02d}","currency":"EUR","note":"order {n:x} of {i}","paid":true,'
        f'"items":{n % 7},"created_at":"2025-01-02 03:04:05.{i % 10**6:06d}+00",'
        f'"sku":"SKU-{n % 5000:05d}"}}'
        for i, n in zip(ids, number.integers(0, 2**32, len(ids)).tolist(), strict=True)
    ]
    random = number.integers(0, 2**32, (len(ids), 4))
    columns: dict[str, list[Any]] = {
        "op": ["c"] * len(ids),
        "ts_us": [1_730_000_000_000_000 + i * 37 for i in ids],
        "db": ["shop"] * len(ids),
        "schema": ["public"] * len(ids),
        "table": [("orders", "customers")[i % 2] for i in ids],
        "after": texts,
        "key": [f'{{"id":{i}}}' for i in ids],
        "pos": [0x16B6C50 + i // 10 * 2000 for i in ids],
        "row": [i % 10 for i in ids],
        "tx_id": [str(700 + i // 10) for i in ids],
        "tx_end": [i % 10 == 9 for i in ids],
        "schema_version": ["sha256:" + "4f" * 32] * len(ids),
        "schema_sequence": [3] * len(ids),
        "event_id": [
            f"{a:08x}-{b >> 16:04x}-7{b & 0xFFF:03x}-8{c >> 20:03x}-{c & 0xFFFF:04x}{d:08x}"
            for a, b, c, d in random.tolist()
        ],
        "raw_payload": [False] * len(ids),
    }
    arrays = []
    for field in CAPTURED:
        value = columns.get(field.name, [None] * len(ids))
        if pa.types.is_dictionary(field.type):
            array: pa.Array[Any] = pa.array(value, pa.string()).dictionary_encode()
        else:
            array = pa.array(value, field.type)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=CAPTURED)
