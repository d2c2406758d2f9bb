"""What a warehouse needs that is in an S3-compatible store: a client, and commits of which one of two wins.

Delta commits a version by creating its file, which must fail where the file is there. A file system on HDFS, Google's
and Microsoft's stores do that by themselves. S3 does it for a request that says so (`If-None-Match`), and Hadoop's
client says so with the settings below. Delta's own way with S3 only keeps apart what one process does; two drivers, or
a driver and an `ingest`, would overwrite each other's commits.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

from jobs.errors import UserError
from jobs.jars import optional_jars

T = TypeVar("T")
DEFAULT_REGION = "us-east-1"
"""Of a store of one's own, which has no regions, and is asked for by one all the same."""
_TRIES = 12
_LOST = ("RemoteFileChangedException", "PreconditionFailed", "Status Code: 412")


def is_s3(root: str) -> bool:
    """Tell if a warehouse is in an S3-compatible store.

    Raises:
        UserError: it is, by a name that Hadoop has no client for.
    """
    scheme = root.partition("://")[0] if "://" in root else ""
    if scheme in ("s3", "s3n"):
        raise UserError(
            f"{root}: name the warehouse s3a://{root.partition('://')[2]}, after Hadoop's client of S3"
        )
    return scheme == "s3a"


def store_jars(root: str) -> list[str]:
    """Return the jars with which Spark reaches a warehouse, fetched now if they are not there."""
    return optional_jars("s3") if is_s3(root) else []


def store_conf(root: str) -> dict[str, str]:
    """Return Spark's settings for a warehouse.

    Credentials and the address are Amazon's own variables (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL),
    which Spark hands to its executors, or what the machine's role gives.
    """
    if not is_s3(root):
        return {}
    conf = {
        # Creates a file by a conditional request, and passes its refusal on.
        "spark.delta.logStore.s3a.impl": "io.delta.storage.GCSLogStore",
        "spark.hadoop.fs.s3a.create.performance": "true",
        "spark.hadoop.fs.s3a.create.conditional.enabled": "true",
    }
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:  # a store of one's own seldom gives each bucket a host name
        conf["spark.hadoop.fs.s3a.endpoint"] = endpoint
        conf["spark.hadoop.fs.s3a.endpoint.region"] = os.environ.get("AWS_REGION") or DEFAULT_REGION
        conf["spark.hadoop.fs.s3a.path.style.access"] = "true"
    return conf


def until_won(commit: Callable[[], T]) -> T:
    """Do what commits to a table, again where another commit of the same version came first.

    In S3 that refusal is not one that Delta knows. What is done must be the same however often it is done: the request
    may also have been answered by a refusal after it had been carried out, and been lost on its way.
    """
    for left in reversed(range(_TRIES)):
        try:
            return commit()
        except Exception as error:
            text = str(error)
            if not left or not any(word in text for word in _LOST):
                raise
            time.sleep(random.uniform(0.05, 0.5))
    raise AssertionError("the last try returns or raises")
