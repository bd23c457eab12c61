"""Delivery: one thread per sink sends the journal to it.

`deliverer_set` starts and ends the threads. A `deliverer` is such a thread, which waits after
failures. What it delivers is either messages or changes of tables (`table_delivery`). The delivery
of `messages` resumes where `resumption` says, has a `sender` send `batches`, set aside
`dead_letters`, which `redrive` sends again on request, and move the checkpoint.
"""
