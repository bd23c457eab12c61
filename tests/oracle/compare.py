"""What differs between a table of the source and what a reader of a sink sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.oracle.databases import Row, TableState
from tests.oracle.kinds import ABSENT, Kind, Value, in_key
from tests.oracle.known import Excuses
from tests.oracle.sinks import Event, Fields, Readings

Key = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it should be.

    Attributes:
        reader: Who sees it.
        table: The number of the table; None for the whole pipeline.
        what: `missing row`, `further row`, `stale row`, `value`, `held`, `stopped`.
        column: The column of a value.
        kind: The kind of its column.
        says: Both sides.
    """

    reader: str
    table: int | None
    what: str
    says: str
    column: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Image:
    """A row as it was when it was last changed.

    Attributes:
        row: Its values.
        kinds: The kinds of its columns at that time.
    """

    row: Row
    kinds: Mapping[str, Kind]


@dataclass(slots=True)
class Images:
    """The rows of a table as messages have them: each as its last change left it, whatever definitions came later.

    A change shows by the column `rev`, which every INSERT and UPDATE sets anew.
    """

    images: dict[Key, Image] = field(default_factory=dict)

    def observe(self, state: TableState) -> None:
        """Take what a transaction has left."""
        seen: dict[Key, Image] = {}
        for row in state.rows:
            key = state.key_of(row)
            old = self.images.get(key)
            is_same = old is not None and old.row.get("rev") == row.get("rev")
            seen[key] = old if is_same and old is not None else Image(row, state.kinds)
        self.images = seen


@dataclass(frozen=True, slots=True)
class Comparison:
    """A table of the source beside what one reader of a sink has of it.

    Attributes:
        reader: Who that is.
        table: The table's number.
        state: What the source has.
        excuses: What may differ.
    """

    reader: str
    table: int
    state: TableState
    excuses: Excuses

    def of_rows(self, readings: Readings) -> Iterator[Difference]:
        """Compare current rows in every column that the source has."""
        kinds = self.state.kinds
        # A column comes with the first change of a row behind its definition; until then its rows have null.
        rows = [
            {name: readings.form(kind, row.get(name)) for name, kind in kinds.items()}
            for row in readings.rows
        ]
        seen: dict[Key, Row] = {}
        for row in rows:
            key = self.state.key_of(row)
            if key in seen:
                yield self._difference("further row", f"{key} is there twice")
            seen[key] = row
        expected = {self.state.key_of(row): Image(row, kinds) for row in self.state.rows}
        yield from self._of_images(expected, seen, frozenset())

    def of_changes(
        self, readings: Readings, images: Images, left_out: frozenset[str]
    ) -> Iterator[Difference]:
        """Compare the rows that changes leave, in the columns that both have.

        Args:
            readings: The changes.
            images: What they must leave.
            left_out: Columns that are not compared, because definitions change them without a change of a row.
        """
        assert readings.events is not None
        key_kinds = {name: self.state.kinds[name] for name in self.state.key}

        def key_of(*sides: Fields | None) -> Key:
            """Return the key that the first side has, or the next one where that lacks a part."""
            whole: dict[str, Any] = {}
            for side in reversed(sides):
                whole |= {
                    name: value
                    for name, value in (side or {}).items()
                    if name in key_kinds and value not in (None, "null", ABSENT)
                }
            return tuple(
                in_key(readings.form(kind, whole.get(name))) for name, kind in key_kinds.items()
            )

        seen: dict[Key, Row] = {}
        for key, row in fold(readings.events, key_of).items():
            kinds = images.images[key].kinds if key in images.images else {}
            seen[key] = {
                name: readings.form(kinds[name], value)
                for name, value in row.items()
                if name in kinds
            }
        yield from self._of_images(images.images, seen, left_out)

    def _of_images(
        self, expected: Mapping[Key, Image], seen: Mapping[Key, Row], left_out: frozenset[str]
    ) -> Iterator[Difference]:
        for key in expected.keys() - seen.keys():
            yield self._difference("missing row", f"{key} is in the source only")
        for key in seen.keys() - expected.keys():
            yield self._difference("further row", f"{key} is in the sink only")
        for key in expected.keys() & seen.keys():
            image, row = expected[key], seen[key]
            if image.row["rev"] != row.get("rev"):
                says = f"row {key}: source has change {image.row['rev']}, sink {row.get('rev')}"
                yield self._difference("stale row", says)
                continue
            for name in image.row.keys() & row.keys() - left_out:
                kind, wanted, found = image.kinds[name], image.row[name], row[name]
                if _equal(wanted, found) or self.excuses.allow(self.reader, kind, wanted, found):
                    continue
                says = f"row {key}: source {_shown(wanted)}, sink {_shown(found)}"
                yield replace(self._difference("value", says), column=name, kind=kind.name)

    def _difference(self, what: str, says: str) -> Difference:
        return Difference(self.reader, self.table, what, says)


def fold(events: Sequence[Event], key_of: Callable[..., Key]) -> dict[Key, dict[str, Any]]:
    """Return the current rows after all changes.

    Args:
        events: The changes, in order.
        key_of: Returns the key that the first of several images has.
    """
    rows: dict[Key, dict[str, Any]] = {}
    for event in events:
        if event.op == "t":
            rows.clear()
        elif event.op == "d":
            rows.pop(key_of(event.before), None)
        else:
            old = key_of(event.before, event.after)
            new = key_of(event.after, event.before)
            row = rows.pop(old, {}) if event.op == "u" else {}
            after = event.after or {}
            rows[new] = row | {name: one for name, one in after.items() if one is not ABSENT}
    return rows


def _equal(wanted: Value, found: Value) -> bool:
    """Return whether values are the same, and of the same type: 1 is not true."""
    return bool(wanted == found) and isinstance(wanted, bool) == isinstance(found, bool)


def _shown(value: Value) -> str:
    text = repr(value)
    return text if len(text) < 100 else f"{text[:60]}... ({len(text)})"
