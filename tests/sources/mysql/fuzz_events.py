"""Decode mutated logs with every kind of event: a program of its own, too.

`python -m tests.sources.mysql.fuzz_events COUNT SEED` decodes COUNT inputs and prints how many gave
rows and how many an error. It ends with a traceback at the first input that gives anything but rows
of valid JSON or an error of the tree; the message says its seed.
"""

from __future__ import annotations

import json
import random
import sys

from deltaforge_dagster.errors import CorruptLog, DeltaforgeError, PositionLost, UnsupportedEvent
from deltaforge_dagster.sources.mysql.events.binlog import (
    CHECKSUM_SIZE,
    FORMAT_DESCRIPTION,
    HEADER,
    ROTATE,
    TRANSACTION_PAYLOAD,
)
from deltaforge_dagster.sources.mysql.events.compressed_events import (
    events,
    payload_blocks,
    without_checksum,
)
from deltaforge_lab.synthetic import mysql_events as samples
from deltaforge_lab.synthetic.mysql_events import SyntheticLog
from tests.sources.mysql import recorded
from tests.sources.mysql.decode.test_decoder import every_type, make_decoder
from tests.sources.mysql.test_events import XID, compressed, tagged, xa

SPICE = [b"\0", b"\xff", b"\xfe", b"\xfd", b"\xfc", b"\xfb", b"\x7f", b"\x80", b"BEGIN", b"COMMIT"]
SPICE += [b"XA COMMIT", b"TRUNCATE ", b"CREATE TABLE", b"\1\0\0\0", b"\xff\xff\xff\xff", b"'", b"`"]


def events_of(stream: bytes) -> list[bytes]:
    """Return the events of a stream without packets and checksums, those in payloads too."""
    found = []
    at = 0
    while at < len(stream):
        size = int.from_bytes(stream[at : at + 3], "little")
        event = without_checksum(stream[at + 5 : at + 4 + size - CHECKSUM_SIZE])
        at += 4 + size
        if event[4] in {ROTATE, FORMAT_DESCRIPTION}:
            continue
        found.append(event)
        if event[4] == TRANSACTION_PAYLOAD:
            found += events(payload_blocks(event[HEADER:]))
    return found


def corpus() -> list[list[bytes]]:
    """Return the events of some logs that a decoder reads to their end."""
    xa_log = xa(xa(SyntheticLog().start(), 1, 1, 2), 2, 3, one_phase=True)
    xa_log.gtid(3).query(f"XA COMMIT {XID}")
    mixed = SyntheticLog().start().event(42, tagged(7, "batch")).query("CREATE TABLE `t` (id int)")
    mixed.gtid(8).query("TRUNCATE users").gtid(9).query("GRANT ALL ON *.* TO x").event(27, b"f")
    logs = [recorded.stream(), every_type().stream, xa_log.stream(), mixed.stream()]
    logs.append(samples.orders(30, rows_per_tx=10, rows_per_event=5))
    return [events_of(log) for log in logs]


def mutated(chance: random.Random, content: bytes, share: float = 1.0) -> bytes:
    """Return the bytes with some changed, cut out, put in or repeated."""
    if chance.random() > share:
        return content
    out = bytearray(content)
    for _ in range(chance.randint(1, 3)):
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


def changed(chance: random.Random, event: bytes) -> bytes:
    """Return an event with a mutated body, in a payload or not, and its size in the header."""
    if chance.random() < 0.02:
        return mutated(chance, event)
    body = mutated(chance, event[HEADER:], 0.3)
    size = (HEADER + len(body)).to_bytes(4, "little")
    return event[:9] + size + event[13:HEADER] + body


def stream(chance: random.Random, logs: list[list[bytes]]) -> bytes:
    """Return a log without checksums: some events of one of them, mutated, cut out or moved."""
    log = list(chance.choice(logs))
    for _ in range(chance.randrange(3)):
        at = chance.randrange(len(log))
        match chance.randrange(3):
            case 0:
                del log[at]
            case 1:
                log.insert(at, chance.choice(chance.choice(logs)))
            case _:
                log[at] = changed(chance, log[at])
        log = log or [b""]
    if chance.random() < 0.2:  # some of it in a compressed transaction
        first, last = sorted(chance.choices(range(len(log) + 1), k=2))
        body = mutated(chance, compressed(b"".join(log[first:last])), 0.1)
        log[first:last] = [log[0][:4] + bytes([TRANSACTION_PAYLOAD]) + log[0][5:HEADER] + body]
        log[first] = without_checksum(log[first])
    head = SyntheticLog(checksums=False).start().stream()
    whole = b"".join(samples.packets(b"\0" + event) for event in log)
    return head + mutated(chance, whole, 0.1)


def decode(chance: random.Random, content: bytes) -> DeltaforgeError | None:
    """Decode in pieces, and check what comes out."""
    decoder = make_decoder()
    tail, at = b"", 0
    cuts = chance.choices(range(len(content) + 1), k=chance.randrange(3))
    for cut in sorted({*cuts, len(content)}):
        piece, again = tail + content[at:cut], True
        while again:
            decoded = decoder.feed(piece, len(piece))
            for batch in decoded.batches:
                if batch.rows is not None:
                    for name in ("before", "after", "key", "ddl"):
                        for text in batch.rows.column(name).to_pylist():
                            check(text)
            piece, again = piece[decoded.consumed :], decoded.again
        if decoded.error is not None or decoded.foreign:
            return decoded.error
        tail, at = piece, cut
    return None


def check(text: str | None) -> None:
    """See to it that a row image is a JSON object."""
    if text is not None:
        assert isinstance(json.loads(text, parse_int=str, parse_float=str), dict)


def main(count: int, seed: int) -> dict[str, int]:
    """Decode so many inputs; return how often each outcome was."""
    logs = corpus()
    outcomes: dict[str, int] = {}
    for number in range(seed, seed + count):
        chance = random.Random(number)
        try:
            error = decode(chance, stream(chance, logs))
            assert error is None or isinstance(error, CorruptLog | UnsupportedEvent | PositionLost)
        except BaseException as failure:
            failure.add_note(f"seed {number}")
            raise
        outcome = type(error).__name__
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
