"""The sinks of a pipeline file (spec.sinks); `base` has the options of every sink, `later` those not supported yet."""
