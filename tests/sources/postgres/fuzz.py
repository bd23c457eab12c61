"""Decode mutated streams with bounds checking on: a program of its own, run by `test_fuzz`.

`python -m tests.sources.postgres.fuzz RECORDED COUNT SEED` decodes COUNT inputs and prints how many
gave rows and how many an error. It ends with a traceback at the first input that gives anything but
rows of valid JSON or an error of the tree; the message says its seed.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltaforge_dagster.errors import CorruptLog, DeltaforgeError, UnsupportedEvent
from deltaforge_dagster.sources.postgres.decode.batches import UnchangedToast
from deltaforge_dagster.sources.postgres.decode.decoder import PostgresDecoder
from deltaforge_dagster.sources.postgres.decode.pgoutput import xlog
from deltaforge_dagster.sources.postgres.decode.rows import MARK, OMIT
from deltaforge_dagster.sources.postgres.decode.toast_reselect import Answer, Question
from deltaforge_dagster.sources.postgres.decode.types import BUILT_IN, ISO_TIMESTAMPS, CatalogType
from deltaforge_dagster.sources.postgres.decode.versions import PostgresTableContext
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.snapshot.copy_text import read_copied
from deltaforge_dagster.sources.postgres.snapshot.selected import PostgresSelectedRows
from deltaforge_lab.synthetic import postgres_messages as samples
from tests.sources.postgres.reference import Registry

SPICE = [b"{", b"}", b'"', b"\\", b",", b"[", b"]", b"\\x", b"NULL", b"\0", b"\xff", b"\t", b"\n"]
SPICE += [b"\\N", b"n", b"u", b"t", b"K", b"O", b"N", b"0", b"-", b"1e5", b"\xc3", b":", b"="]


@dataclass
class Recorded:
    """Messages of a real stream, and what the catalog said of types that are not built in."""

    messages: list[bytes]
    types: dict[int, CatalogType]

    @classmethod
    def load(cls, path: Path) -> Recorded:
        """Read what `save` has written."""
        found = json.loads(path.read_text())
        types = {int(oid): CatalogType(*fields) for oid, fields in found["types"].items()}
        return cls([bytes.fromhex(message) for message in found["messages"]], types)

    def save(self, path: Path) -> None:
        """Write a file for `load`."""
        types = {
            oid: (t.name, t.kind, t.element, t.delimiter, t.base) for oid, t in self.types.items()
        }
        messages = [message.hex() for message in self.messages]
        path.write_text(json.dumps({"messages": messages, "types": types}))

    def primary_key(self, relation: int) -> tuple[str, ...]:
        """Know the key that every table of the test has."""
        del relation
        return ("id",)

    def type(self, oid: int) -> CatalogType | None:
        """Know what was asked when the stream was recorded."""
        return self.types.get(oid)

    def remade_type(self, schema: str, name: str) -> int | None:
        """Know no type that was made again."""
        del schema, name
        return None

    def system_type(self, name: str) -> int | None:
        """Know one name."""
        return 23 if name == "int4" else None


@dataclass
class Odd:
    """Answers questions for values of now with mutated text."""

    random: random.Random

    def answer(self, question: Question) -> Answer:
        """Return lines that mostly follow COPY's format."""
        values = [b"1", b"\\N", b'{"a":\\\\"b"}', b"\\\\\\\\x00", b"{1,2}", b"x" * 50]
        lines = [
            b"\t".join([b"%d" % number, *self.random.choices(values, k=len(question.columns))])
            for number in range(question.rows)
            if self.random.random() < 0.9
        ]
        copied = b"".join(line + b"\n" for line in lines)
        asked = self.random.randint(1, question.rows)
        return Answer(question.columns, mutated(self.random, copied, 0.2), asked)


def mutated(chance: random.Random, content: bytes, share: float = 1.0) -> bytes:
    """Return the bytes with some changed, cut out, put in or repeated."""
    if chance.random() > share:
        return content
    out = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(5):
            case 0 if at < len(out):
                out[at] = chance.randrange(256)
            case 1:
                out[at:at] = chance.choice(SPICE)
            case 2:
                del out[at : at + chance.choice([1, 1, 4, 50])]
            case 3:
                out[at:at] = out[at : at + chance.randrange(40)]
            case _:
                spice = chance.choice(SPICE)
                out[at : at + len(spice)] = spice
    return bytes(out)


