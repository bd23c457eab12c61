"""TABLE_MAP events: descriptions of tables, which the log has before each group of changes.

MySQL internals documentation, "TABLE_MAP_EVENT"; the optional metadata are those of
`Table_map_event::Optional_metadata_field_type` in the server's `rows_event.h`::

    Int48 table id | Int16 flags | Int8 size, database, 0 | Int8 size, table, 0
    | packed columns | Byte1 type per column | packed size | metadata of the types (`types`)
    | bitmap: 1 for columns that may be null | optional metadata

    optional metadata: Int8 type | packed size | content
       1 SIGNEDNESS           bit per number column, highest first: 1 unsigned
       2 DEFAULT_CHARSET      packed collation | (packed index among text columns, collation) ...
       3 COLUMN_CHARSET       packed collation per text column
       4 COLUMN_NAME          packed size, name; per column            (binlog_row_metadata=FULL)
       5 SET_STR_VALUE        packed number, (packed size, label) ...; per SET column      (FULL)
       6 ENUM_STR_VALUE       the same for ENUM columns                                    (FULL)
       8 SIMPLE_PRIMARY_KEY   packed index of column ...                                   (FULL)
       9 PRIMARY_KEY_WITH_PREFIX  (packed index of column, packed length) ...              (FULL)
      10, 11                  as 2 and 3, for ENUM and SET columns                         (FULL)
       7 GEOMETRY_TYPE, 12 COLUMN_VISIBILITY, 13 VECTOR_DIMENSIONALITY: not needed

Without FULL, names, labels and key come from the catalog. Which columns 1, 2 and 3 count depends on
the server::

    number column    integers, DECIMAL, FLOAT, DOUBLE; and YEAR, except in MySQL 8.0.15 and older
    text column      CHAR, VARCHAR, TEXT and their binary counterparts; MySQL's VECTOR;
                     MariaDB's GEOMETRY
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.sources.mysql.events.binlog import FieldReader, LogServer
from deltaforge_dagster.sources.mysql.values.charsets import CHARSETS
from deltaforge_dagster.sources.mysql.values.types import (
    LogType,
    is_type_code,
    log_type,
    metadata_size,
)

MAX_COLUMNS = 4096
"""The most columns that MySQL allows in a table."""

ID_SIZE = 6
"""Bytes of the table id at the start of the event's body."""


@dataclass(frozen=True, slots=True)
class ColumnDefault:
    """A constant default of a column, as a client reads it; None is NULL."""

    text: str | None


@dataclass(frozen=True, slots=True)
class CatalogColumn:
    """A column as the catalog describes it.

    Attributes:
        name: Its name.
        labels: The labels of an ENUM or SET, in order.
        type: As in `information_schema.columns.column_type`; "" if the description is from the log.
        charset: Character set of a text, `binary` for bytes; "" if unknown.
        default: Its default; None if it is not a constant, or unknown.
    """

    name: str
    labels: tuple[str, ...] = ()
    type: str = ""
    charset: str = ""
    default: ColumnDefault | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table's columns and primary key, which the log lacks without `binlog_row_metadata=FULL`.

    Attributes:
        columns: In their order.
        primary_key: Names of its columns.
        charset: The character set of new text columns whose definition names none; "" if it is not
            known.
    """

    columns: tuple[CatalogColumn, ...]
    primary_key: tuple[str, ...]
    charset: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Says that a table's columns are not known for certain; `reason` says why, and what to do."""

    reason: str


@dataclass(slots=True)
class TableMap:
    """A TABLE_MAP event.

    Attributes:
        db, table: Names.
        types, nullable: By column.
        unsigned: By column; None for a number whose signedness the log does not say.
        collations: By column; None if the column has none, or the log does not say it.
        described: Names, labels and key; None if the log does not have them.
    """

    db: str
    table: str
    types: list[LogType]
    nullable: list[bool]
    unsigned: list[bool | None] = field(default_factory=list)
    collations: list[int | None] = field(default_factory=list)
    described: CatalogTable | None = None

    def text_collations(self) -> list[int | None]:
        """Return the collations of the text columns."""
        pairs = zip(self.types, self.collations, strict=True)
        return [collation for type_, collation in pairs if type_.is_text]


