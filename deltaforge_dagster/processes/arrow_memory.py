"""Where Arrow takes its memory from.

Its own allocator, mimalloc, keeps several times what was in use at once: up to 64 MiB in a Spark worker that never used more than 16, and
30 MiB more in a run than malloc. With malloc, numpy and Arrow also use one another's freed memory.
"""

from __future__ import annotations

import os


def arrow_uses_malloc() -> None:
    """Make Arrow use malloc in this process and those that it starts, unless the user has chosen an allocator.

    Call it before pyarrow is imported; later it has an effect only on processes that are started.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
