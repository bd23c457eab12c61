"""For authors of sinks and sources: the tests that every sink (`sinks`) and every source (`sources`) passes. They need pytest."""

import pytest

pytest.register_assert_rewrite(
    "deltaforge_dagster.testing.sinks", "deltaforge_dagster.testing.sources"
)
