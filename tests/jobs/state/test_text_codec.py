"""State values as text: every value comes back, the text is ASCII, and damage is found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.state.spark_values import DamagedText, decode_stored, from_text, to_text


@given(st.binary(max_size=200))
def test_every_value_comes_back(value: bytes) -> None:
    text = to_text(value)
    assert text.isascii()
    assert from_text(text) == value


@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 55, 56, 57, 100_003])
def test_sizes_around_whole_groups_come_back(size: int) -> None:
    value = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert from_text(to_text(value)) == value


def test_what_does_not_compress_is_longer_by_an_eighth() -> None:
    value = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8).tobytes()
    assert len(to_text(value)) == pytest.approx(len(value) * 8 / 7, rel=0.01)


def test_bytes_of_the_first_release_are_passed_on() -> None:
    assert decode_stored(b"KSB1 and so on") == b"KSB1 and so on"
    assert decode_stored(to_text(b"KSB2 and so on")) == b"KSB2 and so on"


@pytest.mark.parametrize(
    "damaged",
    ["", "abc", to_text(bytes(range(256)))[:-16], to_text(b"x" * 99)[8:], "é" * 16, "\x7f" * 64],
    ids=["empty", "no whole group", "cut short", "without its sizes", "not ASCII", "wrong sizes"],
)
def test_damage_is_found(damaged: str) -> None:
    with pytest.raises(DamagedText, match="a value of the state"):
        from_text(damaged)
