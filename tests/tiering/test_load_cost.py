"""Estimates of loads and of computations, and the decision between them: exact arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from persistkv.tiering.load_cost import (
    UNKNOWN_DEADLINE_S,
    LoadChooser,
    LoadRun,
    LoadTimes,
    PrefillSpeed,
    Reason,
)

MIB = 1 << 20


def settled(latency_s: float, bytes_per_s: float) -> LoadTimes:
    """Return the estimates after 100 loads of each size from 1 MiB to 1 GiB."""
    times = LoadTimes()
    for _ in range(100):
        for power in range(11):
            num_bytes = MIB << power
            times.observe(num_bytes, latency_s + num_bytes / bytes_per_s)
    return times


def test_load_times_without_history_expect_nothing() -> None:
    assert LoadTimes().expected_s(MIB) == 0.0


@pytest.mark.parametrize("num_bytes", [MIB, 3 * MIB, 100 * MIB, 1 << 30])
def test_load_times_learn_latency_and_bandwidth(num_bytes: int) -> None:
    times = settled(0.1, 1e9)
    assert times.expected_s(num_bytes) == pytest.approx(0.1 + num_bytes / 1e9, rel=0.03)


def test_load_times_include_bytes_in_flight() -> None:
    times = settled(0.0, 1e9)
    times.begin(1, 64 * MIB)
    assert times.expected_s(64 * MIB) == pytest.approx(128 * MIB / 1e9, rel=0.03)
    times.cancel(1)
    assert times.expected_s(64 * MIB) == pytest.approx(64 * MIB / 1e9, rel=0.03)


def test_load_times_load_behind_another_shows_same_bandwidth() -> None:
    times = LoadTimes()
    for job in range(0, 200, 2):
        times.begin(job, 64 * MIB)
        times.begin(job + 1, 64 * MIB)
        times.end(job, 64 * MIB, 64 * MIB / 1e9, is_late=False)
        times.end(job + 1, 64 * MIB, 128 * MIB / 1e9, is_late=False)
    assert times.expected_s(64 * MIB) == pytest.approx(64 * MIB / 1e9, rel=0.03)


def test_load_times_slowdown_of_one_size_applies_to_all() -> None:
    times = settled(0.0, 1e9)
    for _ in range(5):
        times.observe(MIB, 10 * MIB / 1e9)
    assert times.expected_s(1 << 30) > 5 * (1 << 30) / 1e9
    for _ in range(5):
        times.observe(MIB, MIB / 1e9)
    assert times.expected_s(1 << 30) < 1.5 * (1 << 30) / 1e9


def test_load_times_outlier_is_forgotten() -> None:
    times = settled(0.0, 1e9)
    times.observe(64 * MIB, 100 * 64 * MIB / 1e9)
    for _ in range(8):
        times.observe(64 * MIB, 64 * MIB / 1e9)
    assert times.expected_s(64 * MIB) == pytest.approx(64 * MIB / 1e9, rel=0.2)


def test_load_times_abandoned_load_counts_with_its_speed() -> None:
    times = settled(0.0, 1e9)
    times.begin(1, 64 * MIB)
    times.end(1, 16 * MIB, 16 * MIB / 1e8, is_late=True)
    assert times.expected_s(64 * MIB) == pytest.approx(64 * MIB / 1e8, rel=0.1)


def test_load_times_load_that_is_a_little_late_changes_little() -> None:
    """One of many takes a fifth longer than usual, and is abandoned shortly before its end."""
    times = settled(0.0, 1e9)
    times.begin(1, 64 * MIB)
    times.end(1, 60 * MIB, 1.2 * 60 * MIB / 1e9, is_late=True)
    assert times.expected_s(64 * MIB) == pytest.approx(64 * MIB / 1e9, rel=0.06)


def test_load_times_change_by_more_than_noise_counts_at_once() -> None:
    times = settled(0.0, 1e9)
    for observed, expected in [(1.2, 1.0), (10.0, 10.0), (1.0, 1.0)]:
        times.observe(8 * MIB, observed * 8 * MIB / 1e9)
        expected_s = expected * 64 * MIB / 1e9
        assert times.expected_s(64 * MIB) == pytest.approx(expected_s, rel=0.1)


def test_load_times_stalled_load_is_infinite_until_one_ends() -> None:
    times = settled(0.0, 1e9)
    times.begin(1, 64 * MIB)
    times.end(1, 0, 5.0, is_late=True)
    assert times.expected_s(1) == math.inf
    times.observe(8 * MIB, 8 * MIB / 1e9)
    assert times.expected_s(64 * MIB) == pytest.approx(64 * MIB / 1e9, rel=0.1)


def test_load_times_missing_blocks_teach_nothing() -> None:
    times = settled(0.0, 1e9)
    before = times.expected_s(64 * MIB)
    times.begin(1, 64 * MIB)
    times.end(1, 0, 0.001, is_late=False)
    assert times.expected_s(64 * MIB) == before


def test_load_times_larger_size_than_known_is_worth_trial() -> None:
    """Only a load of this size shows whether parallel reads are faster."""
    times = LoadTimes()
    times.observe(MIB, 0.1)
    assert times.expected_s(1024 * MIB) < 0.3 * 1024 * 0.1


def test_prefill_speed_is_unknown_at_first() -> None:
    assert PrefillSpeed().expected_s(0, 1000) is None


def test_prefill_speed_option_overrides_observations() -> None:
    speed = PrefillSpeed(2_000)
    speed.observe(0, 1000, 100.0)
    assert speed.expected_s(1000, 5000) == 2.0


def test_prefill_speed_grows_with_depth() -> None:
    """A token costs 100 us, and 10 ns per token before it."""
    speed = PrefillSpeed()

    def exact_s(start: int, stop: int) -> float:
        return 1e-4 * (stop - start) + 1e-8 * (stop**2 - start**2) / 2

    for start in range(0, 16_384, 2_048):
        speed.observe(start, start + 2_048, exact_s(start, start + 2_048))
    for start, stop in [(0, 256), (0, 32_768), (30_000, 32_768)]:
        assert speed.expected_s(start, stop) == pytest.approx(exact_s(start, stop))


def test_prefill_speed_of_one_depth_is_constant() -> None:
    speed = PrefillSpeed()
    for _ in range(3):
        speed.observe(0, 1000, 0.5)
    assert speed.expected_s(0, 4000) == pytest.approx(2.0)


def test_prefill_speed_follows_change() -> None:
    speed = PrefillSpeed()
    for seconds in [0.1] * 50 + [0.2] * 100:
        speed.observe(0, 1000, seconds)
    assert speed.expected_s(0, 1000) == pytest.approx(0.2, rel=0.1)


@dataclass(eq=False)
class Store:
    latency_s: float
    bytes_per_s: float

    def expected_load_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def chooser(tokens_per_s: float = 1_000.0) -> LoadChooser:
    return LoadChooser(PrefillSpeed(tokens_per_s))


def test_choose_faster_load_is_chosen_with_deadline() -> None:
    decision = chooser().choose([LoadRun(Store(0.1, 1e6), 1000, 100_000)], 0)
    assert (decision.num_runs, decision.reason) == (1, Reason.LOADED)
    assert (decision.load_s, decision.compute_s) == (pytest.approx(0.2), 1.0)
    assert decision.deadline_s == pytest.approx(0.6)


def test_choose_fast_load_may_take_fifth_of_computing() -> None:
    decision = chooser().choose([LoadRun(Store(0.0, 1e9), 1000, 1_000_000)], 0)
    assert decision.deadline_s == pytest.approx(0.2)


def test_choose_deadline_is_at_most_computing_time() -> None:
    decision = chooser().choose([LoadRun(Store(0.0, 1e6), 1000, 900_000)], 0)
    assert decision.deadline_s == 1.0


def test_choose_slower_load_is_too_slow() -> None:
    decision = chooser().choose([LoadRun(Store(0.0, 1e6), 1000, 2_000_000)], 0)
    assert (decision.num_runs, decision.reason) == (0, Reason.TOO_SLOW)
    assert (decision.load_s, decision.compute_s) == (2.0, 1.0)


def test_choose_latency_above_short_computation_is_too_short() -> None:
    decision = chooser().choose([LoadRun(Store(2.0, 1e9), 1000, 1_000_000)], 0)
    assert (decision.num_runs, decision.reason) == (0, Reason.TOO_SHORT)


def test_choose_stalled_store_is_too_slow() -> None:
    decision = chooser().choose([LoadRun(Store(math.inf, 1e9), 1000, 1)], 0)
    assert (decision.num_runs, decision.reason) == (0, Reason.TOO_SLOW)


def test_choose_unknown_speed_loads() -> None:
    decision = LoadChooser(PrefillSpeed()).choose(
        [LoadRun(Store(5.0, 1e9), 1000, 1)], 0
    )
    assert decision.num_runs == 1
    assert decision.deadline_s == pytest.approx(3 * 5.0)
    quick = LoadChooser(PrefillSpeed()).choose([LoadRun(Store(0.0, 1e9), 1000, 1)], 0)
    assert quick.deadline_s == UNKNOWN_DEADLINE_S


def test_choose_unknown_speed_does_not_load_from_stalled_store() -> None:
    stalled = LoadRun(Store(math.inf, 1e9), 1000, 1)
    decision = LoadChooser(PrefillSpeed()).choose([stalled], 0)
    assert (decision.num_runs, decision.reason) == (0, Reason.TOO_SLOW)


def test_choose_store_that_is_not_compared_has_no_deadline() -> None:
    class Always:
        def expected_load_s(self, num_bytes: int) -> float | None:
            return None

    decision = chooser(1e9).choose([LoadRun(Always(), 1000, 1)], 0)
    assert (decision.num_runs, decision.deadline_s) == (1, math.inf)


def test_choose_first_load_of_store_may_take_as_long_as_computing() -> None:
    decision = chooser().choose([LoadRun(LoadTimesOfStore(), 1000, 1)], 0)
    assert (decision.num_runs, decision.deadline_s) == (1, 1.0)


class LoadTimesOfStore:
    def expected_load_s(self, num_bytes: int) -> float | None:
        return LoadTimes().expected_s(num_bytes)


def test_choose_near_run_without_far_one() -> None:
    near, far = Store(0.0, 1e9), Store(30.0, 1e9)
    runs = [LoadRun(near, 1000, 1_000_000), LoadRun(far, 2000, 1_000_000)]
    decision = chooser().choose(runs, 0)
    assert (decision.num_runs, decision.reason) == (1, Reason.TOO_SHORT)
    assert decision.compute_s == 1.0


def test_choose_stores_load_at_same_time() -> None:
    near, far = Store(0.0, 1e6), Store(0.0, 1e6)
    runs = [LoadRun(near, 1000, 900_000), LoadRun(far, 2000, 900_000)]
    assert chooser().choose(runs, 0).load_s == pytest.approx(0.9)
    same = [LoadRun(near, 1000, 900_000), LoadRun(near, 2000, 900_000)]
    assert chooser().choose(same, 0).load_s == pytest.approx(1.8)


def test_choose_counts_only_tokens_that_are_not_there() -> None:
    decision = chooser().choose([LoadRun(Store(0.0, 1e6), 1000, 500_000)], 800)
    assert (decision.num_runs, decision.compute_s) == (0, 0.2)


def test_choose_noise_at_break_even_does_not_alternate() -> None:
    chooses = chooser()

    def is_chosen(load_s: float) -> bool:
        run = LoadRun(Store(load_s, 1e12), 1000, 1)
        return chooses.choose([run], 0).num_runs > 0

    assert is_chosen(0.99)
    assert not is_chosen(1.2)
    assert not any(is_chosen(0.97) for _ in range(4)), "almost equal: as before"
    assert is_chosen(0.95)
    assert is_chosen(0.99)


def test_choose_refusal_near_break_even_is_tried_sometimes() -> None:
    chooses = chooser()
    run = LoadRun(Store(1.1, 1e12), 1000, 1)
    chosen = [chooses.choose([run], 0).num_runs for _ in range(32)]
    assert sum(chosen) == 4


def test_load_times_one_slow_load_does_not_exclude_larger_ones() -> None:
    """Its time varies by a tenth; larger loads, which would show the mistake, are never tried."""
    times = LoadTimes()
    times.observe(2 * MIB, 0.5)
    times.observe(8 * MIB, 0.5)
    times.observe(64 * MIB, 0.565)
    assert times.expected_s(4096 * MIB) < 0.7
    for _ in range(50):
        times.observe(64 * MIB, 0.565)
    assert times.expected_s(4096 * MIB) > 0.7, "it was no chance"


def test_load_times_wrong_time_of_a_size_is_corrected_beside_other_sizes() -> None:
    """A jump that each load of one size shows is no slowdown of the store."""
    times = LoadTimes()
    times.observe(1024 * MIB, 10.0)
    times.observe(4096 * MIB, 14.0)  # while the store was fast: it takes 45 s
    for _ in range(20):
        times.observe(1024 * MIB, 10.0)
        times.observe(4096 * MIB, 45.0)
    times.observe(1024 * MIB, 10.0)
    assert 30 < times.expected_s(4096 * MIB) < 60
    assert 7 < times.expected_s(1024 * MIB) < 14


def test_load_times_size_of_few_loads_is_tried_near_break_even() -> None:
    """They may have taken longer by chance, and nothing shows a wrong refusal."""
    times = LoadTimes()
    times.observe(8 * MIB, 0.55)
    assert times.expected_s(8 * MIB) < 0.5
    for _ in range(50):
        times.observe(8 * MIB, 0.55)
    assert 0.5 < times.expected_s(8 * MIB) < 0.55


def test_load_times_late_loads_near_break_even_end() -> None:
    """Loads that bring nothing before their deadline are samples, too: a size that is known from
    one load is not tried for ever."""
    times = LoadTimes()
    times.observe(8 * MIB, 0.5)
    num_late = 0
    while times.expected_s(8 * MIB) < 0.48:
        times.begin(num_late, 8 * MIB)
        times.end(num_late, 0, 0.48, is_late=True)
        # other sizes take as long as before
        times.observe(64 * MIB, 0.6)
        num_late += 1
        assert num_late < 10


def test_load_times_most_of_late_load_shows_its_time() -> None:
    """Three quarters are loaded at the deadline: the whole load takes 10 s, not a little longer."""
    times = LoadTimes()
    times.observe(8 * MIB, 0.08)
    for _ in range(10):
        times.observe(1024 * MIB, 7.0)
    num_late = 0
    while times.expected_s(1024 * MIB) < 7.5:
        times.begin(num_late, 1024 * MIB)
        times.end(num_late, 768 * MIB, 7.5, is_late=True)
        # other sizes take as long as before
        times.observe(8 * MIB, 0.08)
        num_late += 1
    assert num_late < 8


def test_load_times_silence_of_unknown_size_slows_no_other_size() -> None:
    """It may be the latency, which the only known load hides. A probe shows it."""
    times = LoadTimes()
    times.observe(1024 * MIB, 0.56)
    times.begin(1, 64 * MIB)
    times.end(1, 0, 0.08, is_late=True)
    assert times.is_stalled
    times.observe(8 * MIB, 0.5)
    assert times.expected_s(1024 * MIB) < 0.6
    assert times.expected_s(64 * MIB) > 0.4


def test_load_times_first_load_of_size_shows_slowdown_beyond_other_sizes() -> None:
    """A larger load takes no less: one of a new size that took longer was delayed."""
    times = settled(0.1, 1e9)
    times.observe(MIB // 4, 10.0)
    assert times.expected_s(64 * MIB) > 5.0
    for _ in range(3):
        times.observe(MIB // 4, 0.1)
    assert times.expected_s(64 * MIB) == pytest.approx(0.1 + 64 * MIB / 1e9, rel=0.4)


def test_load_times_silence_until_an_early_deadline_is_no_stall() -> None:
    """Computing would have taken hardly longer than the load."""
    times = LoadTimes()
    for _ in range(10):
        times.observe(8 * MIB, 0.5)
    times.begin(1, 8 * MIB)
    times.end(1, 0, 0.52, is_late=True)
    assert not times.is_stalled
    assert 0.52 < times.expected_s(8 * MIB) < 0.7
    times.begin(2, 8 * MIB)
    times.end(2, 0, 2.0, is_late=True)
    assert times.is_stalled
