"""Reads a sink's JetStream stream: the subjects it captures, and the sink's position in it.

The stream is queried through JetStream's API (docs.nats.io, "NATS API Reference": `STREAM.INFO`,
`STREAM.MSG.GET`).

A sink that delivers exactly once finds its own position in the last message on its subjects, in the
header `df-position`, which `pack.PositionHeader` describes. Messages of a replay move no position,
but are among the others; their `df-position` is `@<sequence>`, the sequence of the last message
before them that moves the position, or 0 if there is none.

`rights` reads, without publishing anything, to which subjects the user may publish. Newer servers
answer `$SYS.REQ.USER.INFO` (nats-server, `events.go`) if the user may publish to it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from deltaforge_dagster.errors import PermissionMissing, SinkRejected
from deltaforge_dagster.sinks.base import SinkPosition
from deltaforge_dagster.sinks.nats.link import (
    NO_MESSAGE,
    NO_STREAM,
    NOBODY_LISTENS,
    ApiError,
    NatsLink,
    refusal,
)

_REFERENCE = re.compile(r"([1-9][0-9]*) ([0-9]+)(?: (.*))?$")
"""A position that refers to a message before it: places, ordinal, event id."""

USER_INFO = "$SYS.REQ.USER.INFO"


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream as the server described it.

    Attributes:
        name: Name of the stream.
        subjects: Patterns of the subjects that it captures.
        max_message: Maximum size of headers and payload; None if the stream has no limit of its
            own.
        last_sequence: Sequence of the last message that it ever stored.
        config: The stream's whole configuration.
    """

    name: str
    subjects: tuple[str, ...]
    max_message: int | None
    last_sequence: int
    config: Mapping[str, Any]

    @classmethod
    def read(cls, link: NatsLink, name: str, seconds: float) -> Stream:
        """Read the description of a stream from the server.

        Raises:
            SinkRejected: There is no such stream, or JetStream is not enabled.
            SinkUnavailable: The server does not answer, or refuses for now.
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
        """Return whether the stream captures every subject that matches `pattern`."""
        return any(_includes(captured.split("."), pattern.split(".")) for captured in self.subjects)

    def takes_some(self, pattern: str) -> bool:
        """Return whether the stream captures some subject that matches `pattern`."""
        return any(meet(captured, pattern) for captured in self.subjects)


def fits(pattern: str, subject: str) -> bool:
    """Return whether a subject matches a pattern, or every subject of another pattern does."""
    return _includes(pattern.split("."), subject.split("."))


def meet(first: str, second: str) -> bool:
    """Return whether some subject matches both patterns."""
    return _overlap(first.split("."), second.split("."))


def is_wild(pattern: str) -> bool:
    """Return whether a pattern has a wildcard, so that it can match more than one subject."""
    return not {"*", ">"}.isdisjoint(pattern.split("."))


def _includes(wide: list[str], narrow: list[str]) -> bool:
    for index, word in enumerate(wide):
        if word == ">":
            return len(narrow) > index
        if index >= len(narrow) or narrow[index] == ">":
            return False
        if word != "*" and word != narrow[index]:
            return False
    return len(wide) == len(narrow)


def _overlap(first: list[str], second: list[str]) -> bool:
    for mine, theirs in zip(first, second, strict=False):
        if ">" in {mine, theirs}:
            return True
        if mine != theirs and "*" not in {mine, theirs}:
            return False
    return len(first) == len(second)


@dataclass(frozen=True, slots=True)
class StreamTail:
    """The last messages of a sink that a stream has.

    Attributes:
        sequence: Sequence of the last message on the sink's subjects, 0 if there is none.
        live: Sequence of the last of these messages that moves the position, 0 if there is none.
        position: Position stated by that message; None if it states none or refers to a message
            that is gone.
        partial: Id of that message if other messages of its change are still missing, else None.
        problem: Why the position cannot be determined, or None.
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
    """Reads the last messages of a sink from a stream.

    Args:
        link: Connection for the requests.
        stream: Name of the stream.
        pattern: Pattern of the sink's subjects.
        suffix: The part of the sink's message ids after the idempotency key; another part may
            follow, after `|`.
        seconds: Timeout of one request.
    """

    def __init__(
        self, link: NatsLink, stream: str, pattern: str, suffix: str, seconds: float
    ) -> None:
        self._link = link
        self._stream = stream
        self._pattern = pattern
        self._suffix = suffix
        self._seconds = seconds

    def tail(self) -> StreamTail:
        """Return the last messages of the sink that the stream has.

        Raises:
            SinkUnavailable: The server does not answer, or refuses for now.
        """
        last = self._get_message({"last_by_subj": self._pattern})
        if last is None:
            return StreamTail(0, 0)
        live: _Message | None = last
        if (sequence := _sequence_in(last.position)) is not None:
            live = self._message_at(sequence)
        elif f"{self._suffix}|" not in f"{last.id}|":
            problem = (
                f"{self._link.where}: stream {self._stream!r}: the last message on "
                f"{self._pattern!r}, sequence {last.sequence}, is another publisher's; "
                "exactly_once needs subjects that nobody else writes to"
            )
            return StreamTail(last.sequence, last.sequence, problem=problem)
        if live is None:
            return StreamTail(last.sequence, sequence or 0)
        try:
            position, partial = self._position(live)
        except SinkRejected as error:
            return StreamTail(last.sequence, live.sequence, problem=str(error))
        return StreamTail(last.sequence, live.sequence, position, partial)

    def _position(self, message: _Message) -> tuple[SinkPosition | None, str | None]:
        """Return the position that a message states, and its id if its change is incomplete."""
        text = message.position
        if text.startswith("{"):
            return self._whole_position(message, text), None
        if text.startswith("-"):
            before = self._message_at(
                _sequence_in(text[1:]) if "@" in text else message.sequence - 1
            )
            if before is not None and (sequence := _sequence_in(before.position)) is not None:
                before = self._message_at(sequence)
            return None if before is None else self._position(before)[0], message.id
        short = _REFERENCE.match(text)
        if short is None:
            return None, None  # sent without a position, at least once
        position = self._referenced_position(message.sequence, int(short[1]))
        if position is None:
            return None, None
        return replace(position, ordinal=int(short[2]), event_id=short[3] or ""), None

    def _referenced_position(self, sequence: int, places: int) -> SinkPosition | None:
        """Return the whole position that is `places` messages before a message; None if it is gone.

        A connection that was lost before may have delivered that earlier message late, amid a block
        that was packed differently. It then refers to yet another message before it.
        """
        while (anchor := self._message_at(sequence - places)) is not None:
            short = _REFERENCE.match(anchor.position)
            if short is None:
                return self._whole_position(anchor, anchor.position)
            sequence, places = anchor.sequence, int(short[1])
        return None

    def _whole_position(self, message: _Message, text: str) -> SinkPosition:
        try:
            return SinkPosition.from_json(text)
        except SinkRejected as error:
            raise SinkRejected(
                f"{self._link.where}: stream {self._stream!r}: message {message.sequence} on "
                f"{message.subject!r}: df-position: {error}; if nothing else needs it, delete it: "
                "the checkpoint counts then"
            ) from None

    def _message_at(self, sequence: int | None) -> _Message | None:
        return self._get_message({"seq": sequence}) if sequence else None

    def _get_message(self, question: Mapping[str, object]) -> _Message | None:
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


