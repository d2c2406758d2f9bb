"""The PostgreSQL server of `make airflow DATABASE=postgres`, run really."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo.ports import free_ports
from scripts import private_postgres
from scripts.private_postgres import PrivatePostgres, find_programs, was_used
from tests.support.folders import open_to_others

installed = pytest.mark.skipif(find_programs() is None, reason="PostgreSQL's server is not installed")


def ask(server: PrivatePostgres, sql: str, password: str) -> subprocess.CompletedProcess[str]:
    """Ask the server by its address, with this password."""
    assert server.programs is not None
    words = ["-h", "127.0.0.1", "-p", str(server.port), "-U", "airflow", "-d", "postgres", "-Atc", sql]
    environment = {**os.environ, "PGPASSWORD": password}
    return subprocess.run(
        [server.programs / "psql", *words],
        env=environment,
        capture_output=True,
        text=True,
    )


@installed
def test_it_keeps_its_data_and_wants_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_others(tmp_path)
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")
    folder = tmp_path / "postgres"
    # An interrupted first start.
    (folder / "data.new" / "base").mkdir(parents=True)
    folder.chmod(0o700)
    assert not was_used(folder)
    server = PrivatePostgres(folder, free_ports(1)[0])
    password = (folder / "password").read_text()
    assert password in server.address and folder.stat().st_mode & 0o077 == 0
    try:
        server.start()
        made = ask(server, "create table kept as select 7 as n", password)
        assert made.returncode == 0, made.stderr
        assert ask(server, "select 1", "another").returncode != 0
        # A start that was killed leaves its server, and the next start ends it.
        left = int((folder / "data" / "postmaster.pid").read_text().split()[0])
        again = PrivatePostgres(folder, server.port)
        again.start()
        assert int((folder / "data" / "postmaster.pid").read_text().split()[0]) != left
        assert ask(again, "select n from kept", password).stdout == "7\n"
    finally:
        server.stop()
    stale = folder / "data" / "postmaster.pid"
    assert not stale.exists()
    # A crash of the machine leaves the file, and its process id may be another process's by now.
    with subprocess.Popen(["sleep", "60"]) as other:
        lines = [str(other.pid), str(folder / "data"), "1", str(server.port), "", "127.0.0.1", "", "ready"]
        stale.write_text("\n".join(lines) + "\n")
        shutil.copystat(folder / "data" / "PG_VERSION", stale)
        assert not server.runs()
        server.stop()
        time.sleep(0.2)
        assert other.poll() is None
        other.kill()


@installed
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    open_to_others(tmp_path)
    data = tmp_path / "postgres" / "data"
    data.mkdir(parents=True)
    (data / "mine.txt").touch()
    server = PrivatePostgres(tmp_path / "postgres", free_ports(1)[0])
    with pytest.raises(SystemExit, match="not a database of PostgreSQL: move it, or use DATABASE=sqlite"):
        server.start()
    (data / "PG_VERSION").write_text(str(find_programs()).split("/")[-2])
    with pytest.raises(SystemExit, match="error: pg_ctl of .* failed, see .*: .*, or use DATABASE=sqlite"):
        server.start()
    (data / "PG_VERSION").write_text("7\n")
    with pytest.raises(SystemExit, match=r"data needs PostgreSQL 7, which is gone: .* use DATABASE=sqlite"):
        PrivatePostgres(tmp_path / "postgres", 1)


@installed
@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")
def test_root_learns_that_postgres_cannot_enter_a_folder(tmp_path: Path) -> None:
    open_to_others(tmp_path)
    (tmp_path / "own").mkdir(mode=0o700)
    server = PrivatePostgres(tmp_path / "own" / "airflow" / "postgres", 1)
    with pytest.raises(SystemExit, match="postgres cannot enter .*/own: set KALMAN_AIRFLOW_HOME .*sqlite"):
        server.start()


def test_a_second_start_in_the_same_home_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "scripts/airflow-standalone"],
            env={**os.environ, "KALMAN_AIRFLOW_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2 and "another Airflow runs in" in done.stderr
    assert {one.name for one in tmp_path.iterdir()} == {"lock"}


def test_it_says_how_to_install_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_postgres, "find_programs", lambda version: None)
    with pytest.raises(SystemExit, match="PostgreSQL is not installed: install it .*apt install postgresql"):
        PrivatePostgres(tmp_path, 1)
