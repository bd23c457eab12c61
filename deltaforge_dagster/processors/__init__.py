"""Transform changes between journal and sink, as functions of Arrow batches of the change frame.

- The processor chain of a pipeline file runs once per segment: `base` defines the interface and
  validates the output of user code, `chain` runs the processors in order. The processors are
  `filter`, `flatten`, `outbox`, `sql` (with `sql_values`), `python` (with `python_function`, and
  with a time limit `python_child`), `javascript` (in `v8`) and `plugins`; `code` finds and hashes
  user functions, and hashes the chain.
- `messages` then turns each change into one or several messages: envelope, destination and key.
"""
