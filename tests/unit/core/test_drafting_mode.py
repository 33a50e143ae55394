"""The better mode at each load is found by measuring, and trials of the other one cost little; time is simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.core.drafting_mode import (
    ALLOWANCE,
    EXPLORATION,
    LEAST_STEPS,
    MAX_EAGER_BATCH,
    MOST_DELAY,
    MOST_STEPS,
    DraftingMode,
    Mode,
    Modes,
)
from paceline.core.target_events import Reason

PLAIN, SOURCES, DRAFTING = Mode
PLAIN_S = 0.020
MANY = MAX_EAGER_BATCH


@dataclass
class Verifier:
    """A verifier whose drafting is `speed_up(sessions)` times as fast as plain decoding.

    Attributes:
        spread: Of the tokens of a session and step, as a share.
        noise: By which a step may take longer or shorter, as a share.
        lag: Steps until drafters answer.
        reading: How many times as long steps take until then.
        modes: Of all steps.
        lost_s, total_s: Time lost to the slower mode, and of all steps.
    """

    speed_up: Callable[[int], float]
    spread: float = 0.3
    noise: float = 0.1
    seed: int = 3
    lag: int = 0
    reading: float = 1.0
    slowness: float = 1.0
    switch: DraftingMode = field(default_factory=DraftingMode)
    modes: list[Mode] = field(default_factory=list)
    lost_s: float = 0.0
    total_s: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self._unanswered = 0

    def steps(self, count: int, num_sessions: int = MANY, *, reads: bool = False) -> list[Mode]:
        """Runs steps; returns their modes."""
        modes = [self._step(num_sessions, reads) for _ in range(count)]
        self.modes += modes
        return modes

    def _step(self, num_sessions: int, reads: bool) -> Mode:
        mode = self.switch.enter(num_sessions, (PLAIN, DRAFTING))
        self._unanswered = self._unanswered + 1 if mode is DRAFTING else 0
        answered = mode is PLAIN or self._unanswered > self.lag
        luck = float(self.rng.uniform(1.0 - self.noise, 1.0 + self.noise))
        seconds, tokens = self.slowness * PLAIN_S * luck, num_sessions
        speed_up = self.speed_up(num_sessions)
        if not answered:
            seconds *= self.reading
        if mode is DRAFTING and answered:
            # Half as many tokens again as plain decoding, in whatever time makes the ratio right.
            noise = self.spread * float(self.rng.standard_normal()) / num_sessions**0.5
            tokens = max(num_sessions, round(1.5 * num_sessions * (1.0 + noise)))
            seconds *= 1.5 / speed_up
        best = max(1.0, speed_up)
        self.lost_s += seconds - tokens / num_sessions * self.slowness * PLAIN_S / best
        self.total_s += seconds
        self.switch.observe(
            num_sessions=num_sessions,
            tokens=tokens,
            time=seconds / PLAIN_S,
            has_prefill=reads,
            responded=answered,
        )
        return mode


def always(ratio: float) -> Verifier:
    return Verifier(lambda _: ratio)


@pytest.mark.parametrize("num_sessions", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.2, 2.0])
def test_the_faster_mode_wins_at_every_load(num_sessions: int, ratio: float) -> None:
    verifier = always(ratio)
    verifier.steps(400 if num_sessions <= MAX_EAGER_BATCH else 2_000, num_sessions)
    wanted = DRAFTING if ratio > 1.0 else PLAIN
    assert verifier.steps(400, num_sessions).count(wanted) > 380


def test_every_mode_has_a_reason() -> None:
    verifier, slow = always(2.0), always(0.5)

    def reason(of: Verifier, count: int, num_sessions: int = MANY) -> Reason:
        of.steps(count, num_sessions)
        return of.switch.reason

    assert verifier.switch.enter(MANY, [PLAIN]) is PLAIN
    assert verifier.switch.reason is Reason.NO_DRAFTER, "nobody may speculate"
    assert reason(verifier, LEAST_STEPS) is Reason.TRYING, "plain decoding is measured, and drafting next"
    assert reason(verifier, MOST_STEPS) is Reason.PAYS
    assert reason(verifier, LEAST_STEPS, 16 * MANY) is Reason.TOO_LOADED, "nothing is known of so many"
    assert reason(slow, LEAST_STEPS + MOST_STEPS) is Reason.DID_NOT_PAY
    assert reason(slow, LEAST_STEPS, 16 * MANY) is Reason.TOO_LOADED


def test_each_load_has_its_own_mode_and_keeps_it() -> None:
    verifier = Verifier(lambda sessions: 2.0 if sessions < 12 else 0.7)
    for _ in range(2):
        for num_sessions in (1, 8, 32, 8, 1):
            verifier.steps(1_500, num_sessions)
    assert verifier.steps(50, 8).count(DRAFTING) == 50
    assert verifier.steps(50, 32).count(PLAIN) > 40
    assert verifier.steps(50, 1)[-10:].count(DRAFTING) == 10


@pytest.mark.parametrize("num_sessions", [1, MANY])
def test_the_first_trial_comes_once_plain_decoding_is_known(num_sessions: int) -> None:
    # The first of several steps count a little less when the last one has come.
    num_plain = LEAST_STEPS + 1
    assert always(1.5).steps(num_plain + 1, num_sessions) == [PLAIN] * num_plain + [DRAFTING]


def test_the_first_trial_of_more_sessions_is_saved_up_for_like_every_other_one() -> None:
    verifier = always(1.5)
    assert verifier.steps(500, 2 * MAX_EAGER_BATCH) == [PLAIN] * 500
    assert verifier.steps(300, 2 * MAX_EAGER_BATCH)[-1] is DRAFTING


@pytest.mark.parametrize("ratio", [0.3, 0.6, 0.9, 0.97])
@pytest.mark.parametrize("lag", [0, 5])
def test_trials_lose_half_a_percent_beyond_the_first_one(ratio: float, lag: int) -> None:
    verifier = Verifier(lambda _: ratio, lag=lag)
    verifier.steps(MOST_STEPS)
    lost_s, total_s = verifier.lost_s, verifier.total_s
    verifier.steps(10_000)
    assert verifier.modes[MOST_STEPS:].count(DRAFTING) > 0, "texts and machines change"
    # Even as little is measured with an error.
    assert (verifier.lost_s - lost_s) / (verifier.total_s - total_s) < 1.5 * EXPLORATION


@pytest.mark.parametrize(("ratio", "most"), [(0.2, 1), (0.5, 3), (0.8, 16)])
def test_a_trial_ends_before_the_step_that_would_exceed_the_allowance(ratio: float, most: int) -> None:
    verifier = always(ratio)
    verifier.steps(200)
    first_step = 1.1 * 1.5 * (1.0 / ratio - 1.0)
    assert 0.0 < verifier.lost_s / PLAIN_S < max(ALLOWANCE, first_step) + 0.5
    assert 1 <= verifier.modes.count(DRAFTING) <= most


def test_a_moment_with_few_sessions_is_no_other_load() -> None:
    verifier = Verifier(lambda sessions: 2.0 if sessions < 4 else 0.5)
    verifier.steps(50, 1)
    verifier.steps(200, 16)
    assert verifier.steps(8, 1) == [PLAIN] * 8, "between two waves of requests"
    assert verifier.steps(32, 1)[-1] is DRAFTING


def test_where_drafting_lost_more_sessions_wait_for_a_trial_and_where_it_won_fewer_do_not() -> None:
    verifier = Verifier(lambda sessions: 0.6 if sessions > 4 else 2.0)
    verifier.steps(1_500, 8)
    assert verifier.steps(50, 64) == [PLAIN] * 50
    winning = always(2.0)
    winning.steps(1_500, 16)
    assert winning.steps(1, 4) == [DRAFTING]


def test_steps_that_read_prompts_say_nothing_of_either_mode() -> None:
    verifier = always(2.0)
    assert set(verifier.steps(50, reads=True)) == {PLAIN}
    verifier.steps(50)
    known = verifier.switch.learned()
    verifier.slowness = 5.0
    assert set(verifier.steps(50, reads=True)) == {DRAFTING}
    assert verifier.switch.learned() == known


@pytest.mark.parametrize("reading", [1.0, 1.03])
def test_drafters_that_never_answer_cost_next_to_nothing_and_are_not_called_more_and_more(reading: float) -> None:
    verifier = Verifier(lambda _: 2.0, lag=10**9, reading=reading)
    assert verifier.steps(LEAST_STEPS + MOST_STEPS + 2)[-1] is PLAIN
    called = [verifier.steps(5_000).count(DRAFTING) for _ in range(4)]
    assert 0 < max(called) <= 10 * MOST_STEPS
    assert called[-1] <= called[0] + MOST_STEPS
    # Of the time of plain steps: the best mode has no share in it.
    lost_s = verifier.total_s - len(verifier.modes) * PLAIN_S
    assert lost_s / verifier.total_s < EXPLORATION


@pytest.mark.parametrize("num_sessions", [1, MANY])
def test_drafters_that_answer_late_are_tested_all_the_same_and_take_the_call_off_nothing(num_sessions: int) -> None:
    verifier = Verifier(lambda _: 2.0, lag=MOST_STEPS // 2)
    assert verifier.steps(2 * MOST_STEPS, num_sessions)[-1] is DRAFTING
    slow = Verifier(lambda _: 0.85, lag=MOST_STEPS // 2, reading=1.04)
    slow.steps(2 * MOST_STEPS, num_sessions)
    (load,) = slow.switch.loads.values()
    assert load.rates[DRAFTING].num_seen >= LEAST_STEPS // 2, "a test may lose what a call has not"


def test_on_a_machine_with_much_else_to_do_a_call_ends_with_the_drafters_response_nearly_always() -> None:
    fleets = [Verifier(lambda _: 2.0, lag=20, noise=0.8, seed=seed) for seed in range(20)]
    assert sum(fleet.steps(2 * MOST_STEPS, 1)[-1] is DRAFTING for fleet in fleets) >= 17


def test_a_call_that_costs_more_than_is_allowed_gets_twice_as_much_the_next_time() -> None:
    verifier = Verifier(lambda _: 2.0, lag=12, reading=2.0)
    assert verifier.steps(500)[-1] is PLAIN, "the first trial shows nothing"
    assert verifier.steps(10_000)[-1] is DRAFTING


def test_a_drafter_that_gets_better_is_found_and_one_that_gets_worse_is_dropped() -> None:
    verifier = always(0.8)
    verifier.steps(500)
    verifier.speed_up = lambda _: 1.5
    verifier.steps(2_500)
    assert verifier.steps(100).count(DRAFTING) == 100
    verifier.speed_up = lambda _: 0.6
    assert verifier.steps(300).count(PLAIN) > 100, "plain decoding is known, so nothing need be saved up for it"
    assert verifier.steps(100).count(PLAIN) > 80


def test_a_machine_that_gets_slow_does_not_change_the_mode_for_long() -> None:
    verifier = always(1.5)
    verifier.steps(500)
    verifier.slowness = 2.0
    assert verifier.steps(400).count(PLAIN) < 60


def test_a_pause_of_the_machine_is_an_accident() -> None:
    verifier = always(1.3)
    verifier.steps(300)
    verifier.slowness = 200.0
    verifier.steps(1)
    verifier.slowness = 1.0
    assert verifier.steps(50).count(DRAFTING) > 40


def test_steps_of_which_no_session_may_speculate_are_plain_and_teach_their_rate() -> None:
    verifier = always(2.0)
    verifier.steps(200)
    known = verifier.switch.loads[2]
    for _ in range(100):
        assert verifier.switch.enter(MANY, [PLAIN]) is PLAIN
        verifier.switch.observe(num_sessions=MANY, tokens=MANY, time=3.0, has_prefill=False, responded=True)
    assert known.rates[PLAIN].value < 0.6
    assert verifier.steps(10) == [DRAFTING] * 10, "who pays is known still"


def test_a_load_is_the_same_within_a_factor_so_that_one_session_more_changes_no_mode() -> None:
    verifier = Verifier(lambda sessions: 2.0 if sessions <= 6 else 0.5)
    verifier.steps(200, 4)
    assert set(verifier.steps(20, 3) + verifier.steps(20, 6)) == {DRAFTING}
    verifier.steps(1, 7)
    assert verifier.switch.mode is PLAIN
    assert set(verifier.switch.loads) == {2, 3}


def test_a_successor_begins_in_the_mode_that_was_better() -> None:
    verifier = Verifier(lambda sessions: 2.0 if sessions <= 8 else 0.5)
    for num_sessions in (8, 32):
        verifier.steps(2_000, num_sessions)
    switch = DraftingMode()
    switch.resume(verifier.switch.learned())
    assert [switch.enter(8), switch.enter(32)] == [DRAFTING, PLAIN]
    assert switch.learned() == pytest.approx(verifier.switch.learned())


def test_a_successor_tries_anew_what_did_not_pay_its_predecessor() -> None:
    verifier = Verifier(lambda _: 2.0)
    verifier.switch.resume([1.0, 1.0, 0.0, 0.5])
    assert verifier.steps(30, 2)[-1] is DRAFTING


@pytest.mark.parametrize(
    "learned",
    [
        [3.0, 1.0, 1.0],
        [3.0, 1.0, 0.0, -1.0],
        [3.0, float("nan"), 0.0, 1.0],
        [3.0, 0.0, 1e308, 1.0],
        [-1.0, 1.0, 1.0, 1.0],
    ],
)
def test_what_was_not_learned_by_such_a_switch_is_refused(learned: list[float]) -> None:
    with pytest.raises(ValueError, match=r"needs loads to 20 and rates to|shorter"):
        DraftingMode().resume(learned)


def modes_of(
    switch: DraftingMode,
    count: int,
    num_sessions: int,
    rates: dict[Mode, float],
    possible: Modes = tuple(Mode),
) -> list[Mode]:
    """Runs steps in which each mode has its rate, within 3 %; returns their modes."""
    luck, modes = np.random.default_rng(5), list[Mode]()
    for _ in range(count):
        modes.append(switch.enter(num_sessions, possible))
        switch.observe(
            num_sessions=num_sessions,
            tokens=num_sessions,
            time=float(luck.normal(1.0, 0.03)) / rates[modes[-1]],
            has_prefill=False,
            responded=True,
        )
    return modes


RATES = {PLAIN: 1.0, SOURCES: 1.0, DRAFTING: 2.0}


@pytest.mark.parametrize("sources", [0.7, 0.99, 1.02])
def test_drafting_gets_its_turn_however_often_sources_are_tried(sources: float) -> None:
    modes = modes_of(DraftingMode(), 1_500, 8 * MAX_EAGER_BATCH, RATES | {SOURCES: sources})
    assert SOURCES in modes[:100]
    assert modes[-1] is DRAFTING


def test_a_mode_that_new_texts_gain_nothing_from_is_left_soon_whatever_trials_have_lost() -> None:
    """Eight sampled streams after greedy ones: sources found nothing any more, and cost 7 % of 190 steps."""
    switch = DraftingMode()
    assert modes_of(switch, 150, 8, RATES | {SOURCES: 1.15, DRAFTING: 0.5})[-1] is SOURCES
    switch.loads[3].allowance = -5.0
    modes = modes_of(switch, 250, 8, RATES | {SOURCES: 0.93, DRAFTING: 0.5})
    assert modes.count(SOURCES) < 150
    assert modes[-1] is PLAIN


def test_a_trial_that_is_interrupted_is_not_cut_off() -> None:
    switch = DraftingMode()
    assert modes_of(switch, LEAST_STEPS + 4, 1, RATES)[-3:] == [DRAFTING] * 3
    modes_of(switch, 30, 16, RATES)
    assert DRAFTING in modes_of(switch, 60, 1, RATES)


def test_a_rehearsal_leaves_no_load_behind_and_counts_at_the_load_that_it_runs() -> None:
    switch = DraftingMode()
    modes_of(switch, 50, 64, RATES)
    for mode in (PLAIN, DRAFTING):
        switch.rehearse(mode)
        modes_of(switch, 16, 1, RATES)
    switch.rehearse(None)
    assert switch.loads[0].rates[DRAFTING].steps >= LEAST_STEPS
    switch.rehearse(PLAIN)
    modes_of(switch, 16, 64, RATES)
    switch.rehearse(None)
    assert modes_of(switch, 1, 1, RATES) == [DRAFTING]


def test_a_rehearsal_of_drafting_learns_nothing_where_no_drafter_is() -> None:
    switch = DraftingMode()
    switch.rehearse(DRAFTING)
    assert set(modes_of(switch, 10, 1, RATES, (PLAIN, SOURCES))) == {PLAIN}
    assert not any(switch.learned())


def test_a_successor_waits_with_its_first_trial_as_long_as_anybody() -> None:
    switch = DraftingMode()
    switch.resume([5.0, 1.0, 0.0, 0.0])
    assert DRAFTING not in modes_of(switch, 300, 32, RATES, (PLAIN, DRAFTING))


def test_a_step_without_a_drafter_changes_no_mode() -> None:
    switch = DraftingMode(math.inf)
    modes_of(switch, 200, 8, RATES)
    for _ in range(20):
        assert DRAFTING not in modes_of(switch, 1, 8, RATES, (PLAIN, SOURCES))
        assert modes_of(switch, 1, 8, RATES) == [DRAFTING]


def test_a_pause_of_the_machine_within_a_trial_counts_for_few_steps() -> None:
    switch = DraftingMode()
    assert modes_of(switch, LEAST_STEPS + 2, 1, RATES)[-1] is DRAFTING
    switch.observe(num_sessions=1, tokens=1, time=500.0, has_prefill=False, responded=True)
    assert switch.loads[0].allowance > -2.0 * MOST_DELAY


def test_rates_are_shown_after_some_steps() -> None:
    verifier = always(2.0)
    verifier.steps(LEAST_STEPS - 1, 8)
    assert verifier.switch.measured == (8, {})
    verifier.steps(20 * MOST_STEPS, 8)
    _, rates = verifier.switch.measured
    assert set(rates) >= {PLAIN, DRAFTING}
    assert rates[DRAFTING] > 1.5 * rates[PLAIN]
