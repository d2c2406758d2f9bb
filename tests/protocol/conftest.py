from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.protocol import standing_in


@pytest.fixture(scope="module")
def simulation() -> Iterator[None]:
    """Spark, Delta, the store, threads and clocks are replaced in all modules."""
    with standing_in.simulated():
        yield
