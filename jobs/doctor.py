"""Check the requirements of the pipeline on this machine and on the warehouse's store, before first use."""

from __future__ import annotations

from typing import Any

from jobs.core.command import answer
from jobs.core.report import Report
from jobs.core.settings import Settings


@answer
def run(settings: Settings) -> Report:
    """Check Java, Spark's jars and the warehouse's store. In S3, many writers create one object: exactly one must win.

    Raises:
        UserError: something is missing, or the store is not safe.
    """
    from jobs.core.errors import UserError
    from jobs.core.settings import find_local_path
    from jobs.spark.doctor import find_java_problem
    from jobs.spark.jars import list_jars, store_jars
    from jobs.storage.object_files import ROUNDS, WRITERS, is_in_s3, probe_store

    problem = find_java_problem()
    if problem:
        raise UserError(problem)
    root = settings.warehouse
    jars = len(list_jars()) + len(store_jars(root))
    data: dict[str, Any] = {"warehouse": root, "jars": jars, "probed": None}
    if is_in_s3(root):
        probe_store(root)
        data["probed"] = {"rounds": ROUNDS, "writers": WRITERS}
        line = f"in each of {ROUNDS} rounds exactly one of {WRITERS} writers created the object"
    elif find_local_path(root) is not None:
        line = "a folder, where this machine's locks order the commits"
    else:
        line = "not probed: Delta's own log store commits there, and nothing here has tried it"
    return Report([f"Java and {jars} jars are there", f"{root}: {line}"], data)


if __name__ == "__main__":
    run.main()
