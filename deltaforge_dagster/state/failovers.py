"""Records from which server a source is read, and the comparison of tables when it changed.

Namespace `failover/{pipeline}`: the value `identity:{source id}` is the server's identity, `{source
id}/reconciliation` the newest record of a change, and the log `{source id}/history` holds all
records. A record is the JSON object `{id, source_id, previous_identity, new_identity,
table_results: [{db, table, deltas}], reconciled_at}`. It is committed together with the new
identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import orjson
from sqlalchemy import Connection, delete, select

from deltaforge_dagster.state.database.database import clock
from deltaforge_dagster.state.database.primitives import append_to_log, get_value, put_value
from deltaforge_dagster.state.database.tables import kv

_IDENTITY = "identity:"


class FailoverWrites:
    """Records the server that a lease holder reads: `FencedWriter.failovers`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def server(self, source_id: str) -> str | None:
        """Return the identity of the server from which the source was last read, or None."""
        identity = get_value(self._connection, _namespace(self._pipeline), _identity_key(source_id))
        return None if identity is None else identity.decode()

    def set_server(self, source_id: str, identity: str) -> None:
        """Store the identity of the server from which the source is read."""
        put_value(
            self._connection,
            _namespace(self._pipeline),
            _identity_key(source_id),
            identity.encode(),
        )

    def reconciled(
        self,
        source_id: str,
        *,
        previous: str,
        identity: str,
        position: str,
        deltas: Mapping[tuple[str, str], Sequence[str]],
    ) -> None:
        """Record that the source is now another server, and store that server's identity.

        Args:
            source_id: `source.config.id`.
            previous: Identity of the previous server.
            identity: Identity of the new server.
            position: Position at which reading resumes, JSON text.
            deltas: Differences by (db, full table name), including tables without differences.
        """
        named = f"{source_id}\n{previous}\n{identity}\n{position}"
        record = {
            "id": hashlib.sha256(named.encode()).hexdigest()[:32],
            "source_id": source_id,
            "previous_identity": previous,
            "new_identity": identity,
            "table_results": [
                {"db": db, "table": table, "deltas": list(differences)}
                for (db, table), differences in deltas.items()
            ],
            "reconciled_at": self._connection.execute(select(clock())).scalar_one(),
        }
        text = orjson.dumps(record)
        append_to_log(self._connection, _namespace(self._pipeline), f"{source_id}/history", text)
        put_value(self._connection, _namespace(self._pipeline), f"{source_id}/reconciliation", text)
        self.set_server(source_id, identity)


def forget_server(connection: Connection, pipeline: str) -> None:
    """Forget the server of each source, so that any server may be read next."""
    connection.execute(
        delete(kv).where(kv.c.ns == _namespace(pipeline), kv.c.key.startswith(_IDENTITY))
    )


def _identity_key(source_id: str) -> str:
    return f"{_IDENTITY}{source_id}"


def _namespace(pipeline: str) -> str:
    return f"failover/{pipeline}"
