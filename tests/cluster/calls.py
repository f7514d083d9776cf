"""What jobs of the tests call; the nodes import it from here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

LIMIT_S = 60


def wait_for(path: str) -> dict[str, str]:
    """Notes that it runs, and returns its environment once `path` is there."""
    print("it waits", flush=True)
    end = Path(path)
    end.with_name(f"{end.name}-awaited").touch()
    until = f"until test -e {end}; do sleep 0.05; done"
    subprocess.run(["sh", "-c", until], timeout=LIMIT_S, check=True)
    return dict(os.environ)
