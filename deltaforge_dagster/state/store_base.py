"""What every part of a `StateStore` works with: its database."""

from __future__ import annotations

from deltaforge_dagster.state.database import Database


class StoreBase:
    """An open state store's database; see `store`.

    Attributes:
        database: For the primitives: `Kv(store.database, namespace)`.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
