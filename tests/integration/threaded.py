"""A recipe whose module starts a thread when it is imported, as some libraries do."""

from __future__ import annotations

import threading

from tests.integration.random_tokens import RandomTokenGPT

threading.Thread(target=threading.Event().wait, daemon=True).start()


class ThreadedGPT(RandomTokenGPT):
    """Trains as any other."""
