"""The warehouse of an earlier release, at its original path."""

from __future__ import annotations

import fcntl
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fixtures.make_release import PLACE


@contextmanager
def unpacked(release: Path) -> Iterator[Path]:
    """Yield the folder of a release's warehouse and specs, and remove it afterwards.

    Checkpoints contain absolute paths, so all releases use the same place, and other test processes wait for it.
    """
    with PLACE.with_name(f"{PLACE.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(PLACE, ignore_errors=True)
        with tarfile.open(release) as archive:
            archive.extractall(PLACE, filter="data")
        try:
            yield PLACE
        finally:
            shutil.rmtree(PLACE, ignore_errors=True)
