"""Tests of where the state store may be, and of how a source is built."""

from __future__ import annotations

import signal
import subprocess
import sys
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


BUILD = """
import os, signal, sys
from pathlib import Path
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.resources.platform import build_source
source = "deltaforge_dagster.sources.turso.source"
class Finder:
    def find_spec(self, name, path, target=None):
        if name == source:
            os.kill(os.getpid(), signal.SIGINT)
spec = load_pipeline(Path(sys.argv[1])).spec
sys.meta_path.insert(0, Finder())
try: build_source(spec)
finally: print(source in sys.modules)
"""
"""Builds a source, gets a Ctrl-C when it begins to import its module, and says whether it has imported it."""

PIPELINE = """
metadata: {name: shop, tenant: acme}
spec:
  source: {type: turso, config: {id: s, url: /nowhere/shop.db, tables: [t], cdc_mode: triggers}}
  sinks: [{type: file, config: {id: out, path: out.jsonl}}]
"""


def test_ctrl_c_while_a_source_is_imported(tmp_path: Path) -> None:
    """The import is completed first, and then the process is interrupted."""
    file = tmp_path / "shop.yaml"
    file.write_text(PIPELINE)
    command = [sys.executable, "-c", BUILD, str(file)]

    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.returncode == -signal.SIGINT, run.stderr
    assert run.stdout == "True\n"
