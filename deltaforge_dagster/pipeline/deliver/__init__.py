"""Delivery: one thread per sink sends the journal to it.

`deliverer_set` starts and ends the threads. A `deliverer` is such a thread; what it does stands in modules of their own: it
opens a `connection`, resumes where `resumption` says (`resume` has the rules), has a `sender` send `batches` within a
`deadline` and set aside `dead_letters`, which `redrive` sends again on request, moves the checkpoint (`progress`) and waits
after failures (`retries`). Its parts share a `context`.
"""
