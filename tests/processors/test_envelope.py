"""The native envelope, byte for byte against a reference in plain Python."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster.processors.envelope import Origin, native_envelope, with_texts
from tests.processors.rows import Row, dumps, event, row, rows, write

pytestmark = pytest.mark.spark

POSTGRES = Origin("postgresql", "orders-db", "acme")


def envelopes(spark: SparkSession, path: Path, given_rows: list[Row], origin: Origin) -> list[str]:
    """Return the envelopes of rows, in their order."""
    frame = spark.read.parquet(str(write(path, given_rows)))
    answer = with_texts(frame.coalesce(1)).select(native_envelope(origin).alias("value")).toArrow()
    return [str(one) for one in answer["value"].to_pylist()]


@given(st.lists(rows, min_size=30, max_size=80), st.sampled_from(["postgresql", "mysql"]))
@settings(
    max_examples=8, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
def test_equals_the_reference(
    spark: SparkSession, tmp_path: Path, given_rows: list[Row], connector: str
) -> None:
    """Any row: the bytes that `json.dumps` makes of the event, whatever its names hold.

    Of control characters in names Spark writes the hexadecimal digits in upper case.
    """
    origin = Origin(connector, 'the "source"\n', "ténant\\", 7 if connector == "mysql" else None)

    found = envelopes(spark, tmp_path / "rows.parquet", given_rows, origin)

    for value, one in zip(found, given_rows, strict=True):
        names = f"{one['db']}{one['schema']}{one['table']}{one['file']}"
        same = dumps(json.loads(value)) if re.search(r"[\x00-\x1f]", names) else value
        assert same == dumps(event(one, origin))


def test_whole_text(spark: SparkSession, tmp_path: Path) -> None:
    """An insert of PostgreSQL, key by key in the documented order."""
    from deltaforge_dagster import __version__  # noqa: PLC0415 - only this sentence needs it

    (found,) = envelopes(spark, tmp_path / "rows.parquet", [row(tx_end=True)], POSTGRES)

    assert found == (
        f'{{"before":null,"after":{{"id":1}},"source":{{"version":"deltaforge-{__version__}",'
        '"connector":"postgresql","name":"orders-db","ts_ms":1700000000123,"db":"shop",'
        '"schema":"public","table":"orders","lsn":"0/016B6C50","txId":731},"op":"c",'
        '"ts_ms":1700000000123,"transaction":{"id":"731"},'
        '"event_id":"0192f0c1-0000-7000-8000-000000000001","tenant_id":"acme",'
        '"schema_version":"sha256:00ff","schema_sequence":3,"tx_end":true}'
    )


def test_row_images_keep_their_bytes(spark: SparkSession, tmp_path: Path) -> None:
    """Numbers of any length, trailing zeros, key order and duplicate keys pass unchanged."""
    image = '{"z":12345678901234567890123456789012345678901,"a":1.10,"e":1e400,"a":-0.0}'

    (found,) = envelopes(
        spark, tmp_path / "rows.parquet", [row(before=image, after=image)], POSTGRES
    )

    assert found.startswith(f'{{"before":{image},"after":{image},')


def test_raw_payload_is_the_after_image(spark: SparkSession, tmp_path: Path) -> None:
    """A raw payload goes out without an envelope; without an image it is `null`."""
    given_rows = [row(raw_payload=True), row(raw_payload=True, after=None, op="d")]

    found = envelopes(spark, tmp_path / "rows.parquet", given_rows, POSTGRES)

    assert found == ['{"id":1}', "null"]
