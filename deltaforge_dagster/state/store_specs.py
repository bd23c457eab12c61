"""Pipelines without a file, whose documents are in the state store, and the removal of pipelines."""

from __future__ import annotations

from deltaforge_dagster.state import stored_specs
from deltaforge_dagster.state.store_base import StoreBase
from deltaforge_dagster.state.stored_specs import StoredSpec


class StoreSpecs(StoreBase):
    """The part of a `StateStore` about pipelines without a file (see `stored_specs`)."""

    def stored_specs(self) -> list[StoredSpec]:
        """Return all stored documents, sorted by name."""
        with self.database.read() as connection:
            return stored_specs.read(connection)

    def stored_spec(self, name: str) -> StoredSpec | None:
        """Return the document of one pipeline, or None if it has a file or does not exist."""
        with self.database.read() as connection:
            found = stored_specs.read(connection, name)
        return found[0] if found else None

    def add_stored_spec(self, name: str, document: str) -> bool:
        """Store a new pipeline's document; return False if the name is taken."""
        with self.database.write() as connection:
            return stored_specs.add(connection, name, document)

    def replace_stored_spec(self, name: str, version: int, document: str) -> bool:
        """Replace this version of a document; return False if it has been changed meanwhile."""
        with self.database.write() as connection:
            return stored_specs.replace(connection, name, version, document)

    def remove_stored_spec(self, name: str) -> bool:
        """Delete a document only, as when a file has the same name; return False if there is none."""
        with self.database.write() as connection:
            return stored_specs.remove(connection, name)

    def remove_pipeline(self, name: str) -> str | None:
        """Delete a pipeline's document and state: positions, checkpoints, dead letters, and so on.

        Its slot and publication in the source are kept, and so are the files of its journal, which are
        in the directory of the returned uid. Return None if the pipeline was never registered.

        Raises:
            NotAllowed: A run holds the lease.
        """
        with self.database.write() as connection:
            return stored_specs.remove_pipeline(connection, name)
