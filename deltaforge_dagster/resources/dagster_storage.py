"""Dagster's PostgreSQL storage with connection pools; configured in `docker/dagster.yaml`.

Dagster's own storage opens a new connection for each statement, a dozen times for one tick of a
sensor in its daemon alone. A connection costs server and client 10 to 15 ms, for password
authentication and a server process, while a statement takes less than 1 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from dagster_postgres import DagsterPostgresStorage
from dagster_postgres.utils import (
    create_pg_engine,
    get_token_provider_from_config,
    pg_url_from_config,
)

from deltaforge_dagster.dagster_private import ConfigurableClassData

_KEPT = 4
"""Maximum number of idle connections in each of a process's three pools; a run needs one or two."""


class PooledPostgresStorage(DagsterPostgresStorage):
    """Dagster's PostgreSQL storage, but with connection pools.

    Settings, tables and behaviour are the same.

    A connection is tested before it is used, so a restart of the server causes no errors. Dagster's
    webserver uses its own pools anyway.
    """

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> Self:
        """Create a storage from the settings in `dagster.yaml`.

        They are the same as those of Dagster's `storage: postgres:`.
        """
        token_provider = get_token_provider_from_config(config_value)
        storage = cls(
            inst_data=inst_data,
            postgres_url=pg_url_from_config(config_value),
            should_autocreate_tables=config_value.get("should_autocreate_tables", True),
            token_provider=token_provider,
        )
        for part in (storage._run_storage, storage._event_log_storage, storage._schedule_storage):
            part._engine = create_pg_engine(  # noqa: SLF001  # Dagster has no setting for it
                part.postgres_url,
                token_provider,
                isolation_level="AUTOCOMMIT",
                pool_pre_ping=True,
                pool_size=_KEPT,
                max_overflow=-1,
            )
        return storage
