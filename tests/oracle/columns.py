"""Types with values to try, and the columns of a table as they become."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A type with values to try.

    Attributes:
        sql: How a column is declared.
        literals: Values, as SQL.
        wider: Types to which it may be changed.
        far: Literals that ClickHouse cannot hold, for tables that have them.
    """

    sql: str
    literals: tuple[str, ...]
    wider: tuple[str, ...] = ()
    far: tuple[str, ...] = ()


@dataclass(slots=True)
class Columns:
    """What the generator believes of a table.

    Attributes:
        table: Its name.
        key: The names of the key's columns.
        types: The types of the other columns that may change, by name.
        far: Whether the table has values of all times.
        dropped: Names that the table had once.
    """

    table: str
    key: tuple[str, ...]
    types: dict[str, ColumnType]
    far: bool
    dropped: list[str] = field(default_factory=list)
    made: int = 0

    def new_name(self, chance: random.Random) -> str:
        """Return a name for a new column: often one that the table had before."""
        free = [name for name in self.dropped if name not in self.types]
        if free and chance.random() < 0.6:
            return chance.choice(free)
        self.made += 1
        return f"n{self.made}"

    def literal(self, chance: random.Random, name: str) -> str:
        """Return a value for a column."""
        if chance.random() < 0.15:
            return "NULL"
        type_ = self.types[name]
        return chance.choice(type_.literals + (type_.far if self.far else ()))

    def drop(self, name: str) -> None:
        """Forget a column."""
        del self.types[name]
        self.dropped.append(name)

    def rename(self, old: str, new: str) -> None:
        """Give a column another name."""
        self.types[new] = self.types.pop(old)
        self.dropped.append(old)
