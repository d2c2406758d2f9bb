"""The jars that Spark needs for the store of a warehouse."""

from __future__ import annotations

from jobs.spark.jars import optional_jars
from jobs.stores.settings import in_s3


def store_jars(root: str) -> list[str]:
    """Return the paths of the jars of a warehouse's store, fetched if need be; none for a folder.

    Raises:
        UserError: they cannot be fetched.
    """
    return optional_jars("s3") if in_s3(root) else []
