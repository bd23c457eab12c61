"""Which pipeline owns each resource that only one pipeline may use (`config.owned`).

It is the first pipeline that named the resource, until its file no longer does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import orjson
from sqlalchemy import Connection, delete, select

from deltaforge_dagster.config.owned import OwnedResource
from deltaforge_dagster.state.database.database import Database
from deltaforge_dagster.state.database.primitives import get_value, put_value
from deltaforge_dagster.state.database.tables import kv

_KEY = "resources"
_PREFIX = "owned/"


class OwnerRepository:
    """What pipelines own: `StateStore.owners`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, pipeline: str) -> list[OwnedResource]:
        """Return what a pipeline owns."""
        with self._database.read() as connection:
            text = get_value(connection, f"{_PREFIX}{pipeline}", _KEY)
        return [] if text is None else _parsed(text)

    def others(self, pipeline: str) -> dict[str, list[OwnedResource]]:
        """Return what the other pipelines own, by name."""
        with self._database.read() as connection:
            return _others(connection, pipeline)

    def claim(
        self, pipeline: str, resources: Sequence[OwnedResource], successor_of: Collection[str]
    ) -> bool:
        """Make a pipeline the owner of exactly these resources.

        If another pipeline owns any of them, change nothing and return False.

        Args:
            pipeline: The pipeline.
            resources: All resources that it names.
            successor_of: Pipelines that no longer exist, and lose what they own.
        """
        with self._database.write() as connection:
            # Serializes claims of several processes: each first writes this value.
            put_value(connection, _KEY, _KEY, b"")
            others = _others(connection, pipeline)
            taken = [
                resource
                for name, owned in others.items()
                if name not in successor_of
                for resource in owned
            ]
            if any(resource.is_same(other) for resource in resources for other in taken):
                return False
            for name in successor_of:
                connection.execute(delete(kv).where(kv.c.ns == f"{_PREFIX}{name}"))
            text = orjson.dumps([resource.to_fields() for resource in resources])
            put_value(connection, f"{_PREFIX}{pipeline}", _KEY, text)
            return True


def _others(connection: Connection, pipeline: str) -> dict[str, list[OwnedResource]]:
    query = select(kv.c.ns, kv.c.val).where(
        kv.c.ns.startswith(_PREFIX, autoescape=True), kv.c.key == _KEY
    )
    resources = {ns.removeprefix(_PREFIX): _parsed(text) for ns, text in connection.execute(query)}
    return {name: owned for name, owned in resources.items() if name != pipeline}


def _parsed(text: bytes) -> list[OwnedResource]:
    return [OwnedResource.from_fields(fields) for fields in orjson.loads(text)]
