"""The Python processor: a user's `function`, found by `modules`, and called in a `child` process if it has a time limit."""
