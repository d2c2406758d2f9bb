"""Count drivers in a row that crash and have done nothing, so that somebody may give up. No Spark.

What a driver has done is read from the checkpoints themselves: the newest micro-batch that is committed. So it does not
matter how it crashed, or how often whoever counts was killed.
"""

from __future__ import annotations

from datetime import timedelta

from jobs.supervision.driver_log import Crashes, DriverLog
from jobs.supervision.driver_status import LIVE, DriverStatus
from jobs.warehouse.files import files_of

SOUND = timedelta(hours=1)
"""A driver that lived so long was no crash at once, though nothing came for it to do."""
QUERIES = "queries"
"""What of a driver's rules names its queries, where these are not one of its generation's name."""


def about_to_start(root: str, log: DriverLog) -> None:
    """Write down how far everything has come, before a driver is started."""
    known = log.crashes()
    done = committed(root, log)
    if known is None or known.done != done:
        log.put_crashes(Crashes(0, done, ""))


def count(root: str, log: DriverLog, error: str, lived: float = 0.0) -> int:
    """Count a crash, of a driver that lived so many seconds; return how many in a row have done nothing.

    Args:
        root: of the warehouse.
        log: of the drivers; `about_to_start` was called before this one was started.
        error: what is known of it.
        lived: seconds.
    """
    known, done = log.crashes(), committed(root, log)
    useful = known is not None and known.done != done or lived > SOUND.total_seconds()
    crashes = Crashes(0 if useful else (known.count if known else 0) + 1, done, error)
    log.put_crashes(crashes)
    return crashes.count


def committed(root: str, log: DriverLog) -> dict[str, int]:
    """Return the newest committed micro-batch of each checkpoint that the last driver of a log went on from."""
    drives = [one for one in log.drives() if one.status == LIVE]
    if not drives:
        return {}
    last = drives[-1]
    found = {}
    for name in (last.rules or {}).get(QUERIES, [last.generation]):
        commits = files_of(f"{root}/checkpoints/{name}/commits").names("")
        found[name] = max((int(one) for one in commits if one.isdigit()), default=-1)
    return found


def said(crashes: int, sight: DriverStatus) -> str:
    """Say in words why something is given up."""
    drivers = "a driver has" if crashes == 1 else f"{crashes} drivers in a row have"
    return f"{drivers} crashed before a micro-batch was committed, the last: {sight.text()}"