class _TableMapReader(FieldReader):
    """Reads the fields of a TABLE_MAP event one after another."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content, "a TABLE_MAP event")

    def text(self) -> bytes:
        return self.read(self.packed())

    def name(self) -> str:
        name = self.read(self.number(1)).decode(errors="replace")
        self.read(1)
        return name

    def rest(self) -> Iterator[int]:
        while self:
            yield self.packed()


def parse_table_map(content: bytes, server: LogServer) -> TableMap:
    """Parse the body of a TABLE_MAP event, which begins with the table id.

    Args:
        content: The body.
        server: The server that wrote it.

    Raises:
        CorruptLog: The bytes do not follow the format.
        UnsupportedEvent: A column has an unknown type, or labels in an unknown character set.
    """
    reader = _TableMapReader(content)
    reader.read(ID_SIZE + 2)
    db, table = reader.name(), reader.name()
    count = reader.packed()
    if not 0 < count <= MAX_COLUMNS:
        raise CorruptLog(f"a TABLE_MAP event of {db}.{table} with {count} columns")
    codes = reader.read(count)
    if unknown := sorted({code for code in codes if not is_type_code(code)}):
        raise UnsupportedEvent(f"table {db}.{table} has types that are not known: {unknown}")
    metadata = _TableMapReader(reader.text())
    types = [log_type(code, metadata.read(metadata_size(code))) for code in codes]
    if metadata:
        raise CorruptLog(f"a TABLE_MAP event of {db}.{table} with more metadata than types")
    null_bits = reader.read((count + 7) // 8)
    nullable = [bool(null_bits[i >> 3] >> (i & 7) & 1) for i in range(count)]
    fields: dict[int, bytes] = {}
    while reader:
        kind = reader.number(1)
        fields[kind] = reader.text()
    table_map = TableMap(db, table, types, nullable)
    table_map.unsigned = _unsigned(types, fields.get(1), server)
    table_map.collations = _collations(
        types,
        lambda t: t.has_collation or (server.is_mariadb and t.is_geometry),
        fields.get(2),
        fields.get(3),
    )
    if 4 in fields:
        table_map.described = _described(types, fields)
    return table_map


_NEWEST_WITHOUT_YEAR, _OLDEST_WITH_YEAR = (8, 0, 15), (8, 0, 23)
"""Versions of MySQL. Up to the first one, SIGNEDNESS has no bit for YEAR columns; from the second
one on it has. For those between, it is not known."""


def _unsigned(types: list[LogType], bits: bytes | None, server: LogServer) -> list[bool | None]:
    """Return which columns are unsigned.

    None for a number if the event has no SIGNEDNESS, or if the sign depends on whether the server
    counts YEAR columns, which is not known.
    """
    unsigned: list[bool | None] = [None if t.is_number else False for t in types]
    if bits is None:
        return unsigned
    without_years = [i for i, t in enumerate(types) if t.is_number]
    with_years = [i for i, t in enumerate(types) if t.is_number or t.is_year]
    if server.is_mariadb or server.version >= _OLDEST_WITH_YEAR:
        countings = [with_years]
    elif (0, 0, 0) < server.version <= _NEWEST_WITHOUT_YEAR:
        countings = [without_years]
    else:
        countings = [without_years, with_years]
    countings = [counted for counted in countings if len(bits) == (len(counted) + 7) // 8]
    if not countings:
        raise CorruptLog("a TABLE_MAP event whose SIGNEDNESS does not fit its columns")
    for column in without_years:
        indexes = [counted.index(column) for counted in countings]
        signs = {bool(bits[index >> 3] << (index & 7) & 0x80) for index in indexes}
        unsigned[column] = signs.pop() if len(signs) == 1 else None
    return unsigned


def _collations(
    types: list[LogType],
    concerns: Callable[[LogType], bool],
    default: bytes | None,
    each: bytes | None,
) -> list[int | None]:
    collations: list[int | None] = [None] * len(types)
    concerned = [i for i, t in enumerate(types) if concerns(t)]
    if each is not None:
        numbers = list(_TableMapReader(each).rest())
        if len(numbers) != len(concerned):
            raise CorruptLog("a TABLE_MAP event whose collations do not fit its columns")
        for column, number in zip(concerned, numbers, strict=True):
            collations[column] = number
    elif default is not None:
        reader = _TableMapReader(default)
        number = reader.packed()
        for column in concerned:
            collations[column] = number
        while reader:
            index = reader.packed()
            if index >= len(concerned):
                raise CorruptLog("a TABLE_MAP event whose collations do not fit its columns")
            collations[concerned[index]] = reader.packed()
    return collations


def _described(types: list[LogType], fields: dict[int, bytes]) -> CatalogTable:
    """Return names, labels and key from FULL metadata, with labels in their own character sets."""
    names_of = _TableMapReader(fields[4])
    names = [names_of.text().decode(errors="replace") for _ in types]
    collations = _collations(types, lambda t: t.has_labels, fields.get(10), fields.get(11))
    sets, enums = _TableMapReader(fields.get(5, b"")), _TableMapReader(fields.get(6, b""))
    columns = []
    for name, type_, collation in zip(names, types, collations, strict=True):
        labels: tuple[str, ...] = ()
        if type_.has_labels:
            reader = enums if type_.is_enum else sets
            raw = [reader.text() for _ in range(reader.packed())]
            labels = tuple(_label(label, collation, name) for label in raw)
        columns.append(CatalogColumn(name, labels))
    key: list[int] = []
    if 8 in fields:
        key = list(_TableMapReader(fields[8]).rest())
    elif 9 in fields:
        key = list(_TableMapReader(fields[9]).rest())[::2]
    if any(column >= len(types) for column in key):
        raise CorruptLog("a TABLE_MAP event whose key does not fit its columns")
    return CatalogTable(tuple(columns), tuple(names[column] for column in key))


def _label(label: bytes, collation: int | None, column: str) -> str:
    charset = None if collation is None else CHARSETS.get(collation)
    if charset is None:
        raise UnsupportedEvent(f"column {column} has labels in an unknown character set")
    try:
        return charset.decode(label)
    except ValueError as error:
        raise UnsupportedEvent(
            f"column {column} has labels that are not text in {charset.name}"
        ) from error
