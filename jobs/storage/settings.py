"""How an S3 store is reached: its address, region and credentials, from where its other clients have them too.

The address and the region are those of Amazon's tools: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL (none: Amazon's own),
AWS_REGION or AWS_DEFAULT_REGION. Credentials come from the environment, from `~/.aws/credentials` or from the machine's
role, each client looking for itself: they are in no setting of Spark, no spec and no message.
"""

from __future__ import annotations

import configparser
import os
from pathlib import Path
from typing import NamedTuple

from jobs.core.roots import S3

_REGION = "us-east-1"
_PLACES = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ALLOW_HTTP",  # of delta-rs
)
"""Variables that say where a store is. Those with credentials are none of them."""


class Store(NamedTuple):
    """Where a store listens and in which region: without an address it is Amazon's own."""

    address: str | None
    region: str

    @property
    def encrypted(self) -> bool:
        """Tell if the store is spoken to through TLS."""
        return self.address is None or not self.address.startswith("http://")


def store() -> Store:
    """Return the store of the environment."""
    env = os.environ
    address = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or None
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or _REGION
    return Store(address and address.rstrip("/"), region)


def store_variables(root: str) -> dict[str, str]:
    """Return the variables that say where a warehouse's store is, for a driver elsewhere; none unless it is in S3."""
    return {name: os.environ[name] for name in _PLACES if in_s3(root) and os.environ.get(name)}


def in_s3(root: str) -> bool:
    """Tell if a folder, given by path or URI, is in S3."""
    return root.startswith(f"{S3}://")


def spark_store_conf(root: str) -> dict[str, str]:
    """Return the Spark settings of a warehouse, besides those of every job: none unless it is in S3."""
    if not in_s3(root):
        return {}
    where, hadoop = store(), "spark.hadoop.fs.s3a."
    conf = {
        # Delta's commits and Spark's checkpoints are objects that one process only can create (jobs/spark/java).
        f"spark.delta.logStore.{S3}.impl": "kalman.stores.ConditionalLogStore",
        "spark.sql.streaming.checkpointFileManagerClass": "kalman.stores.ConditionalCheckpoints",
        f"{hadoop}create.conditional.enabled": "true",
        f"{hadoop}aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
        f"{hadoop}endpoint.region": where.region,
        # The default reads ahead by a library of native code.
        f"{hadoop}input.stream.type": "classic",
        # Workers read small files by a client of their own.
        **{f"spark.executorEnv.{name}": value for name, value in store_variables(root).items()},
    }
    if where.address is not None:
        conf[f"{hadoop}endpoint"] = where.address
        conf[f"{hadoop}path.style.access"] = "true"
        conf[f"{hadoop}connection.ssl.enabled"] = str(where.encrypted).lower()
    return conf


def delta_options() -> dict[str, str]:
    """Return the options with which delta-rs reaches the store; credentials of the environment it finds itself."""
    where = store()
    options = {"AWS_REGION": where.region}
    if where.address is not None:
        options |= {"AWS_ENDPOINT_URL": where.address, "AWS_ALLOW_HTTP": str(not where.encrypted).lower()}
    return options | {f"AWS_{name.upper()}": value for name, value in credentials_of_file().items()}


def credentials_of_file() -> dict[str, str]:
    """Return the keys of the profile in `~/.aws/credentials`; none if the environment has some, or the file none."""
    env = os.environ
    if env.get("AWS_ACCESS_KEY_ID") or env.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return {}
    file = Path(env.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(file, encoding="utf-8")
        profile = parser[env.get("AWS_PROFILE") or "default"]
    except (OSError, KeyError, configparser.Error, UnicodeDecodeError):
        return {}
    names = {
        "access_key_id": "aws_access_key_id",
        "secret_access_key": "aws_secret_access_key",
        "session_token": "aws_session_token",
    }
    return {ours: profile[name] for ours, name in names.items() if profile.get(name)}
