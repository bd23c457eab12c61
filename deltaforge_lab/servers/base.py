"""The base class of servers: programs with settings and a directory; they end with this process."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from deltaforge_dagster.errors import NotAllowed, SettingsError
from deltaforge_dagster.installation.process import ServerProcess, free_port, remove_directory

Origin = Literal["installed", "package"]
"""Where programs come from: this machine, or a package."""

_PORT_ATTEMPTS = 3


class Server(ABC):
    """A server that lives as long as this object, and never longer than the process.

    An external server (the class method `attach`) is only used, and never stopped. A context
    manager: leaving it stops the server and removes its temporary directory.

    Args:
        name: The server's name in messages.
    """

    _stop_signal = signal.SIGTERM
    _crash_signal = signal.SIGKILL
    _stop_seconds: float
    """How long the server may take to stop before it is killed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: ServerProcess | None = None
        self._temporary: Path | None = None
        self._data = Path()
        self._settings: dict[str, str] = {}

    @property
    def pid(self) -> int:
        """Process id of the server's first process."""
        return self._own().pid

    def restart(self, settings: Mapping[str, str] | None = None) -> None:
        """Restart the server on the same port and data with changed settings; stop it if needed."""
        self._own()
        self.stop()
        self._settings.update(settings or {})
        self._run()

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server; the data stays. Safe to call twice.

        Args:
            immediate: Stop it as in a crash, so that the next start has to recover.
        """
        if self._process:
            how = self._crash_signal if immediate else self._stop_signal
            self._process.stop(how, self._stop_seconds)

    def close(self) -> None:
        """Stop the server and remove its temporary directory. Safe to call twice.

        The server is shut down cleanly only if its data is kept.
        """
        self.stop(
            immediate=self._temporary is not None and self._data.is_relative_to(self._temporary)
        )
        if self._temporary:
            remove_directory(self._temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _own(self) -> ServerProcess:
        if self._process is None:
            raise NotAllowed(
                f"this {self._name} server is external: it cannot be stopped, restarted or paused"
            )
        return self._process

    @abstractmethod
    def _run(self) -> None:
        """Start the program with the settings, and wait until it answers."""

    def _run_on_free_port(self, use: Callable[[int], None]) -> None:
        """Run on a free port, which is passed to `use`.

        If the port is taken meanwhile, retry with another one.
        """
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            use(free_port())
            try:
                return self._run()
            except SettingsError as error:
                if attempt == _PORT_ATTEMPTS or "Address already in use" not in str(error):
                    raise
        return None


class OneProcessServer(Server):
    """A server with a single process, which can be paused as a whole."""

    def pause(self) -> None:
        """Freeze the server: connections stay open and nothing answers (SIGSTOP)."""
        self._own().pause()

    def resume(self) -> None:
        """Resume a paused server (SIGCONT)."""
        self._own().resume()
