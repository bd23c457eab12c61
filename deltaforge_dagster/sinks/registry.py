"""The kinds of sinks: the interface of a kind, and the lookup of all kinds.

A kind is one object: a `MessageSinkType` if its sinks get messages from the run, a
`DatabaseSinkType` if they keep tables in a database, a `LakeSinkType` if Spark writes their tables,
an `ObjectSinkType` if they write object files. The code for pipeline files, plans, checks,
messages, assets and Spark jobs asks this object and never names a kind. The built-in kinds are
listed in `_BUILT_IN`. An installed package adds a kind with an entry point (Python Packaging User
Guide, "Entry points specification")::

    [project.entry-points."deltaforge.sinks"]
    csv = "csv_sink:CSV"

The name is the `type` in pipeline files and `SinkType.name` of the object. Everything that loads a
pipeline file loads every kind, Dagster's code servers included. So the module with the object
imports neither a client library nor kernels; the methods that need them import them.

Below the kinds is what several of them share: texts about changed options, and helpers of
preflights.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from deltaforge_dagster.config.engine import RunLimits
from deltaforge_dagster.config.owned import CapturedTables, OwnedResource
from deltaforge_dagster.config.sinks import MessageSinkConfig, SinkBlock, SinkConfig
from deltaforge_dagster.config.templates import filled
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.kinds import Kinds, find_kinds
from deltaforge_dagster.sinks.tables.config import StagedSinkConfig, TableSinkConfig
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # they need Arrow, which code servers do without
    from deltaforge_dagster.sinks.base import Sink
    from deltaforge_dagster.sinks.lake.dialect import LakeDialect
    from deltaforge_dagster.sinks.tables.comparer import TableComparer
    from deltaforge_dagster.sinks.tables.staged import ObjectForm
    from deltaforge_dagster.sinks.tables.writer import (
        CommitWriter,
        TableOwner,
        TableWriter,
    )
    from deltaforge_dagster.typed_rows.schema import TargetTypes
import os
from collections.abc import Collection
from pathlib import Path

from deltaforge_dagster.sources.findings import listed

GROUP = "deltaforge.sinks"
"""The group of the entry points."""

_BUILT_IN = {
    "redis": "deltaforge_dagster.sinks.redis.sink_type:REDIS",
    "kafka": "deltaforge_dagster.sinks.kafka.sink_type:KAFKA",
    "nats": "deltaforge_dagster.sinks.nats.sink_type:NATS",
    "http": "deltaforge_dagster.sinks.http.sink_type:HTTP",
    "file": "deltaforge_dagster.sinks.file.sink_type:FILE",
    "delta": "deltaforge_dagster.sinks.lake.sink_type:DELTA",
    "iceberg": "deltaforge_dagster.sinks.lake.sink_type:ICEBERG",
    "postgres": "deltaforge_dagster.sinks.postgres.sink_type:POSTGRES",
    "s3": "deltaforge_dagster.sinks.objects.sink_type:S3",
    "clickhouse": "deltaforge_dagster.sinks.clickhouse.sink_type:CLICKHOUSE",
}
"""In the order in which errors and the reference list them."""

_Config = TypeVar("_Config", bound=SinkConfig)
_MessageConfig = TypeVar("_MessageConfig", bound=MessageSinkConfig)
_StagedConfig = TypeVar("_StagedConfig", bound=StagedSinkConfig)
_TableConfig = TypeVar("_TableConfig", bound=TableSinkConfig)

DefaultKey = Literal["event id", "row", "none"]
"""The key of a message whose sink has no `key` in the file, unless a processor has set one: the id
of the event, the primary key of the row (which suits destinations that keep the order of a key), or
no key.
"""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink needs to know about its surroundings.

    Attributes:
        pipeline: Name of the pipeline, or of the Spark job; part of the names that the sink uses on
            servers.
        run: Limits of the runs that send with the sink.
        brief: For a job that ends and of which several may run at once, such as a Spark job or a
            check. It leaves nothing behind for long, and ends no other sender of the same pipeline.
        posted: Whether the pipeline was created by the REST API, and not by a file of the
            installation.
    """

    pipeline: str
    run: RunLimits = field(default_factory=RunLimits)
    brief: bool = False
    posted: bool = False


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """How a kind differs as a Spark data source, whose options are the fields of its config model.

    Attributes:
        without: Fields that are not available as options.
        always_named: Whether the destination is required even if each row has its own.
        tokens: Fields with URLs in which a user name without a password is a token, so a secret.
    """

    without: frozenset[str] = frozenset()
    always_named: bool = False
    tokens: frozenset[str] = frozenset()


