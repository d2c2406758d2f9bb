"""Run a verb as `kalman-pipeline` does, with commits of a few rows, so that a short history takes several."""

from __future__ import annotations

from jobs import cli
from jobs.batch import estimating

ROWS = 40

if __name__ == "__main__":
    estimating.ROWS_A_COMMIT = ROWS
    cli.main()
