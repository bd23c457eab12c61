"""The pipelines without a file in the state store, and what becomes of a pipeline that is removed."""

from __future__ import annotations

from deltaforge_dagster.state import stored_specs
from deltaforge_dagster.state.store_base import StoreBase
from deltaforge_dagster.state.stored_specs import StoredSpec


class StoreSpecs(StoreBase):
    """The part of a `StateStore` about pipelines that it keeps itself (see `stored_specs`)."""

    def stored_specs(self) -> list[StoredSpec]:
        """Return the document of every pipeline that is kept here, by name."""
        with self.database.read() as connection:
            return stored_specs.read(connection)

    def stored_spec(self, name: str) -> StoredSpec | None:
        """Return the document of one pipeline; None when it has a file, or there is none."""
        with self.database.read() as connection:
            found = stored_specs.read(connection, name)
        return found[0] if found else None

    def add_stored_spec(self, name: str, document: str) -> bool:
        """Keep a new pipeline's document; False when there is one of that name."""
        with self.database.write() as connection:
            return stored_specs.add(connection, name, document)

    def replace_stored_spec(self, name: str, version: int, document: str) -> bool:
        """Put a document in the place of that version; False when somebody else was faster."""
        with self.database.write() as connection:
            return stored_specs.replace(connection, name, version, document)

    def remove_stored_spec(self, name: str) -> bool:
        """Drop a document alone, where a file has the same name; False when there is none."""
        with self.database.write() as connection:
            return stored_specs.remove(connection, name)

    def remove_pipeline(self, name: str) -> str | None:
        """Drop a pipeline's document and all that is known of it: positions, checkpoints, dead letters.

        Its slot and publication in the source stay, and so do the files of its journal, which are
        below the uid that is returned; None when nothing was known.

        Raises:
            NotAllowed: A run holds the lease.
        """
        with self.database.write() as connection:
            return stored_specs.remove_pipeline(connection, name)
