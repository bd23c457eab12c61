"""Create publication and slot, and determine the LSN to start reading at (`start_position`)."""

from __future__ import annotations

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import PositionLost, SourceMisconfigured
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.position import LsnPosition, parse_lsn
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from deltaforge_dagster.sources.postgres.stream import publications, slots
from deltaforge_dagster.sources.tables import TablePatterns


def ensure_start(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    config: PostgresSourceConfig,
    patterns: TablePatterns,
    *,
    facts: catalog.ServerSettings,
    failover: bool,
    at: int | None,
) -> LsnPosition:
    """Create publication and slot if they are missing; return where reading starts.

    Args:
        connection: A connection to the server.
        server: The server, for messages.
        config: The source's configuration, with slot, publication and `start_position`.
        patterns: The tables to capture.
        facts: The server's settings.
        failover: Whether to create the slot as a failover slot.
        at: An LSN that replaces `start_position`.

    Raises:
        SourceMisconfigured: A table or the publication is not as required.
        PermissionMissing: A grant is missing; the message has the statement.
        PositionLost: The slot does not retain the requested LSN, or the log ends before it.
        StartDelayed: Open transactions delay the slot; try again.
    """
    existing = prepare(connection, server, config, patterns, facts=facts, at=at)
    if existing is None:
        # After the publication (`prepare`): the log from the slot's start on must know it already.
        slots.create(connection, server, config.slot, failover=failover, version=facts.version)
        existing = catalog.slot(connection, config.slot)
    slot = slots.check(existing, server, config.slot)
    return _start_position(
        server, config, slot, _wanted_lsn(config) if at is None else at, facts.flushed_lsn
    )


def prepare(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    config: PostgresSourceConfig,
    patterns: TablePatterns,
    *,
    facts: catalog.ServerSettings,
    at: int | None,
) -> catalog.ReplicationSlot | None:
    """Check that reading can start, and return the slot if there is one.

    The publication is created if it is missing. Args and errors are those of `ensure_start`.
    """
    slot = catalog.slot(connection, config.slot)
    if slot is None:
        _refuse_position(server, config, _wanted_lsn(config) if at is None else at)
    elif at is not None:
        slots.check_start(slot, server, config.slot, at, facts.flushed_lsn)
    if catalog.published(connection, config.publication) is not None:
        publications.extend(connection, server, config.publication, patterns)
        publications.check(connection, server, config.publication, patterns)
    elif slot is None:
        publications.create(connection, server, config.publication, patterns, facts.version)
    else:
        raise SourceMisconfigured(
            f"{server.where}: replication slot {config.slot!r} exists, publication "
            f"{config.publication!r} does not, and the log written without it cannot be "
            "decoded; drop the slot, then both are recreated",
            remedy=_drop_slot(connection, config),
        )
    return slot


def _wanted_lsn(config: PostgresSourceConfig) -> int | None:
    wanted = config.start_position
    return None if isinstance(wanted, str) else parse_lsn(wanted.lsn)


def _refuse_position(
    server: PostgresSourceServer, config: PostgresSourceConfig, wanted: int | None
) -> None:
    """Refuse a position without a slot: a slot created now begins later, even on an idle server."""
    if wanted is not None:
        raise PositionLost(
            f"{server.where}: start position {format_lsn(wanted)}: "
            f"there is no replication slot {config.slot!r} "
            "that holds the log from there, and a new one begins later; "
            "use start_position earliest or latest, without a seed or imported checkpoint"
        )


def _start_position(
    server: PostgresSourceServer,
    config: PostgresSourceConfig,
    slot: catalog.ReplicationSlot,
    wanted: int | None,
    flushed_lsn: int,
) -> LsnPosition:
    confirmed = slot.confirmed_lsn
    assert confirmed is not None  # `slots.check`
    if wanted is not None:
        if wanted < confirmed:
            raise PositionLost(
                f"{server.where}: start_position {format_lsn(wanted)} is before "
                f"{format_lsn(confirmed)}, the oldest that replication slot {slot.name!r} holds; "
                "use earliest or latest"
            )
        return LsnPosition(wanted)
    if config.start_position == "latest":
        return LsnPosition(max(confirmed, flushed_lsn))
    return LsnPosition(confirmed)


def _drop_slot(connection: psycopg.Connection, config: PostgresSourceConfig) -> str:
    statement = sql.SQL("SELECT pg_drop_replication_slot({})").format(config.slot)
    return statement.as_string(connection)
