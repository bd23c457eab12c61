"""Sinks: one module per destination, all behind `base.Sink`."""
