"""Secrets that a run is given are in nothing that it leaves: output, logs, tables, checkpoints, tracebacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from demo.broker import Broker
from tests.conftest import cli_environment
from tests.jobs.support.feeds import Feed, as_json, spread
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

pytestmark = pytest.mark.spark

CANARY = b"c4n4ry9f2e"


@pytest.mark.slow
def test_no_run_leaves_a_secret(feed: Feed, broker: Broker, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec(name="hush", source={"kind": "kafka", "topic": "hush"}))
    rows = random_rows(1, rows=20, text=True)[0]
    feed.make("hush")
    feed.send("hush", as_json(rows, spread(rows)))
    given = tmp_path / "secrets"
    given.mkdir()
    word = CANARY.decode()
    jaas = f'org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="{word}";'
    secret = f"sasl.jaas.config={jaas}\nsasl.mechanism=PLAIN\nssl.truststore.password={word}\n"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {
        "KALMAN_MODELS": str(pipeline.settings.models),
        "KALMAN_KAFKA_PROPERTIES": str(given / "kafka.properties"),
        "KALMAN_LOG_LEVEL": "INFO",
        "TMPDIR": str(temporary),
        "AWS_SECRET_ACCESS_KEY": word,
        "AZURE_CLIENT_SECRET": word,
        "POSTGRES_PASSWORD": word,
    }

    def run(*words: str, protocol: str = "PLAINTEXT") -> tuple[int, bytes]:
        (given / "kafka.properties").write_text(f"{secret}security.protocol={protocol}\n")
        done = subprocess.run(
            [sys.executable, "-m", "jobs.cli", "--debug", *words],
            cwd=tmp_path,
            env=cli_environment(Path(pipeline.settings.warehouse), environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
        return done.returncode, done.stdout

    said = [run("ingest", "--model", "hush")]
    # The broker knows no passwords, so this one fails.
    said.append(run("ingest", "--model", "hush", protocol="SASL_PLAINTEXT"))
    # As do settings that Kafka's client refuses: it says which ones.
    (given / "kafka.properties").write_text("")
    secret = secret.replace("required", "requird")
    said.append(run("stream", "--model", "hush", protocol="SASL_PLAINTEXT"))
    assert [code > 0 for code, _ in said] == [False, True, True], said
    (tmp_path / "said").write_bytes(b"\n".join(text for _, text in said))
    left = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(given)]
    assert len(left) > 5
    assert [str(path) for path in left if CANARY in path.read_bytes()] == []
