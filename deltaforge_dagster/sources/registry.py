"""The kinds of sources: the interface that describes a kind, and the registry that finds all kinds.

A kind is one object, a `SourceType`. Pipeline files, plans, messages, stored positions, assets and
commands use it, so none of them names a kind. Ours are listed below. An installed package adds one
with an entry point (Python Packaging User Guide, "Entry points specification")::

    [project.entry-points."deltaforge.sources"]
    jsonl = "jsonl_source:JSONL"

The name is the `type` in pipeline files and `SourceType.name` of the object. Everything that loads
a pipeline file loads every kind, Dagster's code servers included. So the module with the object
imports neither a client library nor kernels nor Arrow; the methods that need them import them.
"""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from deltaforge_dagster.config.engine import Engine, ValueOptions
from deltaforge_dagster.config.owned import OwnedResource
from deltaforge_dagster.config.sources import DECLARED, SourceBlock, SourceConfig
from deltaforge_dagster.errors import CorruptLog, NotAllowed
from deltaforge_dagster.kinds import Kinds, find_kinds
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.value_types import TEXT, ValueType
from deltaforge_dagster.tables import Column

if TYPE_CHECKING:  # they need Arrow, which code servers do without
    import pyarrow as pa

    from deltaforge_dagster.sources.base import Source
    from deltaforge_dagster.sources.snapshot import ReadView

GROUP = "deltaforge.sources"
"""The group of the entry points."""

_BUILT_IN = {
    "postgres": "deltaforge_dagster.sources.postgres.source_type:POSTGRES",
    "mysql": "deltaforge_dagster.sources.mysql.source_type:MYSQL",
    "turso": "deltaforge_dagster.sources.turso.source_type:TURSO",
}
"""In the order in which errors and the reference list them."""

_Config = TypeVar("_Config", bound=SourceConfig)


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source needs to know about its surroundings.

    Attributes:
        pipeline: Name of the pipeline, under which servers list our sessions.
        engine: `spec.engine` of the pipeline file, with the formats of values and the column rules.
        keeps_rows: Whether a sink keeps the rows of tables, so that it needs the values of all
            columns of an insert.
    """

    pipeline: str
    engine: Engine
    keeps_rows: bool = False


@dataclass(frozen=True, slots=True)
class PositionField:
    """A field of the event's `source` block that says where in the log a change is.

    Snapshot rows do not have it.

    Attributes:
        name: The field's name; templates can use those in `config.templates.SOURCE_FIELDS`.
        column: The column of the change frame that holds it; None for a constant.
        form: How it is written. `string`: a JSON string; `plain`: the same, of text that needs no
            escaping; `json`: text that is JSON already; `number`; `quoted number`: a number as a
            JSON string; `lsn`: a number as the JSON string `X/XXXXXXXX`, hexadecimal.
        constant: The JSON text of a field that is the same in every event.
    """

    name: str
    column: Literal["file", "pos", "row", "tx_id"] | None = None
    form: Literal["string", "plain", "json", "number", "quoted number", "lsn"] = "string"
    constant: str | None = None


class SourceType(ABC, Generic[_Config]):
    """A kind of source.

    Attributes:
        name: The `type` in pipeline files.
        title: The name of the database, for people: `PostgreSQL`.
        summary: A sentence about the kind, for the JSON Schema and the reference.
        config: Model of the `config` block. The name of the class ends in `SourceConfig`; the first
            line of its docstring is the description of the block.
        sample: The fields with which a new component of a Dagster project begins; `NAME` stands for
            the pipeline's.
        connector: `source.connector` of its events.
        position_example: How a position is written in a pipeline file, for errors; empty if nobody
            writes one.
        outbox: Field of `config.outbox` that selects the outboxes; None for a kind without
            outboxes.
        timing: Fields of `config` that affect only when something happens. A change of one of them
            does not make Dagster show captured ranges as stale.
        marks_unchanged: Whether images have `{"_unchanged":true}` in place of values that the log
            lacks; for other kinds that is a value like any other.
        retains_log: Whether the server retains its log for a pipeline until that confirms it.
        consequences: What `deltaforge plan` says when a field of `config` changes, by the field's
            name.
        second_digits: Decimals of the seconds in a type for times that does not say how many:
            `datetime`, `datetime(3)`.
    """

    name: str
    title: str
    summary: str
    config: type[_Config]
    connector: str
    sample: Mapping[str, Any] = {}
    position_example: str = ""
    outbox: str | None = None
    timing: frozenset[str] = frozenset()
    marks_unchanged: bool = False
    retains_log: bool = False
    consequences: Mapping[str, str] = {}
    second_digits: int = 6

    @abstractmethod
    def build(self, config: _Config, context: SourceContext) -> Source:
        """Return a source, without connecting to the server.

        Raises:
            SpecError: The configuration cannot work.
        """

    @abstractmethod
    def position(self, fields: Mapping[str, Any]) -> Position | None:
        """Parse the JSON object that a position's `to_json` wrote; return None for another kind's.

        The state store does not record the kind of a position, so every kind is asked, the built-in
        ones last. A kind must recognize its positions by a field that no other kind uses, such as
        one named after the kind.

        Raises:
            ValueError, KeyError, TypeError, CorruptLog: The position is of this kind, but invalid.
        """

    def position_fields(self, config: _Config) -> tuple[PositionField, ...]:  # noqa: ARG002
        """Return the fields, in order, of an event's `source` block that locate it in the log."""
        return ()

    def read_view(self, fields: Mapping[str, Any]) -> ReadView | None:  # noqa: ARG002
        """Parse the JSON object that a read view's `to_json` wrote; return None for another kind's.

        Only kinds with snapshots implement it. Kinds are recognized as in `position`.
        """
        return None

    def value_type(self, column: Column, options: ValueOptions) -> ValueType:  # noqa: ARG002
        """Return what the values of a table version's column are, for destinations with types.

        `options` is `spec.engine.values` of the file. Text holds every value, and is right for
        types that have no other, or of which the version does not say enough.
        """
        return TEXT

    def position_at(self, number: int) -> Position | None:  # noqa: ARG002
        """Return the position for a chaser file's number; None if positions are not numbers."""
        return None

    def position_number(self, position: Position) -> int | None:  # noqa: ARG002
        """Return a number below 2**64 that grows with a server's positions; None if it has none."""
        return None

    def imported(self, position: Position) -> Position:
        """Return where to start for a position imported from DeltaForge.

        Such a position may be inside a transaction.
        """
        return position

    def place(self, file: str | None, pos: int | None) -> str:
        """Format a place in the log for people from `file` and `pos` of the change frame."""
        return f"{pos}" if file is None else f"{file}:{pos}"

    def rows_until(self, rows: pa.RecordBatch, end: Position) -> int:
        """Return how many of these rows, which are in log order, belong to the log up to `end`.

        Only kinds whose log can be read again (`Source.read_again`) implement it.

        Args:
            rows: Captured changes.
            end: The end of a captured segment.
        """
        del rows, end
        raise NotAllowed(f"the log of {self.title} cannot be captured again")

    def table_variables(self, pattern: str) -> Mapping[str, str]:
        """Return the template variables that a pattern of `tables` determines.

        Values may contain the wildcards.
        """
        return {"source.table": pattern}

    def names(self, config: _Config, pipeline: str) -> Mapping[str, Any]:  # noqa: ARG002
        """Return the names of what the source creates or uses on the server, by what each is.

        An example is a slot.
        """
        return {}

    def kept_log(self, config: _Config, size: int | None) -> str | None:  # noqa: ARG002
        """Return what the server keeps for an idle pipeline, as a clause; None if it keeps nothing.

        `size` is the number of bytes when it was last measured, None if unknown.
        """
        return None

    def masked(self, config: _Config) -> bool:  # noqa: ARG002
        """Return whether a config that was stored has a mask in place of its secret."""
        return False

    def with_secret(self, config: _Config, secret: str | None) -> _Config:  # noqa: ARG002
        """Return a stored config whose secret was masked, with `secret` in place of the mask.

        With None it has no secret; the client library may then find one elsewhere.
        """
        return config

    def database_place(self, config: _Config) -> tuple[str, ...]:
        """Return what identifies the database, without user and password (`config.owned`)."""
        return (self.name, config.id)

    def owned(self, config: _Config) -> Sequence[OwnedResource]:  # noqa: ARG002
        """Return what the source uses on the server and cannot share with another pipeline."""
        return ()

    def warnings(self, config: Mapping[str, Any]) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return (field, text) for each part of a `config` block that will be ignored.

        The block is given as it is in the file. It may be invalid; the model reports that.
        """
        return []

    def dagster_kind(self) -> str:
        """Return the Dagster kind of the source's assets; Dagster has icons for known kinds."""
        return self.name

    def warm(self) -> None:
        """Compile the kernels that read the log, if there are any, or load them from the cache."""

    def warm_snapshots(self) -> None:
        """Compile the kernels that read snapshots, if any, or load them from the cache."""


