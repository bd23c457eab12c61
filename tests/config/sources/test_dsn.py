import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sources.mysql.dsn import MysqlDsn, mysql_dsn
from deltaforge_dagster.sources.postgres.dsn import postgres_dsn


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


def test_a_mysql_url_says_where_and_as_whom() -> None:
    """Every part may be percent-encoded, and optional parts have defaults."""
    assert mysql_dsn("mysql://u%40x:p%2Fw@db.example:3307/shop") == MysqlDsn(
        "db.example", 3307, "u@x", "p/w", "shop"
    )
    assert mysql_dsn("mysql://u@h") == MysqlDsn("h", 3306, "u", "", "")
    assert mysql_dsn("mysql://u@[::1]:3306/shop").host == "::1"


def test_a_mysql_url_takes_the_options_of_mysql_for_tls() -> None:
    """SSL modes in any letter case, and paths of certificates, are accepted."""
    dsn = mysql_dsn(
        "mysql://u@h/d?ssl-mode=verify_ca&ssl-ca=/ca.pem&ssl-cert=/c.pem&ssl-key=/k.pem"
    )

    assert (dsn.ssl_mode, dsn.ssl_ca, dsn.ssl_cert, dsn.ssl_key) == (
        "VERIFY_CA", "/ca.pem", "/c.pem", "/k.pem",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not a MySQL connection string"),
        ("geheim", "is not a MySQL connection string"),
        ("postgres://u:geheim@h/db", "is not a MySQL connection string"),
        ("mysql://h/geheim", "is not a MySQL connection string"),
        ("mysql://u:geheim@h:0/db", "is not a MySQL connection string"),
        ("mysql://u@h:geheim/db", "is not a MySQL connection string"),
        ("mysql://u:x#geheim@h/db", "percent-encode them"),
        ("mysql://u@h/db?sslmode=geheim", "has the option 'sslmode'"),
        ("mysql://u@h/db?ssl-mode=geheim", "has an ssl-mode that is not known"),
        ("mysql://u@h/db?ssl-mode=VERIFY_IDENTITY", "without ssl-ca"),
        ("mysql://u@h/db?ssl-key=geheim", "has ssl-key without ssl-cert"),
    ],
)
def test_another_mysql_url_is_refused_without_repeating_it(text: str, problem: str) -> None:
    """The error names the mistake, and shows no value of the URL."""
    with pytest.raises(SpecError, match=problem) as caught:
        mysql_dsn(text)

    assert "geheim" not in str(caught.value)
    assert caught.value.__context__ is None
