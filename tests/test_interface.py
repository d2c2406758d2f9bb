"""What users of an earlier release rely on is there and means the same: commands, columns, fields of a spec."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORMER: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests/fixtures/interface_0_3.json").read_text(encoding="utf-8")
)
"""`scripts/interface.py` over the code before rooms were joined and functions renamed (commit 3c2a2e6)."""


@pytest.fixture(scope="module")
def present() -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        return runpy.run_path(str(ROOT / "scripts/interface.py"))["describe_interface"]()


@pytest.mark.parametrize("part", sorted(FORMER))
def test_nothing_is_gone_and_no_default_or_type_has_changed(
    part: str, present: dict[str, dict[str, Any]]
) -> None:
    """New options, columns and fields may come; a former one that goes or changes is a change for users."""
    assert FORMER[part]
    for name, former in FORMER[part].items():
        assert name in present[part]
        now = present[part][name]
        assert (
            now if not isinstance(former, dict) else {one: now[one] for one in former if one in now}
        ) == former
