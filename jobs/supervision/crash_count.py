"""Count consecutive drivers that crashed before committing a micro-batch, so that restarts can stop. Spark-free.

Progress is the newest committed micro-batch in the checkpoints. So neither the cause of a crash nor a restart of the
counting process changes the number.
"""

from __future__ import annotations

from datetime import timedelta

from jobs.storage.files import open_files
from jobs.supervision.driver_log import Crashes, DriverLog
from jobs.supervision.driver_status import LIVE, DriverStatus

SOUND = timedelta(hours=1)
"""A driver that lived this long did not crash at its start, even if it had no row to commit."""


class CrashCounter:
    """The crashes of one log's drivers, in the warehouse at `root`."""

    def __init__(self, root: str, log: DriverLog) -> None:
        self.root, self.log = root, log

    def record_progress(self) -> None:
        """Record the progress of all checkpoints before a driver is started."""
        known = self.log.crashes()
        done = self.committed()
        if known is None or known.done != done:
            self.log.put_crashes(Crashes(0, done, ""))

    def count(self, error: str, lived: float = 0.0) -> int:
        """Count a crash; return how many consecutive drivers have crashed without progress.

        Args:
            error: text about the crash. The caller must have called `record_progress` before it started this driver.
            lived: seconds that the driver lived.
        """
        known, done = self.log.crashes(), self.committed()
        progressed = known is not None and known.done != done or lived > SOUND.total_seconds()
        crashes = Crashes(0 if progressed else (known.count if known else 0) + 1, done, error)
        self.log.put_crashes(crashes)
        return crashes.count

    def committed(self) -> dict[str, int]:
        """Return the newest committed micro-batch, or -1, of each checkpoint of the log's last driver."""
        live = [one for one in self.log.list_drivers() if one.status == LIVE]
        if not live:
            return {}
        names = [live[-1].generation] if live[-1].queries is None else live[-1].queries
        found = {}
        for name in names:
            commits = open_files(f"{self.root}/checkpoints/{name}/commits").names("")
            found[name] = max((int(one) for one in commits if one.isdigit()), default=-1)
        return found


def give_up_reason(crashes: int, status: DriverStatus) -> str:
    """Return a sentence with the reason why no further driver is started."""
    drivers = "a driver has" if crashes == 1 else f"{crashes} drivers in a row have"
    return f"{drivers} crashed before a micro-batch was committed, the last: {status.text()}"
