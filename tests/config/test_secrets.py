import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.config.secrets import mask


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgres://u:pw@host:5432/db", "postgres://u:***@host:5432/db"),
        ("redis://:pw@host/0", "redis://:***@host/0"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("postgresql+psycopg://u:p@ss/w:rd@host/db", "postgresql+psycopg://u:***@host/db"),
        ("postgres://host/db?user=u&password=pw", "postgres://host/db?user=u&password=***"),
        ("host=h password=pw dbname=d", "host=h password=*** dbname=d"),
        (r"password = 'a \' b' host=h", "password = *** host=h"),
        (r"password=a\ b host=h", "password=*** host=h"),
        ("sslpassword=pw PASSWORD=pw", "sslpassword=*** PASSWORD=***"),
        ("authToken=abc", "authToken=***"),
        ("sc://localhost:15002/;token=abc", "sc://localhost:15002/;token=***"),
        ("cannot reach redis://:pw@h:1, see a@b", "cannot reach redis://:***@h:1, see a@b"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_mask(text: str, masked: str) -> None:
    """Passwords in URLs and in named values become ***; the rest stays readable."""
    assert mask(text) == masked


@given(st.text(st.characters(exclude_categories=["Z", "C"]), min_size=4))
def test_no_url_password_survives(password: str) -> None:
    """Any password in a URL is masked, however unusual."""
    secret = f"<{password}>"

    assert secret not in mask(f"failed: postgres://user:{secret}@host/db now")
