"""Which server a source was read from, and what was found when that changed.

Namespace `failover/{pipeline}`: the value `identity:{source id}` is the server's identity,
`{source id}/reconciliation` the newest record of a change, and the log `{source id}/history` has
all of them. A record is the JSON object `{id, source_id, previous_identity, new_identity,
table_results: [{db, table, deltas}], reconciled_at}`. Record and new identity commit together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import orjson
from sqlalchemy import Connection, delete, select

from deltaforge_dagster.state.database import clock
from deltaforge_dagster.state.primitives import append_to_log, get_value, put_value
from deltaforge_dagster.state.tables import kv

_IDENTITY = "identity:"


def namespace(pipeline: str) -> str:
    """Return the namespace of a pipeline's servers."""
    return f"failover/{pipeline}"


def server(connection: Connection, pipeline: str, source_id: str) -> str | None:
    """Return the identity of the server that the source was read from last, None before that."""
    found = get_value(connection, namespace(pipeline), _identity_key(source_id))
    return None if found is None else found.decode()


def set_server(connection: Connection, pipeline: str, source_id: str, identity: str) -> None:
    """Remember the server that the source is read from."""
    put_value(connection, namespace(pipeline), _identity_key(source_id), identity.encode())


def forget_server(connection: Connection, pipeline: str) -> None:
    """Take any server for the right one when the source is read next."""
    connection.execute(
        delete(kv).where(kv.c.ns == namespace(pipeline), kv.c.key.startswith(_IDENTITY))
    )


def reconciled(
    connection: Connection,
    pipeline: str,
    source_id: str,
    *,
    previous: str,
    identity: str,
    position: str,
    deltas: Mapping[tuple[str, str], Sequence[str]],
) -> None:
    """Record that the source is another server now, and remember that server.

    Args:
        connection: The caller's transaction, which holds the pipeline's lease.
        pipeline: The pipeline's name.
        source_id: `source.config.id`.
        previous: Identity of the server before.
        identity: Identity of the server now.
        position: Where reading goes on, as JSON text.
        deltas: What is different, by (db, full table name); tables without a difference, too.
    """
    named = f"{source_id}\n{previous}\n{identity}\n{position}"
    record = {
        "id": hashlib.sha256(named.encode()).hexdigest()[:32],
        "source_id": source_id,
        "previous_identity": previous,
        "new_identity": identity,
        "table_results": [
            {"db": db, "table": table, "deltas": list(found)}
            for (db, table), found in deltas.items()
        ],
        "reconciled_at": connection.execute(select(clock())).scalar_one(),
    }
    text = orjson.dumps(record)
    append_to_log(connection, namespace(pipeline), f"{source_id}/history", text)
    put_value(connection, namespace(pipeline), f"{source_id}/reconciliation", text)
    set_server(connection, pipeline, source_id, identity)


def _identity_key(source_id: str) -> str:
    return f"{_IDENTITY}{source_id}"
