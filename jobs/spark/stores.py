"""The jars that Spark needs for the store of a warehouse: Hadoop's client of it."""

from __future__ import annotations

from jobs.core.errors import UserError
from jobs.core.roots import S3
from jobs.spark.jars import jar_folder, jar_paths, optional_jars

_AZURE = ("azure", "Azure's store")
_CLIENTS = {
    S3: ("s3", "S3"),
    "abfs": _AZURE,
    "abfss": _AZURE,
    "gs": ("google", "Google's store"),
}
"""The set of jars and the name of a store, by its scheme."""


def store_jars(root: str) -> list[str]:
    """Return the paths of the jars of a warehouse's store, fetched if need be; none for a folder.

    Raises:
        UserError: they are not there and cannot be fetched.
    """
    client = _CLIENTS.get(root.partition("://")[0])
    if client is None:
        return []
    part, store = client
    jar_paths()  # jars that every job needs are another matter
    try:
        return optional_jars(part)
    except UserError as error:
        raise UserError(
            f"a warehouse at {root} needs Spark's client of {store}, which is not in {jar_folder() / part}: "
            f"{error.message}; then run `python -m jobs.spark.jars {part}` (docs/deploy.md)"
        ) from error
