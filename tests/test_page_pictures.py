"""The pictures of our pages: a page that is not there has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.page_pictures import shown


def test_a_page_that_is_missing_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none.html"):
        shown(tmp_path / "none.html", 390)
