"""Files of sockets whose process was killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

from deltaforge_dagster.installation.spark_daemon import remove_abandoned_sockets

LISTENS = """
import socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print(flush=True)
sys.stdin.read()
"""


def test_killed_processes(tmp_path: Path) -> None:
    """Only their sockets are removed: those in use stay, and so do young ones, other files and other names."""
    names = {name: f".{uuid.uuid4()}.sock" for name in ("live", "killed", "young", "plain")}
    paths = {name: tmp_path / file for name, file in names.items()} | {"other": tmp_path / "a.sock"}
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(paths["live"]))
        live.listen()
        for name in ("killed", "young", "other"):
            command = [sys.executable, "-c", LISTENS, str(paths[name])]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as process:
                assert process.stdout is not None
                process.stdout.readline()
                process.send_signal(signal.SIGKILL)
        paths["plain"].write_text("")
        for name in paths.keys() - {"young"}:
            os.utime(paths[name], (0, 0))

        remove_abandoned_sockets(tmp_path)

        assert {name for name, path in paths.items() if not path.exists()} == {"killed"}
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(paths["live"]))
