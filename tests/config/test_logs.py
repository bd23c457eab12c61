"""Log lines: fields, formats, filters, and no secrets."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from deltaforge_dagster.config.logs import bound, in_context, level, setup_logs
from deltaforge_dagster.errors import SettingsError

PACKAGE = "deltaforge_dagster"
LAB = "deltaforge_lab"
NAMES = (PACKAGE, f"{PACKAGE}.pipeline", f"{PACKAGE}.sinks.kafka", LAB)


@pytest.fixture
def own_logs() -> Iterator[None]:
    """Restore this process's loggers after the test."""
    before = {
        name: (logging.getLogger(name).level, [*logging.getLogger(name).handlers]) for name in NAMES
    }
    yield
    for name, (number, handlers) in before.items():
        logging.getLogger(name).setLevel(number)
        logging.getLogger(name).handlers = handlers


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the lines, which are JSON, that were written since the last call."""
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


@pytest.mark.usefixtures("own_logs")
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A line is one object with time, level, target, message, and the fields of its thread and call."""
    setup_logs({})
    with bound(pipeline="orders", run="r1"), bound(sink_id="redis"):
        extra = {"fields": {"attempt": 3, "batch_id": None}}
        logging.getLogger(f"{PACKAGE}.pipeline").warning("it\nfailed %s", "twice", extra=extra)
    logging.getLogger(PACKAGE).info("later")
    first, second = lines(capsys)
    assert first.pop("ts").endswith("Z")
    assert first == {
        "level": "WARN",
        "target": f"{PACKAGE}.pipeline",
        "message": "it\nfailed twice",
        "pipeline": "orders",
        "run": "r1",
        "sink_id": "redis",
        "attempt": 3,
    }
    assert second.keys() == {"ts", "level", "target", "message"}


@pytest.mark.usefixtures("own_logs")
def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    """The text format has the same contents, in an order for people."""
    setup_logs({"DELTAFORGE_LOG_FORMAT": "text"})
    with bound(pipeline="orders"):
        logging.getLogger(PACKAGE).error("broken", extra={"fields": {"kind": "io"}})
    line = capsys.readouterr().err
    assert line.endswith("Z ERROR broken pipeline=orders kind=io\n")


@pytest.mark.usefixtures("own_logs")
@pytest.mark.parametrize("form", ["json", "text"])
def test_no_secrets(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Passwords in messages, fields and causes are masked; the message of an unexpected exception is omitted."""
    setup_logs({"DELTAFORGE_LOG_FORMAT": form})
    fields = {"reason": "mysql://app:geheim@host is down", "conf": "sasl.password=geheim"}
    logger = logging.getLogger(PACKAGE)
    try:
        _ = dict[str, str]()["geh" + "eim"]
    except KeyError:
        logger.exception("redis://:%s@host broke", "geheim", extra={"fields": fields})
    said = capsys.readouterr().err
    assert "geheim" not in said
    assert "mysql://app:***@host is down" in said
    assert "KeyError" in said


@pytest.mark.usefixtures("own_logs")
def test_threads_carry_their_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """A thread started in a context has its fields, and fields that it binds itself do not affect others."""
    setup_logs({})

    def work() -> None:
        with bound(sink_id="redis"):
            logging.getLogger(PACKAGE).info("from the thread")

    with bound(run="r1"):
        thread = threading.Thread(target=in_context(work))
        thread.start()
        thread.join()
        logging.getLogger(PACKAGE).info("from here")
    there, here = lines(capsys)
    assert (there["run"], there["sink_id"]) == ("r1", "redis")
    assert (here["run"], "sink_id" in here) == ("r1", False)


@pytest.mark.usefixtures("own_logs")
def test_filters(capsys: pytest.CaptureFixture[str]) -> None:
    """Targets have their own levels, in the syntax of RUST_LOG; DELTAFORGE_LOG takes precedence."""
    environment = {"RUST_LOG": "error,pipeline=debug,sinks::kafka=off"}
    setup_logs(environment)
    assert level(environment) == "error,pipeline=debug,sinks::kafka=off"
    for name in NAMES:
        logging.getLogger(name).debug("debug")
        logging.getLogger(name).error("error")
    assert [(line["target"], line["message"]) for line in lines(capsys)] == [
        (PACKAGE, "error"),
        (f"{PACKAGE}.pipeline", "debug"),
        (f"{PACKAGE}.pipeline", "error"),
        (LAB, "error"),
    ]
    setup_logs({"RUST_LOG": "error,deltaforge_lab.demo=debug"})
    logging.getLogger(f"{LAB}.demo").debug("once")
    assert [line["target"] for line in lines(capsys)] == [f"{LAB}.demo"]
    assert level({"RUST_LOG": "debug", "DELTAFORGE_LOG": "warn"}) == "warn"
    assert level({}) == "info"


@pytest.mark.usefixtures("own_logs")
@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"DELTAFORGE_LOG": "loud"}, "DELTAFORGE_LOG must be"),
        ({"RUST_LOG": "pipeline=maybe"}, "RUST_LOG must be"),
        ({"DELTAFORGE_LOG_FORMAT": "xml"}, "DELTAFORGE_LOG_FORMAT must be"),
    ],
)
def test_what_has_no_meaning(environment: dict[str, str], named: str) -> None:
    """An invalid filter or format raises a single clear error."""
    with pytest.raises(SettingsError, match=named):
        setup_logs(environment)


@pytest.mark.usefixtures("own_logs")
def test_once_more_changes_how(capsys: pytest.CaptureFixture[str]) -> None:
    """After a second setup each line is still written once, in the new format."""
    setup_logs({})
    setup_logs({"DELTAFORGE_LOG_FORMAT": "text"})
    logging.getLogger(PACKAGE).info("once")
    assert capsys.readouterr().err.count("once") == 1
