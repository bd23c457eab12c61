"""Tests of where the state store may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.resources.platform import Platform


def settings(folder: Path, state_url: str) -> Settings:
    """Return the settings of an installation in `folder`."""
    return Settings.from_env({"DELTAFORGE_HOME": str(folder), "DELTAFORGE_STATE_URL": state_url})


def test_state_in_memory_is_refused_where_processes_share_nothing(tmp_path: Path) -> None:
    """`memory` works in a single process, and is one clear error under Dagster."""
    memory = settings(tmp_path, "memory")

    with pytest.raises(SettingsError, match="DELTAFORGE_STATE_URL=memory"), Platform(memory).open():
        pass
    with Platform(memory, single_process=True).open() as opened:
        assert opened.store.pipelines.read() == []


def test_a_platform_shows_no_password() -> None:
    """The resource's text, which Dagster may print, does not contain secrets of the state URL."""
    url = "postgresql://deltaforge:secret@db.example/state"

    assert "secret" not in repr(Platform(settings(Path("/nowhere"), url)))
