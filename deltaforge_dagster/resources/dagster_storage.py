"""Dagster's storage on PostgreSQL, whose connections are kept: named by `docker/dagster.yaml`.

Dagster's own connects anew for each statement, a dozen times for a tick of a sensor in its daemon alone. A
connection costs server and client 10 to 15 ms, with the password's proof and a process, where a statement takes
less than one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from dagster._serdes import ConfigurableClassData
from dagster_postgres import DagsterPostgresStorage
from dagster_postgres.utils import (
    create_pg_engine,
    get_token_provider_from_config,
    pg_url_from_config,
)

_KEPT = 4
"""Connections that one process keeps for runs, for events and for schedules, at most; a run needs one or two."""


class PooledPostgresStorage(DagsterPostgresStorage):
    """Dagster's storage on PostgreSQL with the same settings, tables and behaviour, in pools.

    A connection is asked for a sign of life before it is used, so a restart of the server goes unnoticed. Dagster's
    webserver has pools of its own anyway.
    """

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> Self:
        """Make one from the settings of `dagster.yaml`: those of Dagster's `storage: postgres:`."""
        token_provider = get_token_provider_from_config(config_value)
        storage = cls(
            inst_data=inst_data,
            postgres_url=pg_url_from_config(config_value),
            should_autocreate_tables=config_value.get("should_autocreate_tables", True),
            token_provider=token_provider,
        )
        for one in (storage._run_storage, storage._event_log_storage, storage._schedule_storage):
            one._engine = create_pg_engine(  # noqa: SLF001  # Dagster has no setting for it
                one.postgres_url,
                token_provider,
                isolation_level="AUTOCOMMIT",
                pool_pre_ping=True,
                pool_size=_KEPT,
                max_overflow=-1,
            )
        return storage
