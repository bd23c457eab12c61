"""Encoding a few rows, which the run does by itself."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode.encoder import SMALL_ROWS, Encoder
from tests.pipeline.encode.test_encoder import PIPELINE, ids, inserts, segment


class NoSession:
    """A provider of sessions on a machine without Spark."""

    elsewhere = False

    def session(self) -> NoReturn:
        """Fail."""
        pytest.fail("Spark was asked for")

    def lost(self, error: BaseException) -> NoReturn:
        """Fail."""
        raise error


def test_few_rows_need_no_spark(tmp_path: Path) -> None:
    """The run makes their messages, of several segments in order."""
    file = tmp_path / "shop.yaml"
    file.write_text(PIPELINE)
    journal = Journal((tmp_path / "journal").as_uri())
    encoder = Encoder(load_pipeline(file).spec, journal, NoSession(), "run-1")
    half = SMALL_ROWS // 2
    segments = [segment(journal, 3, inserts(0, half)), segment(journal, 4, inserts(half, half))]

    encoded = encoder.encode(segments)

    assert ids(list(encoded.batches("by-table", 3, -1))) == list(range(half))
    assert ids(list(encoded.batches("by-id", 4, -1))) == list(range(half, SMALL_ROWS))
    assert ids(list(encoded.batches("lines", 4, half - 3))) == [SMALL_ROWS - 2, SMALL_ROWS - 1]
