"""`deltaforge bench`: benchmarks, each measured together with the raw limit of the machine."""
