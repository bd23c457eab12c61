"""Base of all parts of a `StateStore`: its database."""

from __future__ import annotations

from deltaforge_dagster.state.database import Database


class StoreBase:
    """Holds the database of an open state store; see `store`.

    Attributes:
        database: For the primitives: `Kv(store.database, namespace)`.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
