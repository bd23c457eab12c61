"""Results of schema sensing in the state store (see `sensing`)."""

from __future__ import annotations

import orjson

from deltaforge_dagster.state import sensing
from deltaforge_dagster.state.primitives import Kv, Log, LogEntry
from deltaforge_dagster.state.store_base import StoreBase


class StoreSensing(StoreBase):
    """The part of a `StateStore` about sensing."""

    def sensing_progress(self, name: str) -> sensing.Progress | None:
        """Return the progress of a pipeline's sensing, or None before it began."""
        with self.database.read() as connection:
            return sensing.progress(connection, name)

    def sensed_tables(self, name: str) -> dict[str, bytes]:
        """Return what sensing knows of a pipeline's tables, by full name."""
        found = Kv(self.database, sensing.namespace(name)).items(sensing.TABLE)
        return {key.removeprefix(sensing.TABLE): value for key, value in found.items()}

    def sensing_facts(self, name: str) -> dict[str, int | str]:
        """Return the metadata for Dagster about a pipeline's tables, by name."""
        found = Kv(self.database, sensing.namespace(name)).items(sensing.FACTS)
        return {key: fact for value in found.values() for key, fact in orjson.loads(value).items()}

    def evolutions(self, name: str, subject: str | None = None) -> list[LogEntry]:
        """Return the changes of one sensed schema, or of all of a pipeline's, oldest first."""
        return Log(self.database, sensing.namespace(name)).entries(subject)
