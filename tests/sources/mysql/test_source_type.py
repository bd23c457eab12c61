"""MySQL connection strings: what is accepted, and what is said of anything else."""

import pytest

from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sources.mysql.source_type import MysqlDsn, mysql_dsn


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
