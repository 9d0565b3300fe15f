from __future__ import annotations

import random

from openenv_client.backoff import retry_delay


def test_delays_double_up_to_a_limit_and_differ_by_chance() -> None:
    for failures, longest in [(1, 0.5), (2, 1.0), (3, 2.0), (7, 30.0), (100, 30.0), (10**6, 30.0)]:
        delays = {retry_delay(failures, first=0.5, longest=30.0) for _ in range(50)}
        assert len(delays) > 1
        assert all(longest / 2 <= delay <= longest for delay in delays)


def test_the_random_state_of_the_program_is_not_touched() -> None:
    before = random.getstate()
    retry_delay(1, first=0.5, longest=30.0)
    assert random.getstate() == before
