"""`spec.sinks`: the sinks of a pipeline file; `base` has the options of every sink, `later` those not supported yet."""
