"""Changes of a table's columns by chance, in the words of each database."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tests.oracle.columns import Columns, ColumnType
from tests.oracle.scenario import Plain


@dataclass(frozen=True, slots=True)
class Definition:
    """Statements that change a table, and the session in which they are run.

    Attributes:
        statements: In order.
        session: Settings of the session.
        together: Whether they may be in one transaction, also with changes of rows.
    """

    statements: tuple[Plain, ...]
    session: tuple[str, ...] = ()
    together: bool = True


class Words(Protocol):
    """How a database says what is done to columns."""

    def types(self, version: str) -> Sequence[ColumnType]:
        """Return the types that a server has."""
        ...

    def default(self, chance: random.Random, literal: str) -> str:
        """Return what gives a new column a value in older rows."""
        ...

    def place(self, chance: random.Random, columns: Columns, name: str) -> str:
        """Return where a new column stands."""
        ...

    def renamed(
        self, chance: random.Random, version: str, names: tuple[str, str], type_: str
    ) -> str:
        """Return the action that gives a column another name."""
        ...

    def swapped(
        self, chance: random.Random, version: str, first: tuple[str, str], second: tuple[str, str]
    ) -> Sequence[Sequence[str]]:
        """Return the actions, by statement, that swap the names of two columns, given with their types."""
        ...

    def retyped(self, name: str, type_: str) -> str:
        """Return the action that gives a column another type."""
        ...


@dataclass(slots=True)
class Editor:
    """A change of a table that is being made.

    Attributes:
        chance: Where choices come from.
        columns: The table, to which the change is applied.
        version: The server's.
        words: Those of the database.
    """

    chance: random.Random
    columns: Columns
    version: str
    words: Words

    def statement(self, actions: Sequence[str], *changes: tuple[str, str]) -> Plain:
        """Return one statement."""
        return Plain(f"ALTER TABLE {self.columns.table} {', '.join(actions)}", changes)

    def any_column(self) -> str:
        """Return a column that may change."""
        return self.chance.choice(list(self.columns.types))

    def added(self, name: str, type_: ColumnType, default: str = "", what: str = "add") -> Plain:
        """Add a column."""
        self.columns.types[name] = type_
        place = self.words.place(self.chance, self.columns, name)
        return self.statement([f"ADD COLUMN {name} {type_.sql}{default}{place}"], (what, name))

    def any_type(self) -> ColumnType:
        """Return a type."""
        return self.chance.choice(self.words.types(self.version))


def _add(editor: Editor) -> list[Plain]:
    return [editor.added(editor.columns.new_name(editor.chance), editor.any_type())]


def _add_default(editor: Editor) -> list[Plain]:
    type_ = editor.any_type()
    default = editor.words.default(editor.chance, editor.chance.choice(type_.literals))
    name = editor.columns.new_name(editor.chance)
    return [editor.added(name, type_, default, "add-default")]


def _drop(editor: Editor) -> list[Plain]:
    name = editor.any_column()
    editor.columns.drop(name)
    return [editor.statement([f"DROP COLUMN {name}"], ("drop", name))]


def _drop_and_add(editor: Editor) -> list[Plain]:
    name = editor.any_column()
    type_ = editor.columns.types[name] if editor.chance.random() < 0.5 else editor.any_type()
    editor.columns.drop(name)
    dropped = editor.statement([f"DROP COLUMN {name}"], ("drop", name))
    return [dropped, editor.added(name, type_)]


def _rename(editor: Editor) -> list[Plain]:
    return [_renamed(editor, editor.any_column(), editor.columns.new_name(editor.chance))]


def _renamed(editor: Editor, old: str, new: str) -> Plain:
    type_ = editor.columns.types[old]
    editor.columns.rename(old, new)
    action = editor.words.renamed(editor.chance, editor.version, (old, new), type_.sql)
    return editor.statement([action], ("renamed-from", old), ("renamed-to", new))


def _swap(editor: Editor) -> list[Plain]:
    types = editor.columns.types
    if len(types) < 2:
        return _add(editor)
    first, second = editor.chance.sample(list(types), 2)
    statements = editor.words.swapped(
        editor.chance, editor.version, (first, types[first].sql), (second, types[second].sql)
    )
    types[first], types[second] = types[second], types[first]
    return [editor.statement(one, ("swap", first), ("swap", second)) for one in statements]


def _take(editor: Editor) -> list[Plain]:
    """Give a column the name of one that is dropped."""
    dropped = _drop(editor)
    if not editor.columns.types:
        return dropped
    ((_, name),) = dropped[0].changes
    return [*dropped, _renamed(editor, editor.any_column(), name)]


def _retype(editor: Editor) -> list[Plain]:
    name = editor.any_column()
    old = editor.columns.types[name]
    new = editor.chance.choice(old.wider or (old.sql,))
    of_name = [one for one in editor.words.types(editor.version) if one.sql == new]
    editor.columns.types[name] = of_name[0] if of_name else old
    return [editor.statement([editor.words.retyped(name, new)], ("type", name))]


def _default(editor: Editor) -> list[Plain]:
    name = editor.any_column()
    value = editor.columns.literal(editor.chance, name)
    return [editor.statement([f"ALTER COLUMN {name} SET DEFAULT {value}"], ("default", name))]


ACTIONS: Mapping[str, Callable[[Editor], list[Plain]]] = {
    "add": _add,
    "add-default": _add_default,
    "drop": _drop,
    "drop-add": _drop_and_add,
    "rename": _rename,
    "swap": _swap,
    "take": _take,
    "type": _retype,
    "default": _default,
}
"""What can be done to columns in every database."""

WEIGHTS = {"add": 2, "add-default": 3, "drop": 1, "drop-add": 2, "rename": 2, "swap": 1, "take": 1, "type": 1, "default": 1}  # fmt: skip
"""How often."""


def usual(editor: Editor) -> tuple[Plain, ...]:
    """Return one of `ACTIONS`, applied to the table."""
    what = editor.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    return tuple(ACTIONS[what if editor.columns.types else "add"](editor))
