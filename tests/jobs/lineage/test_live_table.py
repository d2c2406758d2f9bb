"""The table `live` names the generations that are live once all switches and refreshes have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.lineage import live_rows
from jobs.storage.warehouse import Tables


def test_a_switch_between_reading_and_writing_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verb reads the generations, another switches and refreshes, then the first writes its older rows."""
    tables = Tables(str(tmp_path))
    live = ["a"]

    def rows_of(*_: Any) -> list[dict[str, Any]]:
        return [
            {
                **{"model": "m", "place": 0, "generation": live[0], "last_batch": 7, "model_version": 1},
                **{"states": ["level"], "key_columns": ["id"]},
            }
        ]

    write = live_rows.replace_partition

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(live_rows, "replace_partition", write)
        live[0] = "b"
        assert live_rows.refresh_live_table(tables, "m")
        write(*arguments)

    monkeypatch.setattr(live_rows, "build_live_rows", rows_of)
    monkeypatch.setattr(live_rows.generations, "read_generations", lambda *_: [])
    monkeypatch.setattr(live_rows.manifests, "read_manifests", lambda *_: [])
    monkeypatch.setattr(live_rows, "replace_partition", overtaken)
    assert live_rows.refresh_live_table(tables, "m")
    assert [row["generation"] for row in tables.rows("live")] == ["b"]
