"""The tables of catching up: what they say holds, and followers of a real topic reach the trainer's bits."""

from __future__ import annotations

import catch_up
import pytest


def cells(line: str) -> list[float]:
    return [float(cell.replace(",", "")) for cell in line.strip("| \n").split("|")]


@pytest.mark.parametrize("growth", [0.5, 1.0])
def test_skips_save_messages_and_never_cost_bytes(growth):
    rows = [cells(line) for line in catch_up.simulated(growth, (1, 10, 100, 1000)) if line.startswith("| 1")]
    assert [row[0] for row in rows] == [1, 10, 100, 1000]
    for lag, off, off_bytes, auto, auto_bytes, every, every_bytes in rows:
        assert every <= auto <= off <= lag
        assert every_bytes <= auto_bytes <= off_bytes
        assert every <= 2 * int(lag).bit_length()


def test_followers_of_a_real_topic_reach_the_trainers_bits():
    lines, exact = catch_up.measured(10, (1, 7))
    assert exact
    one, seven = (cells(line) for line in lines if line.startswith(("| 1 ", "| 7 ")))
    assert one[1] == one[3] == one[5] == 1
    assert seven[1] == 7 > seven[3] > seven[5]
