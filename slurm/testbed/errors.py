"""What goes wrong with a test cluster."""

from __future__ import annotations

from liver_hpc.errors import LiverError


class ClusterError(LiverError):
    """The test cluster cannot do what was asked; the text says why and what to do."""
