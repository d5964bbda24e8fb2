"""Whether a load is faster than computing: estimates of both times, and the decision.

1. ``LoadTimes`` estimates the loads of one store from their history: the usual time by size, times
   the present slowdown of the store.
2. ``PrefillSpeed`` estimates the engine's computation by the depth of the tokens.
3. ``LoadChooser`` compares them for the blocks of one request.

Pure arithmetic: no system call, no clock, no lock. A decision takes some microseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol, get_args

LoadPolicy = Literal["auto", "always", "never"]
"""``auto``: load a prefix if that is expected to be faster than computing it. ``always``: load
every block that a store holds. ``never``: load nothing; blocks are stored only."""
LOAD_POLICIES: tuple[LoadPolicy, ...] = get_args(LoadPolicy)

# Unknown sizes count as loads with so many times the bandwidth: parallel reads may reach it, and
# only a trial shows it. The deadline of the load bounds the cost of a trial that fails.
_TRIAL_SPEEDUP = 4.0
_SHAPE_RATE = 0.1  # least share of a new sample in the usual time of its size
_LEAST_S = 1e-6  # minimum seconds of a load, because the logarithm of 0 does not exist
# Share by which a load may take longer than usual by chance. If the few known loads of a size did,
# it must not seem too slow: it would never be loaded again, and nothing would correct the estimate.
# So the estimate is lower by this share, divided by the root of the number of samples.
_VARIATION = 0.2
# Single loads vary by some tenths, which are averaged: a fifth of a new sample counts. A load of
# more than twice the expected time, or less than half of it, shows that the store has changed.
_NOISE_RATE = 0.2
_CHANGE = 2.0
# A load beyond these bounds may also show that the usual time of its size is wrong, so this time
# takes a quarter of the change. If only the slowdown changed, it would rise after each load of this
# size and fall after each load of another size.
_OWN_SHARE = 0.25
# The first load of a size sets its usual time, within bounds that follow from other sizes and are
# widened by 30 %. Time beyond them counts as a change of the store's slowdown.
_TOLERANCE = 1.3
# A load is chosen from 0.96 of the computing time on, and until 1.0 if the last one was: noise
# within these bounds does not alternate, and the wrong choice costs less than 5 %.
_HYSTERESIS = 0.04
# Of the refusals within 15 % of the break-even, each eighth is a load: only loads of this size show
# that the estimate is wrong.
_CLOSE = 1.15
_TRIAL_EACH = 8
# A load is abandoned after three times its expected time, or a fifth of the computing time, if this
# is later: a load that stalls makes a request a fifth slower, unless its usual time is longer.
_LATE = 3.0
_LATE_SHARE = 0.2
# A store is stalled if a load brought nothing in 2.5 times its expected time: less than ``_LATE``,
# so a load that reaches a deadline of three times its expected time without a block is a stall.
_STALL = 2.5
UNKNOWN_DEADLINE_S = 10.0
"""Deadline in seconds of a load while the engine's speed is unknown."""
# An abandoned load would have taken longer than its deadline: at least by a tenth.
_LONGER = 1.1
# A store is not too slow, but the prefix too short, if one of 16 times its tokens would be loaded.
_LONG = 16
_MEMORY = 0.97  # weight of the earlier samples of the prefill speed after each new one
# Depths whose variance is below this share of their mean square show no slope.
_FLAT = 1e-3


class Reason(StrEnum):
    """Why the blocks that a store holds for a request were loaded, computed, or not used."""

    LOADED = "loaded"
    TOO_SLOW = "too_slow"
    """Computed: the store is slower than the engine, or its last load stalled."""
    TOO_SHORT = "too_short"
    """Computed: only a longer prefix would be worth the latency of the store."""
    DEADLINE = "deadline"
    """The load was abandoned at its deadline; the engine computed the other blocks."""
    REFUSED = "refused"
    """The request neither uses nor fills the store: it names no tenant, which the tier requires, or
    its options are invalid."""


