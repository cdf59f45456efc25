"""The git checkout that this code runs from."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """Its HEAD; None without git and outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
