"""The connection of a log stream: its `socket`, the decoder's `read_buffer`, a `time_limit`."""