def stream(chance: random.Random, recorded: Recorded) -> bytes:
    """Return a transaction with some of the recorded messages, some of them mutated."""
    relations = [m for m in recorded.messages if m[:1] == b"R"]
    described = chance.choice(relations)
    oid = described[1:5]
    changes = [m for m in recorded.messages if m[:1] in b"IUD" and m[1:5] == oid] or [b"?"]
    parts = [mutated(chance, described, 0.1)]
    parts += [
        update(chance, mutated(chance, chance.choice(changes), 0.5))
        for _ in range(chance.randint(1, 3))
    ]
    if chance.random() < 0.05:
        parts.append(chance.randbytes(chance.randrange(60)))
    framed = [samples.begin(1050, 0, 7), *parts, samples.commit(1050, 1060, 0)]
    whole = b"".join(xlog(1000 + n, part) for n, part in enumerate(framed) if part)
    return mutated(chance, whole, 0.1)


def update(chance: random.Random, message: bytes) -> bytes:
    """Make an update of some of the inserts, with the same row as the old one or none."""
    if message[:1] != b"I" or len(message) < 7 or chance.random() < 0.5:
        return message
    new = mutated(chance, message[6:], 0.3)
    marked = bytearray(new)
    for _ in range(chance.randrange(4)):
        at = marked.find(b"n", chance.randrange(len(marked) + 1))
        if at >= 0:
            marked[at] = ord("u")
    old = chance.choice([b"", b"O" + message[6:], b"K" + message[6:]])
    return b"U" + message[1:5] + old + b"N" + bytes(marked)


def decode(chance: random.Random, recorded: Recorded, content: bytes) -> DeltaforgeError | None:
    """Decode in pieces, and check what comes out."""
    unchanged_toast: UnchangedToast = chance.choice([MARK, OMIT, Odd(chance)])
    context = PostgresTableContext(
        "fuzz",
        Registry(),
        recorded,
        captures=lambda _schema, _table: True,
        built_in=chance.choice([BUILT_IN, ISO_TIMESTAMPS]),
    )
    decoder = PostgresDecoder(
        context, source_id="fuzz", start=LsnPosition(0), unchanged_toast=unchanged_toast
    )
    tail, at = b"", 0
    for cut in sorted(
        {*chance.choices(range(len(content) + 1), k=chance.randrange(3)), len(content)}
    ):
        piece = tail + content[at:cut]
        decoded = decoder.feed(piece, len(piece))
        for batch in decoded.batches:
            if batch.rows is not None:
                for name in ("before", "after", "key"):
                    for text in batch.rows.column(name).to_pylist():
                        check(text)
        if decoded.error is not None or decoded.foreign:
            return decoded.error
        tail, at = piece[decoded.consumed :], cut
    return None


def check(text: str | None) -> None:
    """See to it that a row image is a JSON object."""
    if text is not None:
        assert isinstance(json.loads(text, parse_int=str, parse_float=str), dict)


def select(chance: random.Random) -> None:
    """Convert mutated COPY text."""
    types = chance.choices(list(chance.choice([BUILT_IN, ISO_TIMESTAMPS]).values()), k=3)
    values = [
        b"1",
        b"2026-03-01 12:00:00+00",
        b"\\N",
        b"t",
        b"{1,NULL}",
        b'{"a": [1]}',
        b"\\\\\\\\xff",
        b"{a}",
        b"a\\tb",
    ]
    lines = [b"\t".join(chance.choices(values, k=3)) + b"\n" for _ in range(chance.randrange(5))]
    copied = mutated(chance, b"".join(lines), 0.7)
    try:
        read_copied(copied, 3)
        images, _ = PostgresSelectedRows({f"c{n}": type_ for n, type_ in enumerate(types)}).write(
            copied
        )
    except (CorruptLog, UnsupportedEvent):
        return
    try:
        images.validate(full=True)
    except ValueError:  # not UTF-8: the caller's check, as for the log
        return
    for text in images.to_pylist():
        check(text)


def main(path: Path, count: int, seed: int) -> dict[str, Any]:
    """Decode so many inputs; return how often each outcome was."""
    recorded = Recorded.load(path)
    outcomes: dict[str, int] = {}
    for number in range(seed, seed + count):
        chance = random.Random(number)
        try:
            if number % 4 == 0:
                select(chance)
            error = decode(chance, recorded, stream(chance, recorded))
            assert error is None or isinstance(error, CorruptLog | UnsupportedEvent)
        except BaseException as failure:
            failure.add_note(f"seed {number}")
            raise
        outcome = type(error).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


def messages_of(content: bytes) -> list[bytes]:
    """Return the pgoutput messages of a stream, each once."""
    found = []
    at = 0
    while len(content) - at >= 5:
        size = struct.unpack_from(">I", content, at + 1)[0]
        if content[at + 5 : at + 6] == b"w":
            found.append(content[at + 30 : at + 1 + size])
        at += 1 + size
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