class SinkType(ABC, Generic[_Config]):
    """A kind of sink: what all kinds have.

    Attributes:
        name: The `type` in pipeline files.
        summary: A sentence about the kind, for the JSON Schema and the reference.
        config: Model of the `config` block. The name of the class ends in `SinkConfig`; the first
            line of its docstring is the description of the block.
        sample: The fields with which a new component of a Dagster project begins; `NAME` stands for
            the pipeline's.
        destinations: What its destinations are called, in the plural: `topics`.
        where: Fields that decide where changes go. If one changes, `deltaforge plan` says that
            later ones go elsewhere.
        form: Fields that decide what changes look like at the destination. If one changes,
            `deltaforge plan` says that later ones differ.
        consequences: What `deltaforge plan` says if another field changes, by field.
        timing: Fields that decide only when something happens. If one changes, Dagster does not
            show delivered ranges as stale.
    """

    name: str
    summary: str
    config: type[_Config]
    sample: Mapping[str, Any] = {}
    destinations: str = "destinations"
    where: frozenset[str] = frozenset()
    form: frozenset[str] = frozenset()
    consequences: Mapping[str, str] = {}
    timing: frozenset[str] = frozenset()

    @abstractmethod
    def problems(self, config: _Config, context: SinkContext) -> list[str]:
        """Return the errors in a configuration that can be found without connecting."""

    def exactly_once(self, config: _Config) -> bool:  # noqa: ARG002
        """Return whether the sink stores its own position with the changes."""
        return False

    def traffic(self, config: _Config) -> frozenset[str]:  # noqa: ARG002
        """Return which counts of `sinks.base.Traffic` the sink's client can have.

        These are commits, aborts and retries.
        """
        return frozenset()

    def preflight(
        self,
        config: _Config,
        context: SinkContext,  # noqa: ARG002
        names: Sequence[str],  # noqa: ARG002
    ) -> list[Finding]:
        """Return what `deltaforge check` says about a sink; write nothing at the destination.

        Args:
            config: The sink.
            context: Its surroundings, `brief`.
            names: Its destinations, as far as the file determines them; what depends on changes is
                a template.

        Raises:
            DeltaforgeError: What is wrong; shown as an error.
        """
        text = f"only a run shows whether a sink of type {self.name} can deliver"
        return [Finding(f"sink {config.id}", "note", text)]

    def names(self, config: _Config, pipeline: str) -> Mapping[str, str]:  # noqa: ARG002
        """Return the names of other objects that the sink creates or uses on servers, by kind."""
        return {}

    def owned(
        self,
        config: _Config,  # noqa: ARG002
        pipeline: str,  # noqa: ARG002
        tables: CapturedTables,  # noqa: ARG002
    ) -> Sequence[OwnedResource]:
        """Return what the sink writes and cannot share with another pipeline.

        What the file does not determine is left out.
        """
        return ()

    def metadata(self, config: _Config) -> Mapping[str, Any]:  # noqa: ARG002
        """Return metadata of the sink's asset in Dagster beside that of every sink; no secrets."""
        return {}

    def dagster_kind(self) -> str:
        """Return the kind of the sink's asset in Dagster, which has icons for well-known ones."""
        return self.name

    def warm(self) -> None:
        """Compile the sink's kernels, if it has any, or load them from the cache."""


class MessageSinkType(SinkType[_MessageConfig]):
    """A kind of sink that gets messages: the run makes one of each change, and sends them in order.

    Attributes:
        default_key: The message key if the file sets none.
        takes_tombstones: Whether a message may have no value.
        spark: The kind as a Spark data source, `deltaforge_<name>`; None if Spark jobs cannot use
            it.
    """

    default_key: DefaultKey = "event id"
    takes_tombstones: bool = False
    spark: SparkOptions | None = SparkOptions()

    @abstractmethod
    def build(self, config: _MessageConfig, context: SinkContext) -> Sink:
        """Return a sink, not yet open.

        Raises:
            SpecError: The configuration cannot work.
        """

    def problems(self, config: _MessageConfig, context: SinkContext) -> list[str]:
        """Return the errors in a configuration that the client library finds without connecting."""
        self.build(config, context)
        return []

    def tombstones(self, config: _MessageConfig) -> bool:  # noqa: ARG002
        """Return whether a message without a value follows a delete; needs `takes_tombstones`."""
        return False


