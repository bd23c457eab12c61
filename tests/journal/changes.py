"""Batches of changes for the tests of the journal."""

from __future__ import annotations

import pyarrow as pa

from deltaforge_dagster.frame import CAPTURED

Change = dict[str, object]


def change(number: int, **columns: object) -> Change:
    """Return change `number` of a log; `columns` replace its values."""
    values: Change = {
        "op": "cud"[number % 3],
        "ts_us": 1_700_000_000_000_000 + number,
        "db": "shop",
        "schema": "public",
        "table": ("orders", "items")[number % 2],
        "before": None if number % 3 == 0 else f'{{"id":{number},"note":"ä{number}"}}',
        "after": None if number % 3 == 2 else f'{{"id":{number},"note":"{"x" * (number % 50)}"}}',
        "key": f'{{"id":{number}}}',
        "file": None,
        "pos": 1000 + number,
        "row": number % 5,
        "tx_id": str(700 + number // 5),
        "tx_end": number % 5 == 4,
        "schema_version": f"v{number // 100}",
        "schema_sequence": 1 + number // 100,
        "event_id": f"00000000-0000-5000-8000-{number:012d}",
        "ddl": None,
        "topic": None if number % 7 else "elsewhere",
        "route_key": None,
        "headers": None,
        "raw_payload": number % 11 == 0,
        "tags": None,
    }
    return values | columns


def batch(changes: list[Change]) -> pa.RecordBatch:
    """Return `changes` as a batch of the change frame, with its own dictionaries."""
    return pa.RecordBatch.from_pylist(changes, schema=CAPTURED)


def changes(first: int, end: int) -> pa.RecordBatch:
    """Return the changes `first` to `end - 1` of the log."""
    return batch([change(number) for number in range(first, end)])