def _sequence_in(text: str) -> int | None:
    """Return the sequence in `@<sequence>`, or None for any other text."""
    return int(text[1:]) if text.startswith("@") and text[1:].isdecimal() else None


@dataclass(frozen=True, slots=True)
class Rights:
    """The subjects to which a user may publish.

    Attributes:
        allow: Patterns of allowed subjects; empty if all are allowed.
        deny: Patterns of denied subjects, which override `allow`.
    """

    allow: Sequence[str]
    deny: Sequence[str]

    def of(self, pattern: str) -> Literal["all", "some", "none"]:
        """Return whether the user may publish to all, some or none of the subjects of `pattern`."""
        allowed = not self.allow or any(meet(rule, pattern) for rule in self.allow)
        if not allowed or any(fits(rule, pattern) for rule in self.deny):
            return "none"
        whole = not self.allow or any(fits(rule, pattern) for rule in self.allow)
        return "all" if whole and not any(meet(rule, pattern) for rule in self.deny) else "some"


def rights(link: NatsLink, seconds: float) -> Rights | None:
    """Return the subjects to which the user may publish, or None if the server does not tell.

    Raises:
        SinkUnavailable: The server does not answer.
    """
    try:
        answer = link.request(USER_INFO, None, seconds)
    except PermissionMissing:
        return None
    data = answer.get("data")
    if not isinstance(data, dict):
        return None
    publish = (data.get("permissions") or {}).get("publish") or {}
    return Rights(tuple(publish.get("allow") or ()), tuple(publish.get("deny") or ()))
