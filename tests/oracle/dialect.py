"""What the generator asks a kind of database for."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from tests.oracle.columns import Columns, ColumnType
from tests.oracle.definitions import Definition
from tests.oracle.scenario import Plain


class Dialect(Protocol):
    """What a kind of database can do."""

    def types(self, version: str) -> Sequence[ColumnType]:
        """Return the types that a server has."""
        ...

    def keys(self, version: str) -> Sequence[ColumnType]:
        """Return types of keys, whose literals may be equal in another spelling."""
        ...

    def settings(self, chance: random.Random, version: str) -> Mapping[str, str]:
        """Return global variables of the server."""
        ...

    def setup(self, chance: random.Random, table: str) -> Sequence[Plain]:
        """Return what is run right after a table was created."""
        ...

    def options(self, chance: random.Random, version: str) -> str:
        """Return what stands behind the columns of a table."""
        ...

    def session(self, chance: random.Random, version: str) -> tuple[str, ...]:
        """Return settings of a session that changes rows."""
        ...

    def definition(self, chance: random.Random, columns: Columns, version: str) -> Definition:
        """Return a change of the table's columns, and apply it to `columns`."""
        ...

    def noise(self, chance: random.Random, columns: Columns, version: str) -> Definition:
        """Return statements that change no column."""
        ...

    def truncate(self, table: str) -> Plain:
        """Return what empties a table."""
        ...