class _Usual:
    """Usual time of loads of about one size."""

    def __init__(self, num_bytes: int, seconds: float) -> None:
        # means of the logarithms of bytes and seconds of the samples
        self._log_bytes = math.log(num_bytes)
        self._log_seconds = math.log(seconds)
        self._num_samples = 1
        self.num_bytes = float(num_bytes)
        """Mean size of the samples."""
        self.seconds = seconds
        """Mean time of the samples, without the slowdown of the store."""

    def add(self, num_bytes: int, seconds: float) -> None:
        """Move both means, which are those of logarithms, towards a sample."""
        self._num_samples += 1
        # a plain mean of the first ten samples; then each new one counts a tenth, and old ones fade
        rate = max(_SHAPE_RATE, 1 / self._num_samples)
        log_bytes = math.log(num_bytes)
        log_seconds = math.log(seconds)
        self._log_bytes += rate * (log_bytes - self._log_bytes)
        self._log_seconds += rate * (log_seconds - self._log_seconds)
        self.num_bytes = math.exp(self._log_bytes)
        self.seconds = math.exp(self._log_seconds)

    @property
    def certain_share(self) -> float:
        """Share of the usual time that remains without the time that chance may have added to the
        samples."""
        return 1 - _VARIATION / math.sqrt(self._num_samples)

    @property
    def least_s(self) -> float:
        """The usual time without the time that chance may have added to the samples."""
        return self.seconds * self.certain_share


class _LoadInFlight(NamedTuple):
    """A load that has not ended."""

    num_bytes: int
    bytes_before: int
    """Bytes of the loads that were in flight when it began."""


class _SharesOfChange(NamedTuple):
    """How far two estimates follow the change that a load shows: exponents of the change, from 0,
    not at all, to 1, completely."""

    slowdown: float
    """Exponent of the change by which the store's slowdown is multiplied."""
    usual: float
    """Exponent of the change in the sample that is added to the usual time of the load's size."""


