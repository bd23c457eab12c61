"""Delivery: one thread per sink sends the journal to it.

`deliverer_set` starts and ends the threads; a `deliverer` resumes where `resumption` says (`resume` has the rules),
sends `batches` within a `deadline`, and sets aside `dead_letters`, which `redrive` sends again on request.
"""
