"""Tests of a sensor's interval in rounds of Dagster's daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.sensors.every_tick import interval_seconds

PIPELINE = """\
metadata: {{name: shop, tenant: acme}}
spec:
  source: {{type: mysql, config: {{id: db, dsn: "mysql://u@localhost/app", tables: [app.orders]}}}}
  sinks: [{{type: file, config: {{id: out, path: /tmp/out}}}}]
  engine: {{dagster: {{sensor_interval_seconds: {seconds}}}}}
"""


@pytest.mark.parametrize(("asked", "told"), [(1, 1), (2, 1), (5, 4), (30, 29)])
def test_a_tick_of_the_last_round_is_old_enough(tmp_path: Path, asked: int, told: int) -> None:
    """A tick stamped a moment after its round began does not make the daemon skip the next round."""
    path = tmp_path / "shop.yaml"
    path.write_text(PIPELINE.format(seconds=asked))

    assert interval_seconds(load_pipeline(path)) == told
