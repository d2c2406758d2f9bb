"""The jars of Hadoop's client for the store of a warehouse."""

from __future__ import annotations

from jobs.core.errors import UserError
from jobs.core.roots import S3
from jobs.spark.jars import fetch_optional_jars, find_jar_folder, list_jars

_AZURE = ("azure", "Azure's store")
_CLIENTS = {
    S3: ("s3", "S3"),
    "abfs": _AZURE,
    "abfss": _AZURE,
    "gs": ("google", "Google's store"),
}
"""Set of jars and name of a store, by its scheme."""


def store_jars(root: str) -> list[str]:
    """Return the paths of the jars for a warehouse's store, fetched if necessary; none for a folder.

    Raises:
        UserError: the jars are missing and cannot be fetched.
    """
    client = _CLIENTS.get(root.partition("://")[0])
    if client is None:
        return []
    part, store = client
    list_jars()  # the error for jars that every job needs stays as it is
    try:
        return fetch_optional_jars(part)
    except UserError as error:
        raise UserError(
            f"a warehouse at {root} needs Spark's client of {store}, which is not in {find_jar_folder() / part}: "
            f"{error.message}; then run `python -m jobs.spark.jars {part}` (docs/deploy.md)"
        ) from error