class LoadTimes:
    """Expected times of the loads of one store, from its own history. Latency, bandwidth, decoding
    and the queue before a load are included.

    Sizes are classes of powers of two, with linear interpolation between them. A sample moves the
    time of its class slowly, and the slowdown, which applies to all sizes, quickly: at once, if it
    differs by more than a factor of two. Means are those of logarithms.
    """

    def __init__(self) -> None:
        self.is_stalled = False
        """Whether the last load brought nothing before its deadline. Loads are expected to take for
        ever then, until one ends."""
        self._by_class: dict[int, _Usual] = {}
        """Usual times by class of sizes (``_size_class``)."""
        self._sizes: list[_Usual] = []
        """The values of ``_by_class``, ascending."""
        self._slowdown = 1.0
        """Present factor of all usual times."""
        self._in_flight: dict[int, _LoadInFlight] = {}
        """By job id."""
        self._bytes_in_flight = 0
        """Bytes of all loads in flight."""

    def begin(self, job_id: int, num_bytes: int) -> None:
        """Count a load that begins now, after those in flight."""
        self._in_flight[job_id] = _LoadInFlight(num_bytes, self._bytes_in_flight)
        self._bytes_in_flight += num_bytes

    def end(
        self,
        job_id: int,
        loaded_bytes: int,
        seconds: float,
        *,
        is_late: bool,
    ) -> None:
        """Learn from a load that ended.

        :param loaded_bytes: bytes of the blocks that were loaded; fewer than all if some failed.
        :param is_late: whether its deadline had passed.
        """
        load = self._in_flight.pop(job_id)
        self._bytes_in_flight -= load.num_bytes
        # A load that brought nothing shows something only if it had its full time.
        if not loaded_bytes:
            if is_late:
                self.abandon(load.num_bytes, 0, seconds)
            return
        # The time of a load includes that of the loads that were in flight before it, so their
        # bytes count, too.
        all_bytes = load.num_bytes + load.bytes_before
        arrived_bytes = loaded_bytes + load.bytes_before
        if is_late:
            self.abandon(all_bytes, arrived_bytes, seconds)
        else:
            self.observe(arrived_bytes, seconds)

    def cancel(self, job_id: int) -> None:
        """Forget a load that was not run."""
        load = self._in_flight.pop(job_id)
        self._bytes_in_flight -= load.num_bytes

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Add a load, or a probe, that ended.

        The ratio of its time to the expected time moves two estimates: the slowdown of the store,
        and the usual time of loads of this size.

        :param num_bytes: bytes of the load and of those in flight before it, above 0.
        """
        took_s = max(seconds, _LEAST_S)
        usual = self._by_class.get(_size_class(num_bytes))
        # The first load of a size sets its usual time, within bounds that follow from other sizes.
        # Time beyond the bounds is left to the slowdown, as part of the change.
        if usual is None:
            self._set_usual(num_bytes, took_s / self._slowdown)
        usual_s = self._usual_s(num_bytes)
        expected_s = usual_s * self._slowdown
        change = took_s / expected_s
        shares = self._shares_of(change)
        # the shares are exponents: they divide the change, a factor, between the two estimates
        self._slowdown *= change**shares.slowdown
        # a load that ended shows that the store answers again
        self.is_stalled = False
        # the first load of a size has set its usual time above
        if usual is not None:
            usual.add(num_bytes, usual_s * change**shares.usual)

    def _shares_of(self, change: float) -> _SharesOfChange:
        """Return how far two estimates follow a load: the slowdown of the store, and the usual time
        of loads of this size.

        :param change: how many times as long as expected the load took.
        """
        # Either the store has changed, or the usual time of this size is wrong. It is not known
        # which: the slowdown follows fully, the usual time a part of the way.
        is_ordinary = 1 / _CHANGE < change < _CHANGE
        if not is_ordinary:
            return _SharesOfChange(slowdown=1.0, usual=_OWN_SHARE)
        # After a stall, the slowdown from before it is out of date: it follows fully. The usual
        # time of this size is not, and stays.
        if self.is_stalled:
            return _SharesOfChange(slowdown=1.0, usual=0.0)
        # An ordinary difference is mostly of this size alone: its usual time follows nearly all of
        # it. The slowdown, which all sizes share, follows a small part.
        return _SharesOfChange(slowdown=_NOISE_RATE, usual=1 - _NOISE_RATE)

    def abandon(
        self,
        num_bytes: int,
        loaded_bytes: int,
        seconds: float,
    ) -> None:
        """Add a load that was abandoned at its deadline. The blocks that had arrived count like a
        load of their size. The whole load would have taken longer than ``seconds``: if the estimate
        for its size is shorter, it is raised.

        :param num_bytes: bytes of the whole load. If blocks of it had arrived, those of the loads
            that were in flight before it are included, because ``seconds`` includes their time.
        :param loaded_bytes: the part of these bytes that had arrived; 0: no block of the load had.
        """
        if not loaded_bytes:
            self._add_silence(num_bytes, seconds)
            return
        self.observe(loaded_bytes, seconds)
        rest_s = self._rest_s(num_bytes, loaded_bytes, seconds)
        # least seconds that the whole load would have taken
        least_s = max(_LONGER * seconds, seconds + rest_s)
        # usual times are those of the store without its present slowdown
        least_usual_s = least_s / self._slowdown
        # the estimate is long enough already
        if self._usual_s(num_bytes) >= least_usual_s:
            return
        usual = self._by_class.get(_size_class(num_bytes))
        if usual is None:
            self._set_usual(num_bytes, least_usual_s)
        else:
            # add it as one sample of many, because a single late load must not exclude its size
            usual.add(num_bytes, least_usual_s)

    def _rest_s(
        self,
        num_bytes: int,
        loaded_bytes: int,
        seconds: float,
    ) -> float:
        """Return how long the rest of an abandoned load would have taken, at least. The loaded part
        shows the bandwidth; 0 if it is less than half of the load, because the time of so small a
        part is mostly latency."""
        if loaded_bytes < num_bytes / 2:
            return 0.0
        # the latency of a load is at most the time of the smallest loads
        most_latency_s = self._sizes[0].seconds * self._slowdown
        transfer_s = max(0.0, seconds - most_latency_s)
        missing_bytes = num_bytes - loaded_bytes
        return transfer_s * missing_bytes / loaded_bytes

    def _add_silence(self, num_bytes: int, seconds: float) -> None:
        """Add a load that brought nothing before its deadline, which was ``seconds`` after its
        begin. If that is clearly longer than expected, the store has stalled; otherwise the load
        may have been only a little late.

        A deadline is three times the time that was expected of the load, or later; it is earlier
        only if the engine computes the tokens in less time than that (``_deadline_s``).
        """
        usual = self._by_class.get(_size_class(num_bytes))
        # No load of this size is known: the silence may be its usual latency. The store counts as
        # stalled until a probe, a small test read, or a running load ends. The slowdown, which
        # holds for all sizes, does not grow.
        if usual is None:
            self.stall()
            return
        usual_s = self._usual_s(num_bytes)
        expected_s = usual_s * self._slowdown
        if seconds >= _STALL * expected_s:
            self.stall()
            return
        # The deadline was the time of computing these tokens. The expected time rises to a tenth
        # above it: loading these tokens then seems slower than computing them, while loads that
        # save more time are still chosen.
        least_s = _LONGER * seconds
        least_usual_s = least_s / self._slowdown
        # The usual time of the size moves part of the way, as with each sample. The slowdown takes
        # the rest, so that their product reaches ``least_s``.
        usual.add(num_bytes, max(usual_s, least_usual_s))
        least_slowdown = least_s / self._usual_s(num_bytes)
        self._slowdown = max(self._slowdown, least_slowdown)

    def stall(self) -> None:
        """Mark the store as stalled: a load, or a probe, brought nothing before its deadline.
        ``observe`` ends this."""
        self.is_stalled = True

    def _set_usual(self, num_bytes: int, seconds: float) -> None:
        """Set the usual time of loads of about this size, of which nothing is known yet, to
        ``seconds``, or to the nearest time within ``_bounds``."""
        least_s, most_s = self._bounds(num_bytes)
        bounded_s = min(max(seconds, least_s), most_s)
        self._by_class[_size_class(num_bytes)] = _Usual(num_bytes, bounded_s)
        # classes are sorted like the sizes in them
        classes = sorted(self._by_class)
        self._sizes = [self._by_class[size_class] for size_class in classes]

    def _bounds(self, num_bytes: int) -> tuple[float, float]:
        """Return the shortest and the longest plausible usual time of loads of a size.

        They follow from the next smaller and the next larger size that are known: a larger load
        takes no less time than a smaller one, and at most in proportion to its bytes. Both bounds
        are widened by 30 %. Without known sizes, they are 0 and infinity.
        """
        least_s = 0.0
        most_s = math.inf
        place = self._place_of(num_bytes)
        if place < len(self._sizes):
            larger = self._sizes[place]
            least_s = larger.seconds * num_bytes / larger.num_bytes
            most_s = larger.seconds
        if place:
            smaller = self._sizes[place - 1]
            proportional_s = smaller.seconds * num_bytes / smaller.num_bytes
            least_s = max(least_s, smaller.seconds)
            most_s = min(most_s, proportional_s)
        return least_s / _TOLERANCE, most_s * _TOLERANCE

    def expected_s(self, num_bytes: int) -> float:
        """Return the expected seconds of a load that begins now; 0 if nothing is known."""
        if self.is_stalled:
            return math.inf
        # the load ends after the loads in flight, so their bytes count, too
        total_bytes = num_bytes + self._bytes_in_flight
        expected_s = self._usual_s(total_bytes) * self._slowdown
        usual = self._by_class.get(_size_class(total_bytes))
        if usual is not None:
            # Expect less while few loads of this size are known: a load that was wrongly chosen
            # costs little and corrects the estimate, but nothing would correct a wrong refusal.
            expected_s *= usual.certain_share
        return expected_s

    def _place_of(self, num_bytes: int) -> int:
        """Return the place in ``_sizes`` of the first size that is not smaller than ``num_bytes``;
        the length of ``_sizes`` if all are smaller."""
        return bisect_left(
            self._sizes, float(num_bytes), key=lambda usual: usual.num_bytes
        )

    def _usual_s(self, num_bytes: int) -> float:
        """Return the usual time of loads of a size, on a line through those of its neighbours; 0 if
        nothing is known."""
        sizes = self._sizes
        if not sizes:
            return 0.0
        place = self._place_of(num_bytes)
        if place == len(sizes):
            return self._beyond_s(num_bytes)
        # The line ends at the next larger size and begins at the one before it. Below the smallest
        # size, the line between the two smallest continues. If only one size is known, its latency
        # is unknown, and the line leads to 0 bytes in 0 s.
        end_of_line = place
        if place == 0 and len(sizes) > 1:
            end_of_line = 1
        slope = self._slope(end_of_line, sizes[end_of_line].seconds)
        # go back along the line from the next larger size
        larger = sizes[place]
        usual_s = larger.seconds - slope * (larger.num_bytes - num_bytes)
        return max(usual_s, _LEAST_S)

    def _beyond_s(self, num_bytes: int) -> float:
        """Return the usual time of loads that are larger than all known ones: on the line of the
        last two, and faster beyond twice the largest known size."""
        last_place = len(self._sizes) - 1
        last = self._sizes[last_place]
        # The least time of the last size gives the flattest line. If a line that is steep by chance
        # excluded all larger sizes, no load would correct it.
        slope = self._slope(last_place, last.least_s)
        # bytes beyond twice the largest known size
        far_bytes = max(0.0, num_bytes - 2 * last.num_bytes)
        near_bytes = num_bytes - last.num_bytes - far_bytes
        near_s = slope * near_bytes
        far_s = slope * far_bytes / _TRIAL_SPEEDUP
        return last.seconds + near_s + far_s

    def _slope(self, place: int, seconds: float) -> float:
        """Return the seconds per byte between the size at ``place`` and the one before it. For the
        first one, whose latency is unknown, all of its time counts as transfer.

        :param seconds: the time to assume for the size at ``place``: its usual time, or less.
        """
        upper = self._sizes[place]
        if place == 0:
            return seconds / upper.num_bytes
        lower = self._sizes[place - 1]
        more_s = max(0.0, seconds - lower.seconds)
        more_bytes = max(1.0, upper.num_bytes - lower.num_bytes)
        return more_s / more_bytes


def _size_class(num_bytes: int) -> int:
    """Return the class of a load's size: the sizes from one power of two to the next."""
    return num_bytes.bit_length()


