"""The ClickHouse sink as a kind of sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from deltaforge_dagster.config.owned import server_place
from deltaforge_dagster.sinks.clickhouse.sink_type import ClickhouseSinkConfig
from deltaforge_dagster.sinks.registry import DatabaseSinkType, SinkContext
from deltaforge_dagster.sinks.tables import consequences
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # they need Arrow
    from deltaforge_dagster.sinks.tables.writer import TableOwner, TableWriter
    from deltaforge_dagster.typed_rows.schema import TargetTypes


class ClickhouseSinkType(DatabaseSinkType[ClickhouseSinkConfig]):
    """Tables of a ClickHouse server."""

    name = "clickhouse"
    summary = "A ClickHouse sink: it keeps tables for analytics."
    config = ClickhouseSinkConfig
    destinations = "tables"
    timing = frozenset({"commit_seconds", "commit_changes", "send_timeout_secs"})
    consequences: Mapping[str, str] = {
        **dict.fromkeys(["url", "database", "table"], consequences.MOVED),
        **dict.fromkeys(["mode", "version_source"], consequences.RESYNC),
        "keys": consequences.KEYS,
        "types": (
            "applies to columns that are created from now on; a table that has the column with "
            "another type needs a resync (deltaforge resync PIPELINE --sink SINK --tables TABLE)"
        ),
        **dict.fromkeys(["filter", "skipped_operations"], consequences.LATER),
    }

    def column_types(self) -> TargetTypes:
        """Return what ClickHouse's tables can have: all but times of a day."""
        from deltaforge_dagster.typed_rows.schema import TargetTypes  # noqa: PLC0415 - needs Arrow

        return TargetTypes(time=False)

    def owned_place(self, config: ClickhouseSinkConfig) -> tuple[str, ...]:
        """Return the server and the database."""
        url = urlsplit(config.url)
        return (server_place(url.hostname, url.port), config.database)

    def build_writer(self, config: ClickhouseSinkConfig, owner: TableOwner) -> TableWriter:
        """Return what writes the tables of a sink, not connected yet."""
        from deltaforge_dagster.sinks.clickhouse.writer import (  # noqa: PLC0415 - needs Arrow
            ClickhouseWriter,
        )

        return ClickhouseWriter(config, owner)

    def preflight(
        self,
        config: ClickhouseSinkConfig,
        context: SinkContext,  # noqa: ARG002
        names: Sequence[str],
    ) -> list[Finding]:
        """Check the login, that the database exists, and what the user may do there."""
        from deltaforge_dagster.sinks.clickhouse.preflight import findings  # noqa: PLC0415 - client

        return findings(config, names)

    def names(
        self,
        config: ClickhouseSinkConfig,
        pipeline: str,  # noqa: ARG002
    ) -> Mapping[str, str]:
        """Return the mode of the tables, and their database."""
        return {"mode": config.mode, "database": config.database}

    def metadata(self, config: ClickhouseSinkConfig) -> Mapping[str, str]:
        """Return the mode of the tables, and where they are."""
        return {"mode": config.mode, "url": config.url, "database": config.database}


CLICKHOUSE = ClickhouseSinkType()
