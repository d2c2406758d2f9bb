"""The PostgreSQL server of `make airflow DATABASE=postgres`, run really."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from demo.ports import free_ports
from scripts import private_postgres
from scripts.private_postgres import PrivatePostgres, find_programs
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
def test_it_keeps_its_data_and_wants_its_password(tmp_path: Path) -> None:
    open_to_others(tmp_path)
    folder = tmp_path / "postgres"
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
    assert not (folder / "data" / "postmaster.pid").exists()


@installed
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    open_to_others(tmp_path)
    (tmp_path / "postgres" / "data").mkdir(parents=True)
    with pytest.raises(
        SystemExit, match="error: pg_ctl of PostgreSQL.* failed, see .*not a database cluster"
    ):
        PrivatePostgres(tmp_path / "postgres", free_ports(1)[0]).start()


def test_it_says_how_to_install_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_postgres, "find_programs", lambda: None)
    with pytest.raises(SystemExit, match="PostgreSQL is not installed: install it .*apt install postgresql"):
        PrivatePostgres(tmp_path, 1)
