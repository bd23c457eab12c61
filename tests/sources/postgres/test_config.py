"""PostgreSQL connection strings: what is accepted, and what is said of anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from deltaforge_dagster.config.postgres_dsn import postgres_dsn
from deltaforge_dagster.errors import SpecError


@pytest.mark.parametrize(
    "url",
    [
        "postgres://u:p%40ss@db.example:5433/app?sslmode=require",
        "postgresql://u@localhost/app",
        "postgresql://postgres:@/postgres?host=/tmp/sockets",
    ],
)
def test_urls_stay_as_they_are(url: str) -> None:
    """A URL that libpq understands is passed on unchanged."""
    assert postgres_dsn(url) == (url, ())


def test_pairs_get_defaults() -> None:
    """Missing keys have fixed defaults, whatever PGHOST and similar variables say."""
    dsn, ignored = postgres_dsn("password=pw")

    assert conninfo_to_dict(dsn) == {
        "host": "localhost",
        "port": "5432",
        "user": "postgres",
        "dbname": "postgres",
        "password": "pw",
    }
    assert ignored == ()


def test_database_is_dbname_and_unknown_keys_are_named() -> None:
    """DeltaForge's spelling is accepted; an unknown key is reported, but not rejected."""
    dsn, ignored = postgres_dsn("host=h database=app fallback=x")

    assert conninfo_to_dict(dsn)["dbname"] == "app"
    assert ignored == ("fallback",)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_password_survives_quoting(password: str) -> None:
    """A password with spaces, quotes and backslashes survives libpq's quoting."""
    dsn, _ = postgres_dsn(make_conninfo("", host="h", password=password))

    assert conninfo_to_dict(dsn)["password"] == password


@pytest.mark.parametrize(
    "text",
    ["", "geheim", "mysql://u:geheim@h/db", "host=h geheim", "postgres://u:geheim@h:port:x/db%"],
)
def test_anything_else_is_refused_without_repeating_it(text: str) -> None:
    """The error says how to write the string, and quotes nothing of it."""
    with pytest.raises(SpecError, match="is not a PostgreSQL connection string") as caught:
        postgres_dsn(text)

    assert "geheim" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
