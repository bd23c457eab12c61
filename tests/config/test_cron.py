import pytest

from deltaforge_dagster.config.cron import cron_problem


@pytest.mark.parametrize(
    "schedule", ["* * * * *", "*/5 0-6 1,15 jan-mar MON-FRI", "0 0 31 12 7", "10-50/10 * * * *"]
)
def test_schedules_of_five_fields_are_accepted(schedule: str) -> None:
    """Numbers, names, lists, ranges and steps of crontab(5) are fine."""
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
        ("1, * * * *", "has a wrong minute field"),
    ],
)
def test_wrong_schedules_are_named(schedule: str, problem: str) -> None:
    """The sentence names the field that is wrong."""
    assert (cron_problem(schedule) or "").startswith(problem)
