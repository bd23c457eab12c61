"""Reads messages of compliance-audit-trail.yaml, one a line, and prints their tags as objects.

    kcat -b localhost:9092 -t audit.trail.events -C -e | python examples/workers/tag_parser.py

`retention:2190d` is `{"retention": "2190d"}`, a name that comes several times has a list, and a tag
without a colon is true.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable


def parsed(tags: Iterable[str]) -> dict[str, str | list[str] | bool]:
    """Return tags as an object."""
    found: dict[str, str | list[str] | bool] = {}
    for tag in tags:
        name, colon, value = tag.partition(":")
        before = found.get(name)
        if not colon:
            found[name] = True
        elif isinstance(before, list):
            before.append(value)
        elif isinstance(before, str):
            found[name] = [before, value]
        else:
            found[name] = value
    return found


def main() -> None:
    """Print a line for each message on the standard input."""
    for line in sys.stdin:
        event = json.loads(line)["payload"]
        where = {"table": event["source"]["table"], "op": event["op"]}
        sys.stdout.write(f"{json.dumps({**where, **parsed(event['tags'])})}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
