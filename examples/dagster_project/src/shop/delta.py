"""DuckDB's extension for Delta, and the dbt plugin that loads it."""

import os
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from dbt.adapters.duckdb.plugins import BasePlugin

_FOLDER = Path(str(distribution("duckdb-ext-delta").locate_file("duckdb_ext")))
EXTENSION = str(next(_FOLDER.rglob("*.duckdb_extension")))


class Plugin(BasePlugin):
    """Gives dbt's connection the function `delta_scan`, and its models their folder."""

    def configure_connection(self, conn: Any) -> None:
        """Load the extension, and make the folder, which DuckDB does not."""
        conn.load_extension(EXTENSION)
        Path(os.environ["LAKE"], "reports").mkdir(parents=True, exist_ok=True)