def source_types() -> Mapping[str, SourceType[Any]]:
    """Return the usable kinds by name: built-in ones, then those of installed packages."""
    return _kinds().types


def source_blocks() -> tuple[type[BaseModel], ...]:
    """Return the models of a pipeline file's source block (`type` and `config`), one per kind."""
    return _kinds().blocks


def broken_source_types() -> Mapping[str, str]:
    """Return the kinds of installed packages that cannot be used, by name.

    Each has a reason that names the package.
    """
    return _kinds().broken


@functools.cache
def _kinds() -> Kinds[SourceType[Any]]:
    return find_kinds(GROUP, _BUILT_IN, SourceType, SourceBlock, _check)


def _check(kind: SourceType[Any]) -> None:
    missing = [name for name in DECLARED if name not in kind.config.model_fields]
    if missing:
        raise TypeError(f"{kind.config.__name__} does not declare {', '.join(missing)}")


def no_chaser() -> str:
    """Return the error for a chaser file given to a source whose positions are not numbers."""
    titles = [kind.title for kind in source_types().values() if kind.position_at(0) is not None]
    return (
        f"a chaser file holds one number, which is a position of {' and '.join(titles)} only "
        "(use type position)"
    )


def parse_read_view(text: str) -> ReadView:
    """Parse the read view that `ReadView.to_json` wrote, whatever its kind.

    Raises:
        CorruptLog: The text is not a read view.
    """
    try:
        fields = json.loads(text)
        candidates = (kind.read_view(fields) for kind in reversed(tuple(source_types().values())))
        view: ReadView = next(candidate for candidate in candidates if candidate is not None)
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise CorruptLog("not what a snapshot's read saw") from error
    return view


def parse_position(text: str) -> Position:
    """Parse the position that `Position.to_json` wrote, whatever its kind.

    Raises:
        CorruptLog: The text is not a position that this version knows.
    """
    return identify_position(text)[1]


def identify_position(text: str) -> tuple[SourceType[Any], Position]:
    """Parse the position that `Position.to_json` wrote; return its kind of source and the position.

    Raises:
        CorruptLog: The text is not a position that this version knows.
    """
    try:
        fields = json.loads(text)
        # The built-in kinds last, as `SourceType.position` says.
        for kind in reversed(tuple(source_types().values())):
            position = kind.position(fields)
            if position is not None:
                return kind, position
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptLog(f"not a position: {text[:80]!r}") from error
    raise CorruptLog(f"not a position: {text[:80]!r}")
