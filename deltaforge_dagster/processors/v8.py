"""Run a user's JavaScript in a V8 isolate, with limits.

A script has one of three forms::

    function processBatch(events) { ...; return events; }    called once for a batch
    (event) => { ...; return [event]; }                      called for each event
    ...; return [event];                                     the same, with `event` in scope

It returns the events to pass on: an array, a single object, or nothing to pass on the events that
it was given, modified or not. State at the script's top level is kept between calls for the
lifetime of the engine: until a failure, or until the process ends. V8 has no files, no network and
no modules, and its timers are removed.

`v8.js` beside this module moves events into and out of the engine. The limits apply to each
call of the script, not to that transfer: `cpu_ms` is processor time of the process, `timeout_ms` is
elapsed time, `mem_mb` is the isolate's heap. After an error or a reached limit the engine is
discarded, so a retry of the batch starts from the same state as a new run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from deltaforge_dagster.errors import ProcessorFailed, SpecError

_LOOK_SECONDS = 0.002
"""How often a running call is checked against its limits."""

_LOAD_SECONDS = 30.0
"""The minimum time limit for loading a script. It is generous because exceeding it makes the script
permanently invalid, and a new engine may have to wait for a processor on a busy machine."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of one call of a script; see the module."""

    cpu_ms: int = 50
    mem_mb: int = 128
    timeout_ms: int = 500


class Script:
    """A script, ready to be called; used by one thread.

    Args:
        name: Id of the processor, used in errors.
        source: The script.
        limits: The limits of each call.

    Raises:
        SpecError: The script is not valid, or neither a function nor the body of one.
    """

    def __init__(self, name: str, source: str, limits: CallLimits) -> None:
        self._name = name
        self._source = source
        self._limits = limits
        self._engine: _Engine | None = None
        self._started()

    def call(self, text: str, *, spelled: bool) -> str | None:
        """Run the script over a batch.

        Args:
            text: JSON text of an array of native events.
            spelled: Whether JavaScript may spell some of its numbers differently.

        Returns:
            None if all events pass unchanged, otherwise the JSON text of an array with
            `[number, differences]` for each event; see `give` in `v8.js`.

        Raises:
            ProcessorFailed: The script threw, returned something other than events, or reached a
                limit.
        """
        engine = self._started()
        try:
            return engine.call(text, spelled=spelled)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the isolate, and discard the script's state. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _started(self) -> _Engine:
        if self._engine is None:
            self._engine = _Engine(self._name, self._source, self._limits)
        return self._engine