class TableSinkType(SinkType[_StagedConfig]):
    """A kind of sink whose destinations are tables.

    Spark types and folds the changes of the journal, by table.

    Attributes:
        owns: What a destination is called in the singular.
    """

    owns: str = "table"

    @abstractmethod
    def column_types(self) -> TargetTypes:
        """Return which types the columns of its tables can have."""

    @abstractmethod
    def owned_place(self, config: _StagedConfig) -> tuple[str, ...]:
        """Return what contains the tables, without user and password (`OwnedResource.place`)."""

    def owned(
        self,
        config: _StagedConfig,
        pipeline: str,  # noqa: ARG002
        tables: CapturedTables,
    ) -> Sequence[OwnedResource]:
        """Return each destination that the file determines, and templates that depend on tables.

        Which tables match a wildcard is not known from files. Two pipelines therefore conflict in
        such a template only if both have the same template and capture the same tables of the same
        source.
        """
        location, field = self.owned_place(config), config.destination_field
        template = config.full_destination
        owned = []
        for variables in tables.patterns:
            name = filled(template, config.variables(variables))
            if not any(wildcard in name for wildcard in ("*", "%", "${source.")):
                owned.append(OwnedResource(self.owns, location, name, field))
        of_source = (*location, template, *tables.place)
        what = f"{self.owns} for the source's"
        return owned + [OwnedResource(what, of_source, name, field) for name in tables.names]

    def build_comparer(
        self,
        config: _StagedConfig,
        owner: TableOwner,  # noqa: ARG002
        destination: Sequence[str],  # noqa: ARG002
    ) -> TableComparer:
        """Return what compares a table of a sink with the source, not connected yet.

        Raises:
            NotAllowed: Tables of this kind of sink cannot be compared.
        """
        raise NotAllowed(
            f"the {self.owns}s of sink {config.id} cannot be compared: "
            f"sinks of type {self.name} do not support it"
        )

    def problems(self, config: _StagedConfig, context: SinkContext) -> list[str]:  # noqa: ARG002
        """Return no errors: most config models already find those that need no connection."""
        return []

    def exactly_once(self, config: _StagedConfig) -> bool:  # noqa: ARG002
        """Return True: tables tell which commits they have, and objects keep their names."""
        return True


class DatabaseSinkType(TableSinkType[_TableConfig]):
    """A kind of sink whose tables are in a database.

    The run sends the rows that Spark has made to the database.
    """

    @abstractmethod
    def build_writer(self, config: _TableConfig, owner: TableOwner) -> TableWriter:
        """Return what writes the tables of a sink, not connected yet."""


class ObjectSinkType(TableSinkType[_StagedConfig]):
    """A kind of sink that writes object files, which Spark makes and the run copies to their place.

    The storage does not record which changes it has; the state store does (`TableDelivery`).
    """

    @abstractmethod
    def object_form(self, config: _StagedConfig) -> ObjectForm:
        """Return the form of the objects."""

    @abstractmethod
    def build_writer(self, config: _StagedConfig, owner: TableOwner) -> CommitWriter:
        """Return what puts the objects of a sink into their place, not connected yet."""


class LakeSinkType(TableSinkType[_TableConfig]):
    """A kind of sink whose tables are files, which Spark writes as well.

    Attributes:
        had_int96: Whether earlier releases have written timestamps as INT96.
    """

    had_int96: bool = False

    @abstractmethod
    def dialect(self, config: _TableConfig) -> LakeDialect:
        """Return what writes the SQL of a sink."""

    def duckdb_scan(
        self,
        config: _TableConfig,  # noqa: ARG002
        destination: Sequence[str],  # noqa: ARG002
    ) -> str | None:
        """Return the expression with which DuckDB reads a table, None if it cannot read it."""
        return None


