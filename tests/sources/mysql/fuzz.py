"""A program that decodes mutated real binary logs; `test_fuzz` runs it with bounds checking on.

Arguments: a file of recorded transactions, how many inputs, a seed. It prints how often each outcome
was, as JSON. Anything but rows of valid JSON or an error of the tree ends it with a traceback, and
the input that did it.
"""

from __future__ import annotations

import base64
import collections
import json
import random
import sys
import zlib
from pathlib import Path
from typing import Any

from deltaforge_lab.synthetic.mysql_events import packets
from tests.sources.mysql.decode.test_decoder import make_decoder

HEADER, SUM = 19, 4
GTID, XID, FORMAT, ROTATE = 33, 16, 15, 4


def events_of(stream: bytes) -> list[bytes]:
    """Return the events of a recorded dump, without packet headers and checksums."""
    found, at, event = [], 0, b""
    while at < len(stream):
        size = int.from_bytes(stream[at : at + 3], "little")
        event += stream[at + 4 : at + 4 + size]
        at += 4 + size
        if size < 0xFFFFFF:
            found.append(event[1:-SUM])
            event = b""
    return found


def save(events: list[bytes], path: Path) -> None:
    """Write what the program reads."""
    path.write_text(json.dumps([base64.b64encode(event).decode() for event in events]))


def with_sum(event: bytes) -> bytes:
    """Return the packet of an event whose size and checksum fit it, whatever is in it."""
    event = event[:9] + (len(event) + SUM).to_bytes(4, "little") + event[13:]
    return packets(b"\0" + event + zlib.crc32(event).to_bytes(SUM, "little"))


def mutated(rng: random.Random, event: bytes) -> bytes:
    """Return an event with a few bytes changed, added or missing behind its header."""
    body = bytearray(event[HEADER:])
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(8):
            case 0 | 1 | 2 if at < len(body):
                body[at] = rng.choice(
                    (0, 1, 0x7F, 0x80, 0xFB, 0xFC, 0xFE, 0xFF, rng.randrange(256))
                )
            case 3 if at < len(body):
                body[at] ^= 1 << rng.randrange(8)
            case 4:
                del body[at : at + rng.choice((1, 2, 4, 30, len(body)))]
            case 5:
                body[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
            case 6:
                other = rng.randrange(len(body) + 1)
                body[at : at + 8] = body[other : other + 8]
            case _:
                body[at : at + 4] = rng.randrange(1 << 32).to_bytes(4, "little")
    if not rng.randrange(50):
        body = bytearray(rng.randbytes(rng.randrange(200)))
    head = bytearray(event[:HEADER])
    if not rng.randrange(20):
        head[4] = rng.choice((23, 24, 25, 30, 31, 32, 39, 19, 2, 33, 40, 42, 38, 162, 166))
    return bytes(head + body)


def decode(stream: bytes, rng: random.Random) -> str:
    """Decode a stream, in one piece or two; return what became of it."""
    decoder = make_decoder()
    rest, pieces = b"", [stream]
    if rng.randrange(2):
        cut = rng.randrange(len(stream))
        pieces = [stream[:cut], stream[cut:]]
    for piece in pieces:
        rest += piece
        again = True
        while again:
            decoded = decoder.feed(rest, len(rest))
            assert 0 <= decoded.consumed <= len(rest)
            rest, again = rest[decoded.consumed :], decoded.again
            for batch in decoded.batches:
                if batch.rows is not None:
                    batch.rows.validate(full=True)
                    for row in batch.rows.select(["before", "after", "key"]).to_pylist():
                        for text in row.values():
                            assert text is None or json.loads(text) is not None
            if decoded.error is not None:
                return type(decoded.error).__name__
            if decoded.foreign:
                return "foreign"
    return "rows"


def main(path: str, count: int, seed: int) -> dict[str, int]:
    """Decode so many inputs."""
    events = [base64.b64decode(text) for text in json.loads(Path(path).read_text())]
    head = b"".join(with_sum(e) for e in events if e[4] in (ROTATE, FORMAT))
    transactions: list[list[bytes]] = []
    for event in events:
        if event[4] == GTID:
            transactions.append([])
        if transactions and event[4] not in (ROTATE, FORMAT):
            transactions[-1].append(event)
    transactions = [t for t in transactions if t[-1][4] == XID]
    outcomes: collections.Counter[str] = collections.Counter()
    rng = random.Random(seed)
    for _ in range(count):
        chosen = list(rng.choice(transactions))
        at = rng.randrange(2, len(chosen) - 1) if rng.randrange(8) else rng.randrange(len(chosen))
        chosen[at] = mutated(rng, chosen[at])
        stream = head + b"".join(map(with_sum, chosen))
        try:
            outcomes[decode(stream, rng)] += 1
        except BaseException:
            print(  # noqa: T201 - its output
                base64.b64encode(stream).decode(), file=sys.stderr
            )
            raise
    return dict(outcomes)


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    outcome = main(arguments[0], int(arguments[1]), int(arguments[2]))
    print(json.dumps(outcome))  # noqa: T201 - its output
