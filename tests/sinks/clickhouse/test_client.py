"""Tests of what the server's exceptions become."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import (
    AuthFailed,
    PermissionMissing,
    SinkUnavailable,
    TableRejected,
)
from deltaforge_dagster.sinks.clickhouse.client import failure

VERSION = "(version 24.8.4.13 (official build))"


@pytest.mark.parametrize(
    ("status", "code", "text", "error", "said"),
    [
        (403, 516, f"Code: 516. DB::Exception: me: Authentication failed. (AUTHENTICATION_FAILED) {VERSION}", AuthFailed, "exception 516 (AUTHENTICATION_FAILED)"),
        (403, 497, f"Code: 497. DB::Exception: me: Not enough privileges. To execute this query, it's necessary to have the grant INSERT(id) ON shop.orders. (ACCESS_DENIED) {VERSION}", PermissionMissing, "it needs the grant INSERT(id) ON shop.orders (exception 497 (ACCESS_DENIED))"),
        (500, 252, f"Code: 252. DB::Exception: Too many parts (301). (TOO_MANY_PARTS) {VERSION}", SinkUnavailable, "refuses for now with exception 252 (TOO_MANY_PARTS)"),
        (404, 81, "Code: 81. DB::Exception: Database x does not exist. (UNKNOWN_DATABASE)", TableRejected, "create it with CREATE DATABASE"),
        (404, 60, "Code: 60. DB::Exception: ... (UNKNOWN_TABLE)", TableRejected, "the table does not exist"),
        (500, 349, "Code: 349. DB::Exception: Cannot convert NULL value to non-Nullable type: while converting column `note` from type Nullable(String) (CANNOT_INSERT_NULL_IN_ORDINARY_COLUMN)", TableRejected, "the column note of the table cannot be"),
        (500, 53, "Code: 53. DB::Exception: value 'geheim' (TYPE_MISMATCH)", TableRejected, "exception 53 (TYPE_MISMATCH)"),
        (500, 53, "geheim", TableRejected, "(exception 53)"),
        (401, None, "geheim", AuthFailed, "status 401"),
        (503, None, "geheim", SinkUnavailable, "status 503"),
        (404, None, "geheim", TableRejected, "which is not an answer of ClickHouse; check `url`"),
    ],
)  # fmt: skip
def test_exceptions(
    status: int, code: int | None, text: str, error: type[Exception], said: str
) -> None:
    """Each has a class that says whether to wait, and a message with neither values nor secrets."""
    made = failure("sink click", status, code, text)
    assert type(made) is error
    assert str(made).startswith("sink click: ")
    assert said in str(made)
    assert "geheim" not in str(made)
