"""Run a user's function in a child process, which can be killed whatever the function does.

Threads cannot be killed, nor can C code that ignores signals be interrupted, but a process can be
killed. The child is a new interpreter rather than a fork, so it has neither the worker's threads
nor its sockets, which would stay open while the child hangs. It loads the module once and serves
calls until its parent closes the connection.

The parent sends tables as Arrow streams. Each answer is one byte for its kind, followed by its
content: a table as an Arrow stream, or a failure as text. If an answer does not come in time, the
child is killed with SIGKILL, and the next call starts another one. If the parent is killed in the
meantime, a kernel timer ends a child whose call hangs.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

import pyarrow as pa

from deltaforge_dagster.config.processors import PythonProcessor
from deltaforge_dagster.errors import ProcessorFailed, SpecError
from deltaforge_dagster.processors.python_function import UserFunction
from deltaforge_dagster.sources.stream import SocketTimeLimit

_LOAD_SECONDS = 30.0
"""The minimum time limit for starting the child and loading the module; suits busy machines."""

_AFTER_PARENT_SECONDS = 1.0
"""How much later than the parent's limit the child's own timer ends it."""

_END_SECONDS = 5.0
"""How long a child that has closed its connection may take to exit."""

_READY, _TABLE, _FAILED, _WRONG = b"r", b"t", b"f", b"w"

_CHILD = """
import sys
sys.path[:] = {path!r}
from deltaforge_dagster.processors.python_child import serve
serve({handle}, {config!r}, {code!r})
"""


class FunctionInChild:
    """A user's function that is called in a child process with a time limit; used by one thread.

    Args:
        config: The processor's block, with `limits.timeout_ms`.
        code: The expected hash of the module's source; None if it is unknown.

    Raises:
        SpecError: The function cannot be loaded, or its module is not the expected one.
        ProcessorFailed: The child exited while loading.
    """

    def __init__(self, config: PythonProcessor, code: str | None = None) -> None:
        assert config.limits.timeout_ms is not None
        self._config = config
        self._code = code
        self._where = f"processor {config.id}: {config.function}"
        self._seconds = config.limits.timeout_ms / 1000
        self._child: _Child | None = None
        self._started()

    def __call__(self, events: pa.Table) -> pa.Table:
        """Return the function's result for events, with the columns and types of `KINDS`.

        Raises:
            ProcessorFailed: The function raised, returned something other than events, exceeded its
                time limit, or ended its process.
        """
        child = self._started()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, events.schema) as writer:
            writer.write_table(events)
        try:
            answer = child.answer(self._seconds, sink.getvalue())
        except TimeoutError:
            self.close()
            raise self._too_long() from None
        except (EOFError, OSError):
            raise self._ended() from None
        if answer[:1] == _FAILED:
            raise ProcessorFailed(answer[1:].decode())
        with pa.ipc.open_stream(pa.py_buffer(answer)[1:]) as reader:
            return reader.read_all()

    def close(self) -> None:
        """End the child, and with it the module's state. Safe to call twice."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _started(self) -> _Child:
        if self._child is None:
            seconds = max(_LOAD_SECONDS, self._seconds)
            self._child = _Child(self._config, self._code)
            try:
                answer = self._child.answer(seconds)
            except TimeoutError:
                self.close()
                raise SpecError(
                    f"{self._where}: the module does not load within {seconds:g} s"
                ) from None
            except (EOFError, OSError):
                raise self._ended() from None
            if answer[:1] == _WRONG:
                self.close()
                raise SpecError(answer[1:].decode())
        return self._child

    def _ended(self) -> ProcessorFailed:
        assert self._child is not None
        child, self._child = self._child, None
        code = child.end(patience=_END_SECONDS)
        if code == -signal.SIGALRM:
            return self._too_long()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return ProcessorFailed(f"{self._where}: the function's process ended {how}")

    def _too_long(self) -> ProcessorFailed:
        return ProcessorFailed(
            f"{self._where}: a call took more than {self._config.limits.timeout_ms} ms "
            "(limits.timeout_ms)"
        )


class _Child:
    """The child process, and the parent's end of the connection."""

    def __init__(self, config: PythonProcessor, code: str | None) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            source = _CHILD.format(
                path=sys.path,
                handle=theirs.fileno(),
                config=config.model_dump_json(),
                code=code,
            )
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                [sys.executable, "-c", source],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def answer(self, seconds: float, question: pa.Buffer | None = None) -> bytes:
        """Send a question, if one is given, and return the next answer.

        Raises:
            TimeoutError: The answer did not come in time; the connection can no longer be used.
            EOFError, OSError: The process has ended.
        """
        with SocketTimeLimit(self._connection.fileno(), seconds) as cutter:
            try:
                if question is not None:
                    self._connection.send_bytes(question)
                return self._connection.recv_bytes()
            except (EOFError, OSError):
                if cutter.fired:
                    raise TimeoutError from None
                raise

    def end(self, patience: float = 0.0) -> int:
        """Wait `patience` seconds for the process to exit, then kill it; return its exit code."""
        self._connection.close()
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def serve(handle: int, config: str, code: str | None) -> None:
    """Answer calls until the parent closes its end: the main function of the child."""
    block = PythonProcessor.model_validate_json(config)
    assert block.limits.timeout_ms is not None
    seconds = block.limits.timeout_ms / 1000
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with Connection(handle) as parent:
        _timer(max(_LOAD_SECONDS, seconds))
        try:
            function = UserFunction(block, code)
            # Otherwise the first call would import it, and its time limit would count that.
            import pandas as pd  # noqa: F401, PLC0415 - only needed in this process
        except SpecError as error:
            parent.send_bytes(_WRONG + str(error).encode())
            return
        _timer(None)
        parent.send_bytes(_READY)
        while True:
            try:
                stream = parent.recv_bytes()
            except EOFError:
                return
            with pa.ipc.open_stream(stream) as reader:
                table = reader.read_all()
            _timer(seconds)
            try:
                answer = _stream(function(table))
            except ProcessorFailed as error:
                answer = _FAILED + str(error).encode()
            _timer(None)
            parent.send_bytes(answer)


def _timer(seconds: float | None) -> None:
    """Set a kernel timer that ends this process shortly after `seconds`; None cancels it."""
    signal.setitimer(signal.ITIMER_REAL, 0 if seconds is None else seconds + _AFTER_PARENT_SECONDS)


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    sink.write(_TABLE)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()