class _Engine:
    """An isolate with the script in it, and the event loop that awaits its calls."""

    def __init__(self, name: str, source: str, limits: CallLimits) -> None:
        # Not imported at the top: V8 starts threads, which a process that forks workers must not
        # have.
        from py_mini_racer._mini_racer import mini_racer  # noqa: PLC0415

        self._name = name
        self._file = f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.js"
        self._limits = limits
        self._stack = contextlib.ExitStack()
        self._loop = asyncio.new_event_loop()
        self._stack.callback(self._loop.close)
        try:
            enter = functools.partial(self._stack.enter_context, mini_racer(self._loop))
            self._racer = self._await(_call_in_loop(enter))
            carrier = self._evaluated(_carrier())
            self._take, self._run, self._give = (
                carrier[function] for function in ("take", "run", "give")
            )
            self._racer.set_hard_memory_limit(limits.mem_mb << 20)
            self._script, self._each = self._compiled(source)
        except BaseException:
            self.close()
            raise

    def call(self, text: str, *, spelled: bool) -> str | None:
        self._carried(self._take, text)
        self._limited(self._run, self._script, self._each)
        answer: str | None = self._carried(self._give, text if spelled else None)
        return answer

    def close(self) -> None:
        self._stack.close()

    def _compiled(self, source: str) -> tuple[Any, bool]:
        """Return the function to call, and whether it takes a single event."""
        try:
            value = self._checked(source)
        except SpecError as error:
            # V8 rejects a `return` outside of a function: the script is the body of one.
            if "Illegal return statement" not in str(error):
                raise
            # On the same line as the script's first line, so that line numbers are those of the
            # script.
            return self._checked(f"(event) => {{{source}\n}}"), True
        batch = self._evaluated("typeof processBatch === 'function' ? processBatch : null")
        if batch is not None:
            return batch, False
        if not callable(value):
            raise SpecError(
                "the script has no function processBatch(events), is not a function of one event, "
                "and returns nothing"
            )
        return value, True

    def _checked(self, source: str) -> Any:
        from py_mini_racer import JSEvalException  # noqa: PLC0415

        try:
            return self._limited_evaluation(f"{source}\n//# sourceURL={self._file}")
        except JSEvalException as error:
            raise SpecError(f"the script cannot be used: {_error_line(error)}") from None

    def _limited_evaluation(self, code: str) -> Any:
        async def evaluate() -> Any:
            return await asyncio.wait_for(self._racer.eval_cancelable(code), seconds)

        seconds = max(_LOAD_SECONDS, self._limits.timeout_ms / 1000)
        try:
            return self._await(evaluate())
        except TimeoutError:
            raise SpecError(
                f"the script does not end within {seconds:g} s when it is loaded"
            ) from None

    def _evaluated(self, code: str) -> Any:
        return self._await(self._racer.eval_cancelable(code))

    def _carried(self, function: Any, *arguments: Any) -> Any:
        return self._run_async(function.cancelable()(*arguments))

    def _limited(self, function: Any, *arguments: Any) -> Any:
        return self._run_async(self._watched(function.cancelable()(*arguments)))

    async def _watched(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a call, and cancel it when it exceeds a limit."""
        began, cpu_began = time.monotonic(), time.process_time()
        task = asyncio.ensure_future(call)
        while True:
            done, _ = await asyncio.wait({task}, timeout=_LOOK_SECONDS)
            if done:
                return task.result()
            limit = None
            if time.process_time() - cpu_began > self._limits.cpu_ms / 1000:
                limit = f"{self._limits.cpu_ms} ms of processor time (limits.cpu_ms)"
            elif time.monotonic() - began > self._limits.timeout_ms / 1000:
                limit = f"{self._limits.timeout_ms} ms (limits.timeout_ms)"
            if limit is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                raise ProcessorFailed(
                    f"processor {self._name}: a call of the script took more than {limit}"
                )

    def _run_async(self, call: Coroutine[Any, Any, Any]) -> Any:
        from py_mini_racer import JSEvalException  # noqa: PLC0415

        try:
            return self._await(call)
        except JSEvalException as error:
            if self._racer.was_hard_memory_limit_reached():
                raise ProcessorFailed(
                    f"processor {self._name}: the script took more than {self._limits.mem_mb} MiB "
                    "(limits.mem_mb)"
                ) from None
            raise ProcessorFailed(f"processor {self._name}: {_error_line(error)}") from None

    def _await(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(call)


async def _call_in_loop(function: functools.partial[Any]) -> Any:
    """Call a function inside the loop: the library needs a running loop."""
    return function()


@functools.cache
def _carrier() -> str:
    source = files(__package__).joinpath("v8.js").read_text("utf-8")
    return f"{source}\n//# sourceURL=deltaforge.js"


_LOCATION = re.compile(r"^(?P<file>[^:\n]*):(?P<line>\d+): (?P<text>.*)$", re.MULTILINE)
_FRAME = re.compile(r"\bat .*?(?P<file>[A-Za-z0-9._-]+\.js):(?P<line>\d+):\d+", re.MULTILINE)


def _error_line(error: Exception) -> str:
    """Return V8's message of an error as a single line, with the line number in the script."""
    whole = str(error)
    first = _LOCATION.search(whole)
    text = first["text"] if first else whole.strip().split("\n", 1)[0]
    text = text.removeprefix("Uncaught ")
    if text.startswith("TypeError: JS processor returned"):
        return text.removeprefix("TypeError: ")
    if text.startswith("SyntaxError: ") and "is not valid JSON" in text:
        text = "SyntaxError: what the script parses is not valid JSON"  # V8's text quotes it
    frames = [frame for frame in _FRAME.finditer(whole) if frame["file"] != "deltaforge.js"]
    lines = [frame["line"] for frame in frames]
    if not lines and first and first["file"] != "deltaforge.js":
        lines = [first["line"]]
    where = f" (line {lines[0]})" if lines else ""
    prefix = (
        ""
        if first and first["text"].startswith("SyntaxError") and not frames
        else "JS processor threw: "
    )
    return f"{prefix}{text}{where}"
