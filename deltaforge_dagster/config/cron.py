"""A small check of cron schedules, so that a wrong one is a problem of its pipeline file."""

from __future__ import annotations

import re

_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, 1)}),
    ("day of week", 0, 7, {name: number for number, name in enumerate(_DAYS)}),
)
_ITEM = re.compile(r"(?:\*|(\w+)(?:-(\w+))?)(?:/(\d+))?")


def cron_problem(text: str) -> str | None:
    """Return what is wrong with a schedule of five fields (crontab(5)), or None."""
    fields = text.split()
    if len(fields) != len(_FIELDS):
        return f"has {len(fields)} fields, a schedule has five (minute hour day month weekday)"
    for value, (name, low, high, names) in zip(fields, _FIELDS, strict=True):
        for item in value.lower().split(","):
            match = _ITEM.fullmatch(item)
            bounds = (
                [names.get(bound, bound) for bound in match.groups()[:2] if bound] if match else []
            )
            numbers = [int(bound) for bound in bounds if str(bound).isdecimal()]
            fits = len(numbers) == len(bounds) and all(low <= n <= high for n in numbers)
            if not match or not fits or numbers != sorted(numbers) or match[3] == "0":
                return f"has a wrong {name} field (numbers from {low} to {high}, `*`, `a-b`, `*/n`)"
    return None
