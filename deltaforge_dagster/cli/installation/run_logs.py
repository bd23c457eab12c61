"""Output of runs started by commands: on the terminal, and stored with the run for Dagster's UI.

Dagster redirects standard output and error to files and prints these through child processes.
Ctrl-C reaches the children as well: they die with stack traces, and the run's last messages are
lost. The program also no longer detects its terminal, and what it draws there ends up in the files.
Here every write goes to both.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self, TextIO

import dagster as dg

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.dagster_private import (
    CapturedLogContext,
    ComputeIOType,
    ConfigurableClassData,
    InstanceRef,
    LocalComputeLogManager,
)
from deltaforge_dagster.resources.instance import dagster_home, local_instance


@contextmanager
def printing_instance(settings: Settings) -> Iterator[dg.DagsterInstance]:
    """Yield the instance of `local_instance`, set up so that runs print without child processes.

    This applies only if Dagster stores output in local files, which is its default.
    """
    if settings.state_url == "memory":  # nothing is kept
        with local_instance(settings) as instance:
            yield instance
        return
    ref = InstanceRef.from_dir(str(dagster_home(settings)))
    logs = ref.compute_logs_data
    if logs.class_name == LocalComputeLogManager.__name__:
        ours = ConfigurableClassData(__name__, KeptLogs.__name__, logs.config_yaml)
        ref = ref._replace(compute_logs_data=ours)
    with dg.DagsterInstance.from_ref(ref) as instance:
        yield instance


class KeptLogs(LocalComputeLogManager):
    """Stores output where Dagster's own manager does, and also prints it directly."""

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> Self:
        """Create a manager from the settings of Dagster's own."""
        return cls(inst_data=inst_data, **config_value)

    @contextmanager
    def capture_logs(self, log_key: Sequence[str]) -> Iterator[CapturedLogContext]:
        """Store everything that is printed within the block."""
        with (
            self.open_log_stream(log_key, ComputeIOType.STDOUT) as out,
            self.open_log_stream(log_key, ComputeIOType.STDERR) as err,
        ):
            assert out is not None
            assert err is not None
            with (
                contextlib.redirect_stdout(_Tee(sys.stdout, out)),
                contextlib.redirect_stderr(_Tee(sys.stderr, err)),
            ):
                yield CapturedLogContext(log_key)
        Path(self.complete_artifact_path(log_key)).touch()  # type: ignore[no-untyped-call]


class _Tee(io.TextIOBase):
    """A stream that writes to a printed stream, whose properties it has, and to a file."""

    def __init__(self, printed: TextIO, kept: IO[str]) -> None:
        self._printed = printed
        self._file = kept

    def write(self, text: str) -> int:
        if not self._file.closed:  # some libraries keep a reference to the stream
            self._file.write(text)
            self._file.flush()
        return self._printed.write(text)

    def flush(self) -> None:
        self._printed.flush()

    def isatty(self) -> bool:
        return self._printed.isatty()

    @property
    def closed(self) -> bool:
        return self._printed.closed

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a variable in the typeshed
        return self._printed.encoding

    def fileno(self) -> int:
        return self._printed.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._printed, name)
