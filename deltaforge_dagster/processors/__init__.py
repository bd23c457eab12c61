"""What happens to changes between journal and sink, as functions of Arrow batches of the change frame.

- The chain of a pipeline file runs once per segment: `base` is the seam, `chain` runs processors one behind
  the other and holds them to `checks`. They are `filter`, `flatten`, `outbox`, `sql`, `python`
  (`python_function`, `python_child`), `javascript` (`script`) and `plugins`; `code` hashes what they are made of.
- Then each change becomes messages: `expansion` (several of one), `envelope` (the value), `routing` (destination
  and key), all made of `text`. Single fields of row images are read and set in place: `json_fields`,
  `spliced_fields`, `spelling`.
"""