class PrefillSpeed:
    """Expected times of the engine's computation of prompt tokens.

    The time of a token grows linearly with the number of tokens before it, because of attention:
    least squares over decaying samples, weighted by their tokens.
    """

    def __init__(self, tokens_per_s: float | None = None) -> None:
        """:param tokens_per_s: a fixed speed at all depths; None: as observed."""
        self._is_fixed = tokens_per_s is not None
        # the line: seconds of a token at depth 0, and their growth with each token before it
        self._first_s = 0.0
        self._growth_s = 0.0
        # weight of the samples in tokens, which decays; 0: no speed is known
        self._weight = 0.0
        if tokens_per_s is not None:
            self._first_s = 1 / tokens_per_s
            self._weight = 1.0
        # The means from which the line is computed, weighted and decaying: of the depth (tokens
        # before the middle of a sample), its square, the seconds of a token, and of their product.
        self._mean_depth = 0.0
        self._mean_depth_squared = 0.0
        self._mean_token_s = 0.0
        self._mean_product = 0.0

    def observe(
        self,
        start: int,
        stop: int,
        seconds: float,
    ) -> None:
        """Add a computation of the tokens from ``start`` to ``stop - 1``, which took ``seconds``
        without the time of other computations. Ignored if the speed is fixed."""
        num_tokens = stop - start
        if self._is_fixed or num_tokens <= 0 or seconds <= 0:
            return
        depth = (start + stop) / 2
        token_s = seconds / num_tokens
        self._weight = _MEMORY * self._weight + num_tokens
        share = num_tokens / self._weight  # share of this sample in each mean
        self._mean_depth += share * (depth - self._mean_depth)
        self._mean_token_s += share * (token_s - self._mean_token_s)
        self._mean_depth_squared += share * (depth * depth - self._mean_depth_squared)
        self._mean_product += share * (token_s * depth - self._mean_product)
        self._fit_line()

    def _fit_line(self) -> None:
        """Compute from the means the line of a token's seconds by its depth (least squares)."""
        depth = self._mean_depth
        token_s = self._mean_token_s
        variance = self._mean_depth_squared - depth**2
        # samples of about one depth show no growth: keep the growth that was computed before
        if variance > _FLAT * self._mean_depth_squared:
            covariance = self._mean_product - token_s * depth
            self._growth_s = max(0.0, covariance / variance)
        # bound the growth, so that a token at depth 0 takes no negative time
        most_growth_s = token_s / depth if depth else 0.0
        self._growth_s = min(self._growth_s, most_growth_s)
        self._first_s = token_s - self._growth_s * depth

    def expected_s(self, start: int, stop: int) -> float | None:
        """Return the expected seconds of the computation of the tokens from ``start`` to ``stop -
        1``; None: nothing is known."""
        if not self._weight:
            return None
        num_tokens = stop - start
        mean_depth = (start + stop) / 2
        mean_token_s = self._first_s + self._growth_s * mean_depth
        return num_tokens * mean_token_s


