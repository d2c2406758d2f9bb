"""Other ways from files to the same rows in Delta, each a program for a new process: they take rows as they are."""

from __future__ import annotations

import sys
from pathlib import Path

COPY = """
import sys
from glob import glob
from deltalake import write_deltalake
from pyarrow import csv, parquet
for path in sorted(glob(sys.argv[1] + "/*")):
    table = csv.read_csv(path) if path.endswith(".csv") else parquet.read_table(path)
    write_deltalake(sys.argv[2], table, mode="append")
"""
SPARK = """
import sys
from jobs.core.settings import Settings
from jobs.spark.session import spark_session
spark = spark_session(Settings.load(sys.argv[2]), "copy")
rows = spark.read.csv(sys.argv[1], header=True, schema="sensor string, at timestamp, value double, other double")
rows.write.format("delta").save(sys.argv[2])
"""
POLARS = """
import sys
import polars
polars.read_csv(sys.argv[1] + "/*.csv", try_parse_dates=True).write_delta(sys.argv[2])
"""
PROGRAMS = {"copy": COPY, "spark": SPARK, "polars": POLARS}


def build_copy(contender: str, files: Path, table: Path) -> list[str]:
    """Build the command of a contender that copies a folder of files to a Delta table."""
    return [sys.executable, "-c", PROGRAMS[contender], str(files), str(table)]