def sink_types() -> Mapping[str, SinkType[Any]]:
    """Return the kinds of sinks that can be used here, by name.

    Ours come first, then those of installed packages.
    """
    return _kinds().types


def message_sink_types() -> Mapping[str, MessageSinkType[Any]]:
    """Return those of the kinds that get messages, by name."""
    return {name: kind for name, kind in sink_types().items() if isinstance(kind, MessageSinkType)}


def sink_blocks() -> tuple[type[BaseModel], ...]:
    """Return the models of sinks in a pipeline file, `type` and `config`, one for each kind."""
    return _kinds().blocks


def broken_sink_types() -> Mapping[str, str]:
    """Return why kinds of installed packages cannot be used, by name.

    The text names the package.
    """
    return _kinds().broken


@functools.cache
def _kinds() -> Kinds[SinkType[Any]]:
    return find_kinds(GROUP, _BUILT_IN, SinkType, SinkBlock, _check)


def _check(kind: SinkType[Any]) -> None:
    needed: type[SinkConfig]
    match kind:
        case MessageSinkType():
            needed = MessageSinkConfig
        case ObjectSinkType():
            needed = StagedSinkConfig
        case DatabaseSinkType() | LakeSinkType():
            needed = TableSinkConfig
        case _:
            raise TypeError(
                f"{type(kind).__name__} is neither a MessageSinkType, a DatabaseSinkType, a "
                "LakeSinkType nor an ObjectSinkType"
            )
    if not issubclass(kind.config, needed):
        raise TypeError(f"{kind.config.__name__} is no {needed.__name__}")
    if kind.config.destination_field not in kind.config.model_fields:
        raise ValueError(f"{kind.config.__name__} has no field for the destination")


# Texts of `SinkType.consequences` for sinks that keep tables.

NEEDS_RESYNC = (
    "needs a resync: existing tables keep their form, and have none of the rows that are delivered "
    "already in the new one (deltaforge resync PIPELINE --sink SINK)"
)
"""For an option that decides how rows are written."""

TABLES_MOVED = (
    "later changes go there; tables that are new there need a resync, because they lack the rows "
    "that are delivered already (deltaforge resync PIPELINE --sink SINK)"
)
"""For an option that decides where tables are."""

KEYS_CHANGED = (
    f"lets a table go on that is held because it has no key; a table that exists {NEEDS_RESYNC}"
)
"""For `keys`."""

TYPES_CHANGED = (
    "applies to columns that are created from now on, and lets a held table go on if the column is "
    "new; a table that has the column with another type needs a resync "
    "(deltaforge resync PIPELINE --sink SINK --tables TABLE)"
)
"""For `types`."""

LATER_CHANGES = "applies to changes after the checkpoint; what the tables have stays as it is"
"""For an option that selects changes."""


# What the preflights of several kinds share.

_CONNECT_SECONDS = 5.0
"""Maximum timeout of a preflight's connection attempt; runs wait as long as the file says."""


def connect_seconds(configured: float) -> float:
    """Return the timeout of a preflight's connection: the configured one, at most 5 seconds."""
    return min(_CONNECT_SECONDS, configured)


def not_known(subject: str, what: str, names: Collection[str], question: str) -> Finding:
    """Return the note that destinations whose names depend on the changes cannot be checked.

    Args:
        subject: The sink.
        what: Noun for its destinations: `topics`.
        names: The templates of the destinations.
        question: What cannot be known about them: `may be written`.
    """
    shown = listed([repr(name) for name in sorted(names)])
    text = f"{what} {shown} depend on the changes: whether they {question} is not known"
    return Finding(subject, "note", text)


def folder_finding(subject: str, folder: Path, contents: str, correction: str) -> Finding:
    """Return the finding on whether a run can write in a folder, which need not exist yet.

    Args:
        subject: The sink.
        folder: The folder.
        contents: What the sink has there: `files`.
        correction: What to do if the folder cannot exist.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return Finding(subject, "error", f"{existing} is no directory", correction)
    if not os.access(existing, os.W_OK | os.X_OK):
        text = f"user {os.geteuid()} may not write in {existing}"
        return Finding(subject, "error", text, f"chown {os.geteuid()} {existing}")
    suffix = "" if existing == folder else " will be made"
    return Finding(subject, "ok", f"{contents} in {folder}{suffix}")
