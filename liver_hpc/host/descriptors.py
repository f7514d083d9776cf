"""How many files and connections this process may have open."""

from __future__ import annotations

import resource

ENOUGH = 65_536
"""Of a hard limit without bounds no more is taken: children inherit it, and some close them all."""


def raise_descriptor_limit() -> None:
    """Raises the soft limit, often 1,024, towards the hard one: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
