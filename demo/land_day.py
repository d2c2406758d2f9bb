"""Land one day's file by the verb `ingest` in this process: a Spark session for each file would take longer."""

from __future__ import annotations

from pathlib import Path

from jobs import ingest
from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.settings import Settings


def land_day(settings: Settings, model: str, path: Path) -> int:
    """Land a file and return the version of the measurements table that has its rows.

    Raises:
        UserError: the file brought no new version.
    """
    version = ingest.run(settings, model, [str(path)]).data["version"]
    if version is None:
        raise UserError(f"{path} brought nothing new to {model}", RUN_FAILED)
    return int(version)
