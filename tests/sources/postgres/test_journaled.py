"""Events beside plain rows, from the stream through a journal file to the envelope."""

from __future__ import annotations

import json
from pathlib import Path

from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.processors.messages.envelope import EventOrigin, native_envelope
from deltaforge_dagster.processors.messages.routing import row_key
from deltaforge_lab.synthetic import postgres_messages as samples
from tests.processors.rows import position_fields
from tests.sources.postgres.decode.test_decoder import (
    RELATION,
    TABLE,
    decode,
    insert,
    message,
    transaction,
)

ORIGIN = EventOrigin("postgresql", "orders-db", "acme", position_fields("postgresql"))


def test_truncates_and_messages_reach_the_envelope(tmp_path: Path) -> None:
    """A truncate with its flags, messages without a table version; their keys are their ids."""
    inside = samples.message(1002, "audit", b"[1]")
    stream = transaction(RELATION, insert(1), inside, samples.truncate([TABLE], 2))
    batches, _ = decode(stream + message(1100, b'{"a":1}'))
    journal = Journal(f"file://{tmp_path}")
    writer = journal.writer("p", "uid", 1, 1)
    for batch in batches:
        assert batch.rows is not None
        writer.write(batch.rows)
    written = writer.close()

    (frame,) = journal.open(written.path).iter_batches()
    events = [json.loads(str(text)) for text in native_envelope(ORIGIN, frame).to_pylist()]

    assert written.counts == {"public.users": {"c": 1, "t": 1}, "__wal_message.audit": {"c": 2}}
    assert [(event["op"], event["source"]["table"], event["after"]) for event in events] == [
        ("c", "users", {"id": 1, "name": "x"}),
        ("c", "audit", [1]),
        ("t", "users", None),
        ("c", "audit", {"a": 1}),
    ]
    assert events[2]["ddl"] == {"sql": "TRUNCATE", "cascade": False, "restart_identity": True}
    assert "schema_version" in events[2]
    assert "schema_version" not in events[1]
    assert events[1]["transaction"] == {"id": "7"}
    assert "transaction" not in events[3]
    assert "txId" not in events[3]["source"]
    assert row_key(frame).to_pylist()[1:] == [event["event_id"] for event in events[1:]]
