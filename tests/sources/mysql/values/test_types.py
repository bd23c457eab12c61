from __future__ import annotations

import pytest

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.sources.mysql.schema.columns import described_type
from deltaforge_dagster.sources.mysql.values.types import LogType, ValueForms, log_type, value_type


@pytest.mark.parametrize("code", [7, 11, 12])
def test_temporal_types_before_5_6(code: int) -> None:
    """Tables that were never rebuilt since MySQL 5.5 stop the pipeline with the statement to run."""
    with pytest.raises(UnsupportedEvent, match=r"ALTER TABLE \.\.\. FORCE"):
        value_type(LogType(code), None, unsigned=False)


@pytest.mark.parametrize(
    ("column_type", "charset", "log_type"),
    [
        ("int(10) unsigned zerofill", None, LogType(3)),
        ("decimal(65,30) unsigned", None, LogType(246, 65, 30)),
        ("datetime(6)", None, LogType(18, 6)),
        ("bit(13)", None, LogType(16, 5, 1)),
        ("varchar(100)", "utf8mb4", LogType(15, 400)),
        ("tinytext", "utf8mb4", LogType(252, 1)),
        ("varbinary(20)", None, LogType(15, 20)),
        ("multipoint", None, LogType(255, 4)),
    ],
)
def test_the_catalog_describes_the_log(
    column_type: str, charset: str | None, log_type: LogType
) -> None:
    """A column's type in the catalog and in the log are the same."""
    collation = 45 if charset else 63
    unsigned = "unsigned" in column_type

    assert described_type(column_type, charset) == value_type(
        log_type, collation, unsigned=unsigned
    )


def test_numbers_for_labels() -> None:
    """With the forms of numbers an ENUM and a SET are read as integers, whatever their labels."""
    forms = ValueForms(enum_index=True, set_bits=True, timestamp_micros=True)

    assert described_type("set('a','b')", "utf8mb4", ("a", "b"), forms).size == 1
    assert described_type("enum('a')", "utf8mb4", ("a",), forms).kind == (
        described_type("tinyint unsigned", None).kind
    )


@pytest.mark.parametrize(
    ("code", "metadata"),
    [
        (246, bytes([10, 11])),
        (246, bytes([0, 0])),
        (246, bytes([66, 0])),
        (16, bytes([1, 8])),
        (16, bytes([0, 0])),
        (254, bytes([247, 3])),
        (254, bytes([248, 5])),
        (252, bytes([0])),
        (245, bytes([5])),
    ],
)
def test_impossible_columns(code: int, metadata: bytes) -> None:
    """A size that no column has is damage: kernels would read beside the row."""
    with pytest.raises(CorruptLog, match="a column of type"):
        log_type(code, metadata)
