"""Logs: one line for each event, as JSON or text, without secrets.

A line has the fields that are bound to its thread (`bound`: pipeline, tenant, run, sink, segment)
and those that the caller passes as `extra={"fields": {...}}`. The filter has the syntax of
`RUST_LOG`: a default level, and levels for single targets, `info,pipeline=debug`; a target is a
logger's name, with or without `deltaforge_dagster`.

=====================  ==========================================================================
variable               meaning
=====================  ==========================================================================
DELTAFORGE_LOG         the filter; if unset, `RUST_LOG`; if both are unset, `info`
DELTAFORGE_LOG_FORMAT  `json` or `text`; unset, text on a terminal and JSON elsewhere
=====================  ==========================================================================
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from types import MappingProxyType, TracebackType
from typing import Any

import orjson

from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import SettingsError

_PACKAGES = ("deltaforge_dagster", "deltaforge_lab")
"""The packages whose loggers write here: the product's, and that of the demo and the benchmarks."""
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_NAMES = {logging.WARNING: "WARN", logging.CRITICAL: "ERROR"}

_fields: ContextVar[Mapping[str, Any]] = ContextVar(
    "deltaforge_log_fields", default=MappingProxyType({})
)


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Add fields to every line logged in the block.

    This applies to the lines of this thread and of threads started `in_context`.
    """
    token = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


def in_context(target: Callable[[], None]) -> Callable[[], None]:
    """Wrap a thread's target, so that its lines have the fields of the thread that creates it."""
    return functools.partial(copy_context().run, target)


def setup_logs(environment: Mapping[str, str] = os.environ) -> None:
    """Log to standard error; calling it again replaces the handler and applies new levels.

    Raises:
        SettingsError: The filter or the format is invalid; the message names the variable.
    """
    levels = _parse(*_filter(environment))
    form = environment.get("DELTAFORGE_LOG_FORMAT", "").strip() or (
        "text" if sys.stderr.isatty() else "json"
    )
    if form not in {"json", "text"}:
        raise SettingsError("DELTAFORGE_LOG_FORMAT must be json or text")
    handler = _Handler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for ours in map(logging.getLogger, _PACKAGES):
        for before in [attached for attached in ours.handlers if isinstance(attached, _Handler)]:
            ours.removeHandler(before)
        ours.addHandler(handler)
    for name, number in levels.items():
        logging.getLogger(name).setLevel(number)


def level(environment: Mapping[str, str] = os.environ) -> str:
    """Return the filter in force."""
    return _filter(environment)[1]


class JsonLines(logging.Formatter):
    """A line is one JSON object: `ts`, `level`, `target`, `message`, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "ts": _moment(record),
            "level": _NAMES.get(record.levelno, record.levelname),
            "target": record.name,
            "message": mask(record.getMessage()),
            **_masked(record),
        }
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class TextLines(logging.Formatter):
    """A line for people: time, level, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = _masked(record)
        stack = fields.pop("stack", None)
        shown = "".join(f" {name}={value}" for name, value in fields.items())
        name = _NAMES.get(record.levelno, record.levelname)
        line = f"{_moment(record)} {name:5} {mask(record.getMessage())}{shown}"
        return line if stack is None else f"{line}\n{stack}"


class _Handler(logging.Handler):
    """Writes to the current `sys.stderr`, which may have been replaced since setup."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - a failure to log must not stop the caller
            self.handleError(record)


def _masked(record: logging.LogRecord) -> dict[str, Any]:
    fields = {**_fields.get(), **getattr(record, "fields", {})}
    if record.exc_info:
        fields["stack"] = _stack(record.exc_info[0], record.exc_info[2])
    return {
        name: mask(value) if isinstance(value, str) else value
        for name, value in fields.items()
        if value is not None
    }


def _stack(kind: type[BaseException] | None, trace: TracebackType | None) -> str:
    """Return the stack and the type of an exception, without its message, which may quote a row."""
    name = "" if kind is None else kind.__name__
    return "".join(traceback.format_tb(trace)) + name


def _moment(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _filter(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of the variable that sets the filter, and the filter."""
    for variable in ("DELTAFORGE_LOG", "RUST_LOG"):
        text = environment.get(variable, "").strip()
        if text:
            return variable, text
    return "DELTAFORGE_LOG", "info"


def _parse(variable: str, text: str) -> dict[str, int]:
    """Return the levels by logger name."""
    levels = dict.fromkeys(_PACKAGES, logging.INFO)
    for part in text.split(","):
        target, _, name = part.strip().rpartition("=")
        number = _LEVELS.get(name.strip().lower())
        if number is None:
            raise SettingsError(
                f"{variable} must be a level ({', '.join(_LEVELS)}), or targets with levels "
                "such as info,pipeline=debug"
            )
        levels.update(dict.fromkeys(_loggers(target.strip()), number))
    return levels


def _loggers(target: str) -> tuple[str, ...]:
    """Return the names of the loggers that a target means."""
    name = target.replace("::", ".")
    if name in {"", "deltaforge"}:
        return _PACKAGES
    return (name if name.partition(".")[0] in _PACKAGES else f"{_PACKAGES[0]}.{name}",)