class Loads(Protocol):
    """The part of a store's interface that ``LoadChooser`` uses."""

    def expected_load_s(self, num_bytes: int) -> float | None:
        """Return the expected seconds of a load of so many bytes; 0 if nothing is known; None: load
        whatever it takes."""
        ...


class LoadRun(NamedTuple):
    """Consecutive blocks of a request that one store would load."""

    store: Loads
    stop: int
    """Tokens of the request up to the end of the last block."""
    num_bytes: int


class LoadDecision(NamedTuple):
    """The number of runs to load for a request, and the reason."""

    num_runs: int
    """Number of runs to load, from the first one on; 0: compute everything."""
    reason: Reason
    """Why the runs after ``num_runs`` are computed; ``LOADED``: there are none."""
    load_s: float
    """Expected seconds of the load of all runs, or of those that are loaded."""
    compute_s: float | None
    """Expected seconds of their computation; None: unknown."""
    deadline_s: float
    """Seconds after which the load is abandoned."""


class _Estimate(NamedTuple):
    """Expected times of the first runs of a request."""

    num_runs: int
    load_s: float
    """Expected seconds of their load; 0: nothing is known, or ``always_load`` is set."""
    compute_s: float | None
    """Expected seconds of their computation; None: unknown."""
    always_load: bool = False
    """Whether one of the stores is to be loaded from whatever it takes."""


