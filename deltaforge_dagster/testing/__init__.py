"""Contract tests, for authors, that every sink (`sinks`) and source (`sources`) must pass.

They need pytest.
"""

import pytest

pytest.register_assert_rewrite(
    "deltaforge_dagster.testing.sinks", "deltaforge_dagster.testing.sources"
)
