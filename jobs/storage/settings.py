"""Address, region and credentials of an S3 store, from the places that Amazon's tools use.

The address comes from AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL; without these variables it is Amazon's address. The
region comes from AWS_REGION or AWS_DEFAULT_REGION. Each client looks up credentials by itself: in the environment, in
`~/.aws/credentials`, or from the machine's role. Settings of Spark, specs and messages never contain credentials.
"""

from __future__ import annotations

import configparser
import os
from pathlib import Path
from typing import NamedTuple

from jobs.core.settings import S3

_REGION = "us-east-1"
_PLACES = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ALLOW_HTTP",  # read by delta-rs
)
"""Environment variables that locate a store, without the variables that contain credentials."""


class StoreSettings(NamedTuple):
    """Address and region of a store; the address None means Amazon's address."""

    address: str | None
    region: str

    @property
    def encrypted(self) -> bool:
        """Return whether connections to the store use TLS."""
        return self.address is None or not self.address.startswith("http://")


def store() -> StoreSettings:
    """Return the settings of the store from the environment."""
    env = os.environ
    address = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or None
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or _REGION
    return StoreSettings(address and address.rstrip("/"), region)


def store_variables(root: str) -> dict[str, str]:
    """Return the environment variables that locate a warehouse's store, for a remote driver; empty outside S3."""
    return {name: os.environ[name] for name in _PLACES if is_in_s3(root) and os.environ.get(name)}


def is_in_s3(root: str) -> bool:
    """Return whether a folder, which is given by path or URI, is in S3."""
    return root.startswith(f"{S3}://")


def build_store_conf(root: str) -> dict[str, str]:
    """Return the Spark settings for a warehouse in S3, besides the settings of every job; empty outside S3."""
    if not is_in_s3(root):
        return {}
    where, hadoop = store(), "spark.hadoop.fs.s3a."
    conf = {
        # Delta's commits and Spark's checkpoints are objects that only one process can create (jobs/spark/java).
        f"spark.delta.logStore.{S3}.impl": "kalman.stores.ConditionalLogStore",
        "spark.sql.streaming.checkpointFileManagerClass": "kalman.stores.ConditionalCheckpoints",
        f"{hadoop}create.conditional.enabled": "true",
        f"{hadoop}aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
        f"{hadoop}endpoint.region": where.region,
        # The default stream would read ahead through a native library.
        f"{hadoop}input.stream.type": "classic",
        # Spark's Python workers read small files through another client.
        **{f"spark.executorEnv.{name}": value for name, value in store_variables(root).items()},
    }
    if where.address is not None:
        conf[f"{hadoop}endpoint"] = where.address
        conf[f"{hadoop}path.style.access"] = "true"
        conf[f"{hadoop}connection.ssl.enabled"] = str(where.encrypted).lower()
    return conf


def build_delta_options() -> dict[str, str]:
    """Return the options by which delta-rs reaches the store; delta-rs itself finds credentials in the environment."""
    where = store()
    options = {"AWS_REGION": where.region}
    if where.address is not None:
        options |= {"AWS_ENDPOINT_URL": where.address, "AWS_ALLOW_HTTP": str(not where.encrypted).lower()}
    return options | {f"AWS_{name.upper()}": value for name, value in read_credentials().items()}


def read_credentials() -> dict[str, str]:
    """Return the keys of the profile in `~/.aws/credentials`; empty if it has none or the environment has keys."""
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
