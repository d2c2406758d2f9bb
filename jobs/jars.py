"""Deprecated alias of `jobs.spark.jars`, kept for one release."""

from __future__ import annotations

import sys

from jobs.spark.jars import main

if __name__ == "__main__":
    print("`python -m jobs.jars` is deprecated: run `python -m jobs.spark.jars`", file=sys.stderr)
    sys.exit(main(sys.argv[1:]))
