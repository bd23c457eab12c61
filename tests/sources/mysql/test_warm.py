"""The sample that compiles the kernels of MySQL's log."""

from __future__ import annotations

from deltaforge_dagster.sources.mysql.warm import SAMPLE, detached_decoder
from deltaforge_lab.synthetic.mysql_events import orders


def test_the_sample_is_decoded() -> None:
    """It is a log as others are: with two rows, and without a rest."""
    assert orders(2) == SAMPLE

    decoded = detached_decoder().feed(SAMPLE, len(SAMPLE))

    assert (decoded.error, decoded.consumed) == (None, len(SAMPLE))
