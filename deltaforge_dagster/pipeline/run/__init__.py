"""A live run: the one process that holds a pipeline's lease, captures and delivers.

`live` is the run, `leased_work` what it does with the lease, `outcome` its result; `end` decides
when it ends, `summary` logs what it does, `capture_watch` notes in the state store how capture
fares, `confirmer` moves the committed position, and `catch_up` is the same delivery for one sink on
request.
"""
