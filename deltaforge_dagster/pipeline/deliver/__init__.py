"""Delivery: one thread per sink sends the journal to it.

`deliverer_set` starts and ends the threads. A `deliverer` is such a thread, which waits after
failures (`retries`). What it delivers is either messages or, in `pipeline.lake`, changes of tables.
The delivery of `messages` opens a `connection`, resumes where `resumption` says (`resume` has the
rules), has a `sender` send `batches` within a `deadline` and set aside `dead_letters`, which
`redrive` sends again on request, and moves the checkpoint (`progress`).
"""
