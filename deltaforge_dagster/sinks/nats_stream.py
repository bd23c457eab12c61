"""What a sink must know of its JetStream stream: which subjects it takes, and what it holds of the sink.

A stream is asked through JetStream's API (docs.nats.io, "NATS API Reference": `STREAM.INFO`,
`STREAM.MSG.GET`).

A sink that delivers exactly once finds its own position in the last message on its subjects: in the header
`df-position`, as `nats_pack.Keeping` describes it. Messages that move no position, of a replay, stand
among the others; theirs is `@<sequence>`, that of the last message before them that does, 0 for none.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deltaforge_dagster.errors import SinkRejected
from deltaforge_dagster.sinks.base import SinkPosition
from deltaforge_dagster.sinks.nats_errors import (
    NO_MESSAGE,
    NO_STREAM,
    NOBODY_LISTENS,
    ApiError,
    refusal,
)
from deltaforge_dagster.sinks.nats_link import Link


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream as the server described it.

    Attributes:
        name: Its name.
        subjects: Patterns of the subjects that it takes.
        max_message: Bytes of headers and value that it takes, None for no limit of its own.
        last_sequence: Of the last message that it ever got.
        config: The rest of its configuration.
    """

    name: str
    subjects: tuple[str, ...]
    max_message: int | None
    last_sequence: int
    config: Mapping[str, Any]

    @classmethod
    def read(cls, link: Link, name: str, seconds: float) -> Stream:
        """Ask the server.

        Raises:
            SinkRejected: There is no such stream, or no JetStream.
            SinkUnavailable: The server does not answer, or not now.
        """
        answer = link.request(f"$JS.API.STREAM.INFO.{name}", None, seconds)
        if (error := _error(answer)) is not None:
            if error.code == NO_STREAM:
                raise SinkRejected(
                    f"{link.where}: there is no stream {name!r}; make it, with the sink's subject "
                    f"among its subjects: nats stream add {name} --subjects=..."
                )
            if error.code == NOBODY_LISTENS:
                raise SinkRejected(
                    f"{link.where}: JetStream is not enabled on this server; enable it there, or "
                    "leave out `stream` to publish without storing"
                )
            raise refusal(f"{link.where}: stream {name!r}", error)
        config = answer["config"]
        largest = int(config.get("max_msg_size", -1))
        return cls(
            name,
            tuple(config.get("subjects") or ()),
            largest if largest > 0 else None,
            int(answer["state"]["last_seq"]),
            config,
        )

    def takes(self, pattern: str) -> bool:
        """Whether every subject that fits `pattern` is one of the stream's."""
        return any(_includes(one.split("."), pattern.split(".")) for one in self.subjects)

    def takes_some(self, pattern: str) -> bool:
        """Whether some subject that fits `pattern` is one of the stream's."""
        return any(meet(one, pattern) for one in self.subjects)


def fits(pattern: str, subject: str) -> bool:
    """Say whether a subject fits a pattern."""
    return _includes(pattern.split("."), subject.split("."))


def meet(one: str, other: str) -> bool:
    """Say whether some subject fits both patterns."""
    return _meet(one.split("."), other.split("."))


def is_wild(pattern: str) -> bool:
    """Say whether a pattern may fit more than one subject."""
    return not {"*", ">"}.isdisjoint(pattern.split("."))


def _includes(wide: list[str], narrow: list[str]) -> bool:
    for place, word in enumerate(wide):
        if word == ">":
            return len(narrow) > place
        if place >= len(narrow) or narrow[place] == ">":
            return False
        if word != "*" and word != narrow[place]:
            return False
    return len(wide) == len(narrow)


def _meet(one: list[str], other: list[str]) -> bool:
    for mine, theirs in zip(one, other, strict=False):
        if ">" in {mine, theirs}:
            return True
        if mine != theirs and "*" not in {mine, theirs}:
            return False
    return len(one) == len(other)


@dataclass(frozen=True, slots=True)
class Held:
    """What a stream holds of a sink.

    Attributes:
        sequence: Of the last message on the sink's subjects, 0 for none.
        live: Of the last one that moves the position, 0 for none.
        position: What that one says, None when it says nothing, or what it refers to is gone.
        partial: Id of that one when more messages of its change must follow.
        problem: Why there is no telling what is held; None when there is.
    """

    sequence: int
    live: int
    position: SinkPosition | None = None
    partial: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Message:
    subject: str
    sequence: int
    headers: Mapping[str, str]

    @property
    def id(self) -> str:
        return self.headers.get("Nats-Msg-Id", "")

    @property
    def position(self) -> str:
        return self.headers.get("df-position", "")


