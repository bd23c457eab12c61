"""The connection of a log stream: the `socket` that receives, the `read_buffer` for the decoder, and a `time_limit`."""
