"""A check of cron schedules, so that an invalid one is reported as a problem of the pipeline file."""

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
_ITEM = re.compile(r"(?a)(?:\*|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>[0-9]+))?")


_DAYS_OF_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def cron_problem(text: str) -> str | None:
    """Return what is wrong with a five-field schedule (crontab(5)), or None."""
    fields = text.lower().split()
    if len(fields) != len(_FIELDS):
        return f"has {len(fields)} fields, a schedule has five (minute hour day month weekday)"
    values: list[set[int]] = []
    for field, (name, low, high, names) in zip(fields, _FIELDS, strict=True):
        items = [_numbers(item, low, high, names) for item in field.split(",")]
        if not all(items):
            return f"has a wrong {name} field (numbers from {low} to {high}, `*`, `a-b`, `*/n`)"
        values.append(set().union(*items))
    _, _, days, months, _ = values
    if min(days) > max(_DAYS_OF_MONTH[month - 1] for month in months):
        return "names a day that none of its months has"
    return None


def _numbers(item: str, low: int, high: int, names: dict[str, int]) -> range:
    """Return the numbers that one item of a field stands for; empty if the item is invalid."""
    match = _ITEM.fullmatch(item)
    if match is None or not 1 <= int(match["step"] or 1) <= high:
        return range(0)  # `*/90` minutes would silently run once an hour
    first = names.get(match["first"], match["first"] or low)
    last = names.get(match["last"], match["last"] or (first if match["first"] else high))
    if not (str(first).isdecimal() and str(last).isdecimal()):
        return range(0)
    if not low <= int(first) <= int(last) <= high:
        return range(0)
    return range(int(first), int(last) + 1, int(match["step"] or 1))
