"""How often Dagster is told to look, so that it does as often as the pipeline's file asks for."""

from deltaforge_dagster.config.load import LoadedPipeline


def interval_seconds(loaded: LoadedPipeline) -> int:
    """Return a sensor's `minimum_interval_seconds`: a second less than the file says.

    Dagster's daemon goes through all sensors every five seconds, and a tick is stamped amid a round. At
    the round five seconds later it is a few milliseconds too young for an interval of five, and the sensor
    is left out until the next: five seconds would often mean ten.
    """
    return max(1, loaded.spec.spec.engine.dagster.sensor_interval_seconds - 1)
