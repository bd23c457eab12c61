"""Where the state may live."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.resources.platform import Platform


def settings(folder: Path, state_url: str) -> Settings:
    """Return settings of an installation in `folder`."""
    return Settings.from_env({"DELTAFORGE_HOME": str(folder), "DELTAFORGE_STATE_URL": state_url})


def test_state_in_memory_is_refused_where_processes_share_nothing(tmp_path: Path) -> None:
    """Under Dagster, `memory` is one clear error; in a single process it works."""
    memory = settings(tmp_path, "memory")

    with pytest.raises(SettingsError, match="DELTAFORGE_STATE_URL=memory"), Platform(memory).open():
        pass
    with Platform(memory, single_process=True).open() as opened:
        assert opened.store.pipelines() == []


def test_a_platform_shows_no_password() -> None:
    """The resource's text, which Dagster may print, names no secret of the state's address."""
    url = "postgresql://deltaforge:secret@db.example/state"

    assert "secret" not in repr(Platform(settings(Path("/nowhere"), url)))
