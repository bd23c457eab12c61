"""A live run: the one process that holds a pipeline's lease, captures and delivers.

`live` is the run and its result, `leased_work` what it does with the lease, for which `kernels` are
compiled first; `progress` decides when it ends and logs what it does, `confirmer` moves the
committed position, and `catch_up` is the same delivery for one sink on request.
"""
