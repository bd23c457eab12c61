"""For authors of sinks: the tests that every sink passes (`sinks`). They need pytest."""

import pytest

pytest.register_assert_rewrite("deltaforge_dagster.testing.sinks")
