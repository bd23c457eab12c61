"""Where Arrow takes its memory from, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAME = "ARROW_DEFAULT_MEMORY_POOL"
COMMAND = "from deltaforge_dagster.cli.main import app; app(['schema'], standalone_mode=False)"
RUN = "import deltaforge_dagster.installation.run_process"


@pytest.mark.parametrize("begin", [COMMAND, RUN])
@pytest.mark.parametrize(("chosen", "used"), [({}, "system"), ({NAME: "mimalloc"}, "mimalloc")])
def test_commands_and_runs(begin: str, chosen: dict[str, str], used: str) -> None:
    """They take it from malloc, unless the user has chosen an allocator."""
    environment = {name: text for name, text in os.environ.items() if name != NAME} | chosen
    code = f"{begin}; import pyarrow; print(pyarrow.default_memory_pool().backend_name)"

    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    assert answer.stdout.splitlines()[-1] == used