class LoadChooser:
    """Decides how many runs of blocks each request of one engine loads from stores, instead of
    computing them."""

    def __init__(self, prefill: PrefillSpeed) -> None:
        self.prefill = prefill
        self._was_chosen = True
        """Whether the last comparison of both times chose the load: then the next one needs no
        margin (``_HYSTERESIS``)."""
        self._num_close = 0
        """Loads that were nearly as fast as the computation and were refused, since the last trial
        (``_is_worth_loading``)."""

    def choose(self, runs: Sequence[LoadRun], start: int) -> LoadDecision:
        """Choose the longest prefix that is expected to be loaded faster than computed.

        Only whole runs: the time of a load grows at most in proportion to its bytes, that of a
        computation at least in proportion to its tokens, so a part of a run is never worth more.

        :param runs: at least one, in the order of the request. Different stores load at the same
            time.
        :param start: leading tokens of the request that need no load.
        """
        whole = self._estimate(runs, start)
        if self._is_worth_loading(whole):
            return self._decision_to_load(whole, Reason.LOADED)
        # why the last runs are computed, even if earlier runs are loaded
        reason = _reason_to_compute(runs, start, self.prefill)
        # try the longest prefix first
        for num_runs in range(len(runs) - 1, 0, -1):
            prefix = self._estimate(runs[:num_runs], start)
            if self._is_worth_loading(prefix):
                return self._decision_to_load(prefix, reason)
        self._was_chosen = False
        return LoadDecision(0, reason, whole.load_s, whole.compute_s, deadline_s=0.0)

    def _estimate(self, runs: Sequence[LoadRun], start: int) -> _Estimate:
        """Return the expected times of these runs, which begin at token ``start``."""
        load_s = _parallel_load_s(runs)
        compute_s = self.prefill.expected_s(start, runs[-1].stop)
        num_runs = len(runs)
        if load_s is None:
            return _Estimate(
                num_runs, load_s=0.0, compute_s=compute_s, always_load=True
            )
        return _Estimate(num_runs, load_s, compute_s)

    def _is_worth_loading(self, estimate: _Estimate) -> bool:
        """Return whether to load: the load is faster than the computation, or a trial. Of the loads
        that are nearly as fast, each eighth is a trial: only loads of this size show whether their
        estimate is wrong."""
        if estimate.always_load:
            return True
        load_s = estimate.load_s
        compute_s = estimate.compute_s
        # a load after a refusal needs a margin, so that decisions do not alternate by chance
        limit = 1.0 if self._was_chosen else 1 - _HYSTERESIS
        if _is_faster(load_s, compute_s, limit):
            return True
        is_close = compute_s is not None and load_s <= _CLOSE * compute_s
        if not is_close:
            return False
        self._num_close += 1
        is_trial = self._num_close == _TRIAL_EACH
        if is_trial:
            self._num_close = 0
        return is_trial

    def _decision_to_load(self, estimate: _Estimate, reason: Reason) -> LoadDecision:
        """Return the decision to load the runs of an estimate.

        :param reason: why the runs after them are computed; ``LOADED``: there are none.
        """
        deadline_s = math.inf
        # Without a cost limit, no times were compared: there is no deadline, and ``_was_chosen``
        # keeps the result of the last comparison.
        if not estimate.always_load:
            self._was_chosen = True
            deadline_s = _deadline_s(estimate.load_s, estimate.compute_s)
        return LoadDecision(
            estimate.num_runs,
            reason,
            estimate.load_s,
            estimate.compute_s,
            deadline_s,
        )


