"""Transform changes between journal and sink, as functions of Arrow batches of the change frame.

- The processor chain of a pipeline file runs once per segment: `base` defines the interface,
  `chain` runs the processors in order, `checks` validates the output of user code. The processors
  are `filter`, `flatten`, `outbox`, `sql`, `python`, `javascript` and `plugins`; `code` hashes the
  chain.
- `messages` then turns each change into one or several messages: envelope, destination and key.
"""
