from pathlib import Path

import pytest

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SettingsError


def test_defaults_are_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without variables, all paths are below the working directory, and absolute."""
    monkeypatch.chdir(tmp_path)

    settings = Settings.from_env({})

    assert settings == Settings(
        pipelines=tmp_path / "pipelines",
        home=tmp_path / ".deltaforge",
        state_url=f"sqlite:///{tmp_path}/.deltaforge/state.db",
        journal_url=f"{tmp_path.as_uri()}/.deltaforge/journal",
        spark_remote=None,
        lake_jars=tmp_path / ".deltaforge" / "jars",
    )


def test_state_and_journal_follow_the_home(tmp_path: Path) -> None:
    """DELTAFORGE_HOME moves state and journal together."""
    settings = Settings.from_env({"DELTAFORGE_HOME": str(tmp_path)})

    assert settings.state_url == f"sqlite:///{tmp_path}/state.db"
    assert settings.journal_url == f"{tmp_path.as_uri()}/journal"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("memory", "memory"),
        ("sqlite:////var/lib/state.db", "sqlite:////var/lib/state.db"),
        ("postgres://u:p@h/db", "postgresql+psycopg://u:p@h/db"),
        ("postgresql://u:p@h/db", "postgresql+psycopg://u:p@h/db"),
        ("postgresql+psycopg://u:p@h/db", "postgresql+psycopg://u:p@h/db"),
    ],
)
def test_state_urls(given: str, url: str) -> None:
    """PostgreSQL URLs get the name of the driver; others stay unchanged."""
    assert Settings.from_env({"DELTAFORGE_STATE_URL": given}).state_url == url


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths become absolute, so processes with another working directory find the same files."""
    monkeypatch.chdir(tmp_path)

    settings = Settings.from_env(
        {"DELTAFORGE_STATE_URL": "sqlite:///a.db", "DELTAFORGE_JOURNAL_URL": "files/journal"}
    )

    assert settings.state_url == f"sqlite:///{tmp_path}/a.db"
    assert settings.journal_url == f"{tmp_path.as_uri()}/files/journal"


def test_paths_with_odd_characters_are_quoted(tmp_path: Path) -> None:
    """Characters that have a meaning in URLs are percent-encoded when a path becomes a URL."""
    settings = Settings.from_env({"DELTAFORGE_HOME": str(tmp_path / "a b%20#?")})

    assert settings.journal_url == f"{tmp_path.as_uri()}/a%20b%2520%23%3F/journal"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STATE_URL", "mysql://u:geheim@h/db"),
        ("STATE_URL", "sqlite://"),
        ("STATE_URL", "geheim"),
        ("JOURNAL_URL", "file://geheim"),
        ("JOURNAL_URL", "s3://"),
        ("SPARK_REMOTE", "spark://geheim:7077"),
        ("STRICT", "geheim"),
    ],
)
def test_wrong_values_name_the_variable(name: str, value: str) -> None:
    """The error names the variable and never shows its value."""
    with pytest.raises(SettingsError, match=f"^DELTAFORGE_{name} must ") as caught:
        Settings.from_env({f"DELTAFORGE_{name}": value})

    assert "geheim" not in str(caught.value)


def test_repr_hides_urls() -> None:
    """Settings can be logged: URLs, which may contain passwords, are left out of the repr."""
    settings = Settings.from_env(
        {
            "DELTAFORGE_STATE_URL": "postgresql://u:geheim@h/db",
            "DELTAFORGE_SPARK_REMOTE": "sc://h/;token=geheim",
        }
    )

    assert "geheim" not in repr(settings)
