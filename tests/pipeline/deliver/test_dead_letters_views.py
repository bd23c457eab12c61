"""What an entry of the dead letters shows of its change."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.pipeline.deliver.dead_letters import View, views
from deltaforge_dagster.processors.messages.envelope import EventOrigin
from tests.processors.rows import position_fields


def view(limit: int, **changes: Any) -> View:
    """Return what is shown of an update."""
    row: dict[str, Any] = dict.fromkeys(FRAME.names)
    row |= {"segment": 1, "ordinal": 0, "op": "u", "ts_us": 5000, "db": "shop", "schema": "public"}
    row |= {"table": "orders", "pos": 0x16B6C50, "row": 3, "tx_id": "731", "tx_end": True}
    row |= {"event_id": "e", "raw_payload": False, "after": '{"id":1,"n":1.10}'} | changes
    (found,) = views(
        EventOrigin("postgresql", "db", "acme", position_fields("postgresql")),
        pa.RecordBatch.from_pylist([row], FRAME),
        limit,
    )
    return found


def test_a_small_event_is_shown_as_it_is() -> None:
    """The native event, digit by digit, and its place in the log."""
    found = view(10_000)

    assert '"after":{"id":1,"n":1.10},' in found.event
    assert not found.truncated
    assert json.loads(found.cursor) == {"lsn": "0/016B6C50", "tx_id": "731", "row": 3}
    of_mysql = view(10_000, file="binlog.000003", tx_id="uuid:5")
    assert json.loads(of_mysql.cursor) == {
        "file": "binlog.000003", "pos": 0x16B6C50, "gtid": "uuid:5", "row": 3,
    }  # fmt: skip


def test_a_large_event_shows_no_images() -> None:
    """Each image there is becomes a note; everything else of the event stays."""
    found = view(400, after='{"v":"' + 500 * "x" + '"}')
    event = json.loads(found.event)

    assert found.truncated
    assert event["after"] == "<truncated: original payload exceeded 400 bytes>"
    assert (event["before"], event["op"], event["event_id"]) == (None, "u", "e")
    assert view(200).truncated, "the whole event counts"
