"""What transforms changes between journal and sink, as functions of Arrow batches of the change frame.

- The processor chain of a pipeline file runs once per segment: `base` defines the interface, `chain` runs the
  processors in order, `checks` validates the output of user code. The processors are `filter`, `flatten`,
  `outbox`, `sql`, `python` (`python_function`, `python_child`), `javascript` (`script`) and `plugins`; `code`
  hashes the chain.
- Then each change becomes messages: `expansion` (several messages for one change), `envelope` (the value) and
  `routing` (destination and key), all built with `text`. `json_fields`, `spliced_fields` and `spelling` read
  and set single fields of row images in place.
"""
