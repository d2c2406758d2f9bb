"""Small disks that fill up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """Mount a disk of some bytes at a folder, which keeps its files; skip the test where that is not allowed."""
    place.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f"{place.name}-before")
    beside.mkdir()
    subprocess.run(["cp", "-a", f"{place}/.", str(beside)], check=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        subprocess.run(["cp", "-a", f"{beside}/.", str(place)], check=True)
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


class Ballast:
    """Fills a disk but for some bytes."""

    def __init__(self, disk: Path) -> None:
        self.disk, self.file = disk, disk / "_ballast"

    def leave(self, free: int) -> None:
        self.clear()
        room = os.statvfs(self.disk)
        with self.file.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_frsize - free))

    def clear(self) -> None:
        self.file.unlink(missing_ok=True)
