"""What survives the loss of a machine, so that a source may forget it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_dagster.config.engine import JournalLimits
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.pipeline.control.durability import confirm_findings, durability_gaps
from tests.pipeline.control.test_catalog import FILE

SQLITE, POSTGRES = "sqlite:////data/state.db", "postgresql+psycopg://u:***@h/d"


@pytest.mark.parametrize(
    ("journal", "store", "declared", "lacks"),
    [
        ("file:///data/journal", SQLITE, False, ["the journal", "the state store"]),
        ("file:///data/journal", SQLITE, True, []),
        ("file:///data/journal", POSTGRES, False, ["the journal"]),
        ("s3://bucket/journal", SQLITE, False, ["the state store"]),
        ("s3://bucket/journal", POSTGRES, False, []),
        ("gs://bucket/journal", POSTGRES, False, []),
        ("sftp://host/journal", POSTGRES, False, ["the journal"]),
        ("memory://journal", "memory", True, ["the journal", "the state store"]),
    ],
)
def test_journal_and_store(journal: str, store: str, declared: bool, lacks: list[str]) -> None:
    """Both must be: on object storage or in PostgreSQL, or on a disk that the file declares durable."""
    gaps = durability_gaps(JournalLimits(durable_disk=declared), journal, store)
    assert [gap.partition(" is not ")[0] for gap in gaps] == lacks


def test_check_says_once_what_auto_lacks(tmp_path: Path) -> None:
    """And what would change it; nothing about a source whose server retains nothing, nor of another mode."""

    def found(text: str, journal: str = "file:///data") -> list[tuple[str, str]]:
        (tmp_path / "filed.yaml").write_text(text)
        spec = load_pipeline(tmp_path / "filed.yaml").spec
        return [(one.level, one.text) for one in confirm_findings(spec, journal, SQLITE)]

    ((level, text),) = found(FILE)
    assert level == "note"
    for needed in ("DELTAFORGE_JOURNAL_URL", "DELTAFORGE_STATE_URL", "engine.journal.durable_disk"):
        assert needed in text
    declared = FILE + "  engine: {journal: {durable_disk: true}}\n"
    assert [level for level, _ in found(declared)] == ["ok"]
    assert found(FILE + "  engine: {journal: {confirm: delivered}}\n") == []
    mysql = FILE.replace("type: postgres", "type: mysql").replace(", slot: s, publication: p", "")
    assert found(mysql.replace("postgres://u@localhost/d", "mysql://u:p@localhost/d")) == []
