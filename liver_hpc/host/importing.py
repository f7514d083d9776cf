"""Imports without garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing is collected while a worker imports, and what was imported is never walked again.

    torch and megatron make hundreds of thousands of objects, nearly all of which stay; looking
    through them again and again is a fifth of the time of the import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
