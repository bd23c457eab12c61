"""The sample that compiles the kernels of PostgreSQL's stream."""

from __future__ import annotations

from deltaforge_dagster.sources.postgres.decode.pgoutput import xlog
from deltaforge_dagster.sources.postgres.warm import SAMPLE, detached_decoder
from deltaforge_lab.synthetic.postgres_messages import message, orders


def test_the_sample_is_decoded() -> None:
    """It is a stream as others are: with a message, two rows, and without a rest."""
    assert xlog(1, message(1, "warm", b"{}", transactional=False)) + orders(2) == SAMPLE

    decoded = detached_decoder().feed(SAMPLE, len(SAMPLE))

    assert (decoded.error, decoded.consumed) == (None, len(SAMPLE))
