"""Summary of a segment: changes per table and op, table versions, event times."""

from __future__ import annotations

from typing import cast

import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.tables import Contained, contained

_GROUPED = ["db", "schema", "table", "op", "schema_version"]


class Summary:
    """Summarizes a segment from its row groups, so that it can be described without reading it.

    A table's full name is `schema.table`, or `db.table` if the source has no schemas.

    Attributes:
        counts: Number of changes per full table name and op.
        schema_versions: By full table name the fingerprint of its rows' table version, or of several
            versions, ordered by their last rows.
        first_ts_us: Earliest event time, microseconds since 1970 UTC.
        last_ts_us: Latest event time.
        newest: Latest event time by full table name.
    """

    def __init__(self) -> None:
        self.newest: dict[str, int] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.schema_versions: dict[str, Contained] = {}
        self.first_ts_us = 0
        self.last_ts_us = 0

    def add(self, rows: pa.Table) -> None:
        """Add the next rows of the change frame; each column must have a single dictionary."""
        groups = rows.group_by(_GROUPED, use_threads=False).aggregate(
            [("ordinal", "count"), ("ordinal", "max"), ("ts_us", "max")]
        )
        for group in groups.sort_by("ordinal_max").to_pylist():
            name = f"{group['schema'] or group['db']}.{group['table']}"
            ops = self.counts.setdefault(name, {})
            ops[group["op"]] = ops.get(group["op"], 0) + group["ordinal_count"]
            self.newest[name] = max(self.newest.get(name, 0), group["ts_us_max"])
            if group["schema_version"] is not None:
                versions = self.schema_versions
                versions[name] = contained(versions.get(name), group["schema_version"])
        times = cast("dict[str, int]", pc.min_max(rows.column("ts_us")).as_py())
        if rows.column("ordinal")[0].as_py() == 0:
            self.first_ts_us, self.last_ts_us = times["min"], times["max"]
        else:
            self.first_ts_us = min(self.first_ts_us, times["min"])
            self.last_ts_us = max(self.last_ts_us, times["max"])
