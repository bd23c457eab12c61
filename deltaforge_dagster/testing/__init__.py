"""Contract tests for authors of sinks (`sinks`) and sources (`sources`), which every sink and source must pass. They need pytest."""

import pytest

pytest.register_assert_rewrite(
    "deltaforge_dagster.testing.sinks", "deltaforge_dagster.testing.sources"
)
