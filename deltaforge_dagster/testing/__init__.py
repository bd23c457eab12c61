"""Contract tests, for authors, that every kind must pass.

There are those of sinks that get messages (`sinks`), of sinks that keep tables (`table_sinks`), and
of sources (`sources`). They need pytest.
"""

import pytest

pytest.register_assert_rewrite(
    "deltaforge_dagster.testing.sinks",
    "deltaforge_dagster.testing.table_sinks",
    "deltaforge_dagster.testing.sources",
)
