"""The connection of a log stream: the `socket` that receives, the `read_buffer` that is decoded, and a `time_limit`."""
