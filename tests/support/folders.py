"""Folders of tests that another user of the machine has to reach."""

from __future__ import annotations

import os
from pathlib import Path


def open_to_others(folder: Path) -> None:
    """Let other users reach a folder, if root runs the tests: PostgreSQL then runs as another user."""
    for one in (folder, *folder.parents) if os.geteuid() == 0 else ():
        if one.stat().st_uid == 0 and one != Path("/"):
            one.chmod(one.stat().st_mode | 0o011)