def _parallel_load_s(
    runs: Sequence[LoadRun],
    multiple: int = 1,
) -> float | None:
    """Return the expected seconds until all runs are loaded, if each had ``multiple`` times its
    bytes. None: one of their stores has no cost limit and is always loaded from."""
    bytes_by_store: dict[Loads, int] = {}
    for run in runs:
        before = bytes_by_store.get(run.store, 0)
        bytes_by_store[run.store] = before + run.num_bytes
    # different stores load at the same time, so the slowest store counts
    slowest_s = 0.0
    for store, num_bytes in bytes_by_store.items():
        expected_s = store.expected_load_s(multiple * num_bytes)
        if expected_s is None:
            return None
        slowest_s = max(slowest_s, expected_s)
    return slowest_s


def _reason_to_compute(
    runs: Sequence[LoadRun],
    start: int,
    prefill: PrefillSpeed,
) -> Reason:
    """Return why runs are computed. ``TOO_SHORT``: a load of 16 times the tokens would be faster
    than their computation, so the latency of the store is too long for so few; otherwise
    ``TOO_SLOW``."""
    num_tokens = runs[-1].stop - start
    long_stop = start + _LONG * num_tokens
    long_load_s = _parallel_load_s(runs, _LONG)
    long_compute_s = prefill.expected_s(start, long_stop)
    # a store without a cost limit is never too slow
    if long_load_s is None or _is_faster(long_load_s, long_compute_s):
        return Reason.TOO_SHORT
    return Reason.TOO_SLOW


def _is_faster(
    load_s: float,
    compute_s: float | None,
    limit: float = 1.0,
) -> bool:
    """Return whether a load takes at most ``limit`` times as long as the computation. While the
    engine's speed is unknown, all loads are faster, except those of a stalled store."""
    if compute_s is None:
        return math.isfinite(load_s)
    return load_s <= limit * compute_s


def _deadline_s(load_s: float, compute_s: float | None) -> float:
    """Return the seconds after which a load is abandoned: three times its expected time or a fifth
    of the computing time, whichever is later, but at most the computing time.

    :param load_s: expected seconds of the load; 0: nothing is known.
    :param compute_s: expected seconds of the computation; None: unknown.
    """
    if compute_s is None:
        return max(UNKNOWN_DEADLINE_S, _LATE * load_s)
    # the first load of a store is a trial, which may take as long as computing
    if not load_s:
        return compute_s
    late_s = max(_LATE * load_s, _LATE_SHARE * compute_s)
    return min(compute_s, late_s)
