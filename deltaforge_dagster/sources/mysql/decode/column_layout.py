"""Columns laid out in integer arrays, as the kernels read them (`layout`)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from deltaforge_dagster.sources.mysql.decode.layout import COLUMN_WIDTH
from deltaforge_dagster.sources.mysql.values.charset_tables import code_points
from deltaforge_dagster.sources.mysql.values.charsets import Charset
from deltaforge_dagster.sources.mysql.values.types import ENUM, SET, MysqlValueType


class ColumnLayout:
    """The columns of any number of tables; one is never altered.

    Attributes:
        columns: A line per column (`layout.COLUMN_*`).
        labels: Where in `names` the labels of ENUMs and SETs start and end.
        names: `"name":` of every column, and every label, as JSON text.
        characters: Tables of the character sets in use (`charset_tables.code_points`).
    """

    def __init__(self) -> None:
        self.columns = np.empty((0, COLUMN_WIDTH), np.int64)
        self.labels = np.empty((0, 2), np.int64)
        self.names = np.empty(0, np.uint8)
        self.characters = np.empty(0, np.uint16)
        self._tables: dict[str, int] = {}

    def add(self, name: str, type_: MysqlValueType, labels: Sequence[str], *, is_key: bool) -> int:
        """Lay out a column; return the bytes that it adds to a row's JSON (`MysqlValueType.room`)."""
        start, end = self._add_text(json.dumps(name, ensure_ascii=False) + ":")
        first, second = type_.first, type_.second
        room = end - start + 1 + type_.room
        if type_.kind in (ENUM, SET):
            first, second = len(self.labels), len(labels)
            room += self._add_labels(labels)
        if type_.charset is not None:
            first = self._add_characters(type_.charset)
        self._add_line(type_, is_key, start, end, first, second)
        return room

    def add_skipped(self, type_: MysqlValueType) -> None:
        """Lay out a column whose values are passed over."""
        self._add_line(type_, False, 0, 0, 0, 0)

    def _add_line(self, type_: MysqlValueType, *fields: int) -> None:
        line = [type_.kind, type_.size, type_.prefix, *fields]
        self.columns = np.vstack([self.columns, np.array([line], np.int64)])

    def _add_text(self, text: str) -> tuple[int, int]:
        encoded = text.encode()
        start = self.names.size
        self.names = np.concatenate([self.names, np.frombuffer(encoded, np.uint8)])
        return start, start + len(encoded)

    def _add_labels(self, labels: Sequence[str]) -> int:
        """Lay out labels, without quotes; return how many bytes they have together."""
        lines = [self._add_text(json.dumps(label, ensure_ascii=False)[1:-1]) for label in labels]
        self.labels = np.vstack([self.labels, np.array(lines, np.int64).reshape(-1, 2)])
        return sum(end - start + 1 for start, end in lines)

    def _add_characters(self, charset: Charset) -> int:
        """Lay out the table of a character set, if it is not yet; return where it starts."""
        if charset.name not in self._tables:
            self._tables[charset.name] = self.characters.size
            self.characters = np.concatenate([self.characters, code_points(charset)])
        return self._tables[charset.name]
