"""Whether processes that meet have the same liver_hpc: a host and an image may not.

Python and what else is installed may differ between them, as all that they say to each other is
JSON.
"""

from __future__ import annotations

from liver_hpc import __version__


def version_fault(theirs: str, whose: str) -> str:
    """What is wrong where another process has another liver_hpc than this one; empty where it has
    the same. theirs: empty of one that did not say. whose: the other process."""
    if theirs == __version__:
        return ""
    return (
        f"liver_hpc is {__version__} here, and {theirs or 'an earlier one'} for {whose}: install "
        "the same one on the host and on the nodes, or in their image"
    )