class Reader:
    """Finds out what a stream holds of a sink.

    Args:
        link: Where to ask.
        stream: Name of the stream.
        pattern: The sink's subjects.
        suffix: Ends the ids of the sink's messages, or stands before `|` there.
        seconds: For one question.
    """

    def __init__(self, link: Link, stream: str, pattern: str, suffix: str, seconds: float) -> None:
        self._link = link
        self._stream = stream
        self._pattern = pattern
        self._suffix = suffix
        self._seconds = seconds

    def held(self) -> Held:
        """Return what the stream holds.

        Raises:
            SinkUnavailable: The server does not answer, or not now.
        """
        last = self._get({"last_by_subj": self._pattern})
        if last is None:
            return Held(0, 0)
        live: _Message | None = last
        if (sequence := _pointed(last.position)) is not None:
            live = self._at(sequence)
        elif f"{self._suffix}|" not in f"{last.id}|":
            problem = (
                f"{self._link.where}: stream {self._stream!r}: the last message on "
                f"{self._pattern!r}, sequence {last.sequence}, is another publisher's; exactly_once "
                "needs subjects that nobody else writes to"
            )
            return Held(last.sequence, last.sequence, problem=problem)
        if live is None:
            return Held(last.sequence, sequence or 0)
        try:
            position, partial = self._position(live)
        except SinkRejected as error:
            return Held(last.sequence, live.sequence, problem=str(error))
        return Held(last.sequence, live.sequence, position, partial)

    def _position(self, message: _Message) -> tuple[SinkPosition | None, str | None]:
        """Return what a message says, and its id when more of its change must follow."""
        text = message.position
        if text.startswith("{"):
            return self._parsed(message, text), None
        if text.startswith("-"):
            before = self._at(_pointed(text[1:]) if "@" in text else message.sequence - 1)
            if before is not None and (sequence := _pointed(before.position)) is not None:
                before = self._at(sequence)
            return None if before is None else self._position(before)[0], message.id
        places, _, rest = text.partition(" ")
        ordinal, _, event_id = rest.partition(" ")
        if not places.isdecimal() or not ordinal.isdecimal():
            return None, None  # sent at least once
        anchor = self._at(message.sequence - int(places))
        if anchor is None:
            return None, None
        position = self._parsed(anchor, anchor.position)
        return replace(position, ordinal=int(ordinal), event_id=event_id), None

    def _parsed(self, message: _Message, text: str) -> SinkPosition:
        try:
            return SinkPosition.from_json(text)
        except SinkRejected as error:
            raise SinkRejected(
                f"{self._link.where}: stream {self._stream!r}: message {message.sequence} on "
                f"{message.subject!r}: df-position: {error}; if nothing else needs it, delete it: "
                "the checkpoint counts then"
            ) from None

    def _at(self, sequence: int | None) -> _Message | None:
        return self._get({"seq": sequence}) if sequence else None

    def _get(self, question: Mapping[str, object]) -> _Message | None:
        answer = self._link.request(
            f"$JS.API.STREAM.MSG.GET.{self._stream}", question, self._seconds
        )
        if (error := _error(answer)) is not None:
            if error.code == NO_MESSAGE:
                return None
            raise refusal(f"{self._link.where}: stream {self._stream!r}", error)
        message = answer["message"]
        lines = base64.b64decode(message.get("hdrs", "")).decode("utf-8", "replace").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:])
        headers = {name: value.strip() for name, _, value in pairs if name}
        return _Message(str(message["subject"]), int(message["seq"]), headers)


def _error(answer: Mapping[str, Any]) -> ApiError | None:
    error = answer.get("error")
    if error is None:
        return None
    code = int(error.get("err_code") or error.get("code") or 0)
    return ApiError(code, str(error.get("description", "")))


def _pointed(text: str) -> int | None:
    """Return the sequence of `@<sequence>`, None for anything else."""
    return int(text[1:]) if text.startswith("@") and text[1:].isdecimal() else None
