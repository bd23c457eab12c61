"""Turso, libSQL and SQLite as a kind of source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.config.owned import OwnedResource
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import PositionField, SourceContext, SourceType
from deltaforge_dagster.sources.turso.config import DatabaseFile, TursoSourceConfig
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.turso.value_types import value_type
from deltaforge_dagster.sources.value_types import ValueType
from deltaforge_dagster.tables import Column

if TYPE_CHECKING:  # they need the client library and Arrow
    import pyarrow as pa

    from deltaforge_dagster.sources.turso.read_view import TursoReadView
    from deltaforge_dagster.sources.turso.source import TursoSource


class TursoSourceType(SourceType[TursoSourceConfig]):
    """A database of Turso, libSQL or SQLite, whose change table or new rows are polled."""

    name = "turso"
    title = "Turso"
    summary = "A Turso, libSQL or SQLite source, whose change table or new rows are polled."
    config = TursoSourceConfig
    connector = "turso"
    consequences = {  # noqa: RUF012 - constant
        "url": (
            "if it is another database, a run goes on only where the last captured change is"
            " there, too"
        ),
        "cdc_mode": (
            "positions belong to a mode: a run stops where it is another one than before; `auto`"
            " stays with it"
        ),
    }

    def build(self, config: TursoSourceConfig, context: SourceContext) -> TursoSource:
        """Return a source, without connecting to the database."""
        # The client library is imported only when it is needed.
        from deltaforge_dagster.sources.turso.source import TursoSource  # noqa: PLC0415

        return TursoSource(config, context.engine.columns)

    def position(self, fields: Mapping[str, Any]) -> TursoPosition | None:
        """Return the position in these fields; None if there is no `mode`."""
        return TursoPosition.from_fields(fields)

    def position_fields(
        self,
        config: TursoSourceConfig,  # noqa: ARG002
    ) -> tuple[PositionField, ...]:
        """Return the field `sequence`."""
        return (PositionField("sequence", "pos", "quoted number"),)

    def read_view(self, fields: Mapping[str, Any]) -> TursoReadView | None:
        """Return the read view in these fields; None if there is no `mode`."""
        # Arrow is imported only when it is needed.
        from deltaforge_dagster.sources.turso.read_view import TursoReadView  # noqa: PLC0415

        return TursoReadView.from_fields(fields)

    def value_type(self, column: Column, options: ValueOptions) -> ValueType:  # noqa: ARG002
        """Return the type by its name."""
        return value_type(column.data_type)

    def position_number(self, position: Position) -> int:
        """Return the newest change's number; in mode `polling` the sum of those of all tables."""
        assert isinstance(position, TursoPosition)
        return (position.last_change_id or 0) + sum(
            max(0, at) for _, at in position.table_positions
        )

    def rows_until(self, rows: pa.RecordBatch, end: Position) -> int:
        """Return how many of these rows have numbers up to that of `end`."""
        import numpy as np  # noqa: PLC0415 - slow to import

        assert isinstance(end, TursoPosition)
        return int(np.count_nonzero(rows.column("pos").to_numpy() <= (end.last_change_id or 0)))

    def table_variables(self, pattern: str) -> Mapping[str, str]:
        """Return the variables for the table, and for the database, which is always `main`."""
        return {"source.db": "main", "source.table": pattern}

    def kept_log(self, config: TursoSourceConfig, size: int | None) -> str | None:  # noqa: ARG002
        """Return the clause that our triggers still fill the change table; None without them."""
        if not config.auto_create_triggers:
            return None
        from deltaforge_dagster.sources.turso.modes.triggers import TABLE  # noqa: PLC0415 - Arrow

        (database,) = self.database_place(config)
        return f"triggers still write every change into table {TABLE} of {database}"

    def masked(self, config: TursoSourceConfig) -> bool:
        """Return whether the token is masked."""
        return config.auth_token is not None

    def with_secret(self, config: TursoSourceConfig, secret: str | None) -> TursoSourceConfig:
        """Return a config with this token."""
        return config.model_copy(
            update={"auth_token": None if secret is None else SecretStr(secret)}
        )

    def names(self, config: TursoSourceConfig, pipeline: str) -> Mapping[str, str]:  # noqa: ARG002
        """Return the mode, and the name of the change table if we create it."""
        if not config.auto_create_triggers:
            return {"mode": config.cdc_mode}
        from deltaforge_dagster.sources.turso.modes.triggers import TABLE  # noqa: PLC0415 - Arrow

        return {"mode": config.cdc_mode, "table": TABLE}

    def database_place(self, config: TursoSourceConfig) -> tuple[str, ...]:
        """Return the file or the server."""
        location = config.place
        return (
            str(location.path.absolute()) if isinstance(location, DatabaseFile) else location.url,
        )

    def owned(self, config: TursoSourceConfig) -> Sequence[OwnedResource]:
        """Return the change table that triggers fill: what was captured is deleted from it."""
        if config.cdc_mode != "triggers" and not config.auto_create_triggers:
            return ()
        resource = "the change table that triggers fill in"
        (url,) = self.database_place(config)
        return [OwnedResource(resource, (), url, "spec.source.config.url")]


TURSO = TursoSourceType()
