import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deltaforge_dagster.config.engine import ReconcileOptions, cron_problem


def field(low: int, high: int) -> st.SearchStrategy[str]:
    """Draw fields of a schedule: numbers, ranges, steps and lists, most of them valid."""
    number = st.integers(low, high).map(str)
    piece = st.one_of(st.just("*"), number, st.tuples(number, number).map("-".join))
    item = st.one_of(piece, st.tuples(piece, st.integers(0, 99).map(str)).map("/".join))
    return st.lists(item, min_size=1, max_size=2).map(",".join)


SCHEDULE = st.tuples(field(0, 59), field(0, 23), field(1, 31), field(1, 12), field(0, 7))


@pytest.mark.parametrize(
    "schedule", ["* * * * *", "*/5 0-6 1,15 jan-mar MON-FRI", "0 0 31 12 7", "10-50/10 * * * *"]
)
def test_schedules_of_five_fields_are_accepted(schedule: str) -> None:
    """Numbers, names, lists, ranges and steps of crontab(5) are accepted."""
    assert cron_problem(schedule) is None


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ("* * * *", "has 4 fields"),
        ("hourly", "has 1 fields"),
        ("60 * * * *", "has a wrong minute field"),
        ("* 24 * * *", "has a wrong hour field"),
        ("* * 0 * *", "has a wrong day of month field"),
        ("* * * 13 *", "has a wrong month field"),
        ("* * * * funday", "has a wrong day of week field"),
        ("5-1 * * * *", "has a wrong minute field"),
        ("*/0 * * * *", "has a wrong minute field"),
        ("*/90 * * * *", "has a wrong minute field"),
        ("1, * * * *", "has a wrong minute field"),
        ("0 0 30 feb *", "names a day that none of its months has"),
    ],
)
def test_wrong_schedules_are_named(schedule: str, problem: str) -> None:
    """The message names the invalid field."""
    assert (cron_problem(schedule) or "").startswith(problem)


# Dagster also warns about ranges such as `0-0`, which are valid.
@pytest.mark.filterwarnings("ignore:Found a cron schedule with an interval")
@given(SCHEDULE.map(" ".join))
def test_what_is_accepted_is_accepted_by_dagster(schedule: str) -> None:
    """Dagster can load the definitions of any schedule that is accepted here."""
    if cron_problem(schedule) is None:
        dg.ScheduleDefinition(name="any", job_name="any", cron_schedule=schedule)


@pytest.mark.parametrize(
    ("window", "second", "left"),
    [
        ("01:00-05:00", 3600, 14_400),
        ("01:00-05:00", 17_999, 1),
        ("01:00-05:00", 18_000, 0),
        ("01:00-05:00", 0, 0),
        ("22:30-04:00", 0, 14_400),
        ("22:30-04:00", 81_000, 19_800),
        ("22:30-04:00", 80_999, 0),
    ],
)
def test_a_window_of_the_day(window: str, second: float, left: float) -> None:
    """It is open from its beginning until just before its end, also across midnight."""
    assert ReconcileOptions(every="7d", window=window).seconds_left(second) == left


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every": "7"}, "must be a number of hours or days"),
        ({"every": "0d"}, "must be a number of hours or days"),
        ({"every": "1d", "window": "1:00-5:00"}, "must be two times of a day"),
        ({"every": "1d", "window": "24:00-05:00"}, "must be two times of a day"),
        ({"every": "1d", "window": "05:00-05:00"}, "must be two times of a day"),
        ({"window": "01:00-05:00"}, "need every"),
        ({"rate": 5}, "need every"),
    ],
)
def test_wrong_times_of_comparisons_are_named(options: dict[str, object], problem: str) -> None:
    """The message says what to write."""
    with pytest.raises(ValidationError, match=problem):
        ReconcileOptions.model_validate(options)


def test_periods_in_seconds() -> None:
    """Hours and days; without a period there is none."""
    assert ReconcileOptions(every="12h").every_seconds == 43_200
    assert ReconcileOptions(every="7d").every_seconds == 604_800
    assert ReconcileOptions().every_seconds is None
