from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import load_pipeline, spec_hash
from deltaforge_dagster.errors import SpecError

SALT = "a salt that is long enough"


def pipeline(columns: str) -> str:
    """Return a pipeline file with this text under `engine.columns`, in YAML flow style."""
    return f"""
metadata: {{name: shop, tenant: acme}}
spec:
  source: {{type: mysql, config: {{id: shop-db, dsn: "mysql://u:p@localhost/shop"}}}}
  sinks: [{{type: file, config: {{id: out, path: out.jsonl}}}}]
  engine: {{columns: {columns}}}
"""


def load(folder: Path, columns: str) -> str:
    """Return the problems of such a file, or its hash."""
    path = folder / "shop.yaml"
    path.write_text(pipeline(columns), encoding="utf-8")
    try:
        return load_pipeline(path).hash
    except SpecError as error:
        return str(error)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("{exclude: [ssn]}", "exclude[0]: is not a column pattern"),
        ("{exclude: [a.*b.c]}", "exclude[0]: is not a column pattern"),
        ("{exclude: [a.b.c.d]}", "exclude[0]: is not a column pattern"),
        ("{mask: {users: x}}", "is not a column pattern"),
        ("{mask: {users.card: 4}}", "must be text"),
        ("{truncate: {users.note: 0}}", "must be more than 0"),
        ("{hash: {columns: [users.id]}}", "hash.salt: is required"),
        ("{hash: {columns: [users.id], salt: short}}", "hash.salt: is shorter than 16 characters"),
        ('{hash: {columns: [users.id], salt: "${NO_SUCH_SALT}"}}', "variable NO_SUCH_SALT"),
        (f"{{hash: {{columns: [], salt: {SALT}}}}}", "hash.columns: must have at least one entry"),
        ("{exclude: [a.b], mask: {a.b: x}}", "a.b is in exclude and in mask"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, columns: str, problem: str) -> None:
    """A mistake in the block is a problem of the file, reported with its path."""
    assert problem in load(tmp_path, columns)


@pytest.mark.parametrize("pattern", ["shop.users.ssn", "users.ssn", "*.ssn", "shop.%.pass*", "*.*.*"])  # fmt: skip
def test_patterns(tmp_path: Path, pattern: str) -> None:
    """A pattern consists of a table pattern, as in the source's tables, and a column pattern."""
    assert "problem" not in load(tmp_path, f'{{exclude: ["{pattern}"], include: ["{pattern}"]}}')


def test_the_salt_counts_and_shows_nowhere(tmp_path: Path) -> None:
    """A different salt produces different values, so the file's hash differs; the dump does not contain the salt."""
    hashes = {
        load(tmp_path, f"{{hash: {{columns: [users.id], salt: {salt}}}}}")
        for salt in (SALT, SALT + "!", SALT)
    }
    spec = load_pipeline(tmp_path / "shop.yaml").spec

    assert len(hashes) == 2
    assert spec_hash(spec) in hashes
    assert SALT not in str(spec.masked())
    assert SALT not in repr(spec)
