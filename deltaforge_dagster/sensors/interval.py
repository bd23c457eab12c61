"""The interval of a sensor in Dagster that yields the interval configured in the pipeline file."""

from deltaforge_dagster.config.file.load import LoadedPipeline


def interval_seconds(loaded: LoadedPipeline) -> int:
    """Return a sensor's `minimum_interval_seconds`: one second less than the file says.

    Dagster's daemon evaluates all sensors every five seconds, and a tick gets its timestamp during
    a round. In the round five seconds later, the tick is a few milliseconds too young for an
    interval of five seconds, and the sensor is skipped until the next round. With an interval of
    five it would often run only every ten seconds.
    """
    return max(1, loaded.spec.spec.engine.dagster.sensor_interval_seconds - 1)
