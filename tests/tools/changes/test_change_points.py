"""Changes of level are found where they were planted, and in noise there are none."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from spbench.bench.tools.changes.change_points import MINIMUM_EFFECT, ChangePoint, _doubt, change_points

COMMITS = 60
NOISES = (0.01, 0.015, 0.02, 0.03)


def nights(generator: np.random.Generator, noise: float, commits: int = COMMITS) -> NDArray[np.float64]:
    """Medians of 9 samples a night, each with that relative noise, and all with a third of it in common."""
    samples = generator.normal(0, noise, (commits, 9)) + generator.normal(0, noise / 3, (commits, 1))
    return np.median(0.2 * np.exp(samples), axis=1)


def stepped(generator: np.random.Generator, noise: float, place: int, factor: float) -> list[ChangePoint]:
    values = nights(generator, noise)
    values[place:] *= factor
    return change_points(values.tolist())


@pytest.mark.parametrize("factor", [1.05, 0.95])
@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("place", [9, 30, 52])
def test_a_planted_step_is_found_and_no_other(noise: float, place: int, factor: float) -> None:
    for seed in range(5):
        (found,) = stepped(np.random.default_rng(seed), noise, place, factor)
        assert found.last_before < place <= found.first_after
        assert found.first_after - found.last_before <= (1 if noise == 0.01 else 6)
        assert found.after / found.before == pytest.approx(factor, abs=0.02)
        assert not found.drift


def test_a_range_is_as_wide_as_noise_makes_it_uncertain() -> None:
    """Under 2% of noise the likeliest place of a step of 5% is often a wrong one, and the range holds the
    right one with 95% confidence."""
    generator = np.random.default_rng(4)
    holding = 0
    for _ in range(100):
        values = np.exp(generator.normal(0, 0.02, COMMITS))
        values[30:] *= 1.05
        holding += any(f.last_before < 30 <= f.first_after for f in change_points(values.tolist()))
    assert holding >= 95


def test_two_steps_are_told_apart() -> None:
    values = nights(np.random.default_rng(3), 0.01)
    values[20:40] *= 1.08
    found = change_points(values.tolist())
    assert [(change.last_before, change.first_after) for change in found] == [(19, 20), (39, 40)]


def test_noise_has_no_steps() -> None:
    generator = np.random.default_rng(7)
    for noise in (0.001, *NOISES, 0.1):
        for commits in (6, 9, 20, COMMITS):
            assert change_points(nights(generator, noise, commits).tolist()) == []


@pytest.mark.parametrize("place", [0, 1, 30, 58, 59])
@pytest.mark.parametrize("factor", [0.2, 1.3, 10])
def test_an_outlier_is_no_step_and_hides_none(place: int, factor: float) -> None:
    values = nights(np.random.default_rng(5), 0.01)
    values[place] *= factor
    assert change_points(values.tolist()) == []
    values[45:] *= 1.05
    (found,) = change_points(values.tolist())
    assert found.last_before < 45 <= found.first_after


def test_two_bad_nights_in_a_row_are_no_step() -> None:
    values = nights(np.random.default_rng(5), 0.01)
    values[58:] *= 1.3
    assert change_points(values.tolist()) == []


def test_a_step_shows_after_three_nights() -> None:
    (found,) = stepped(np.random.default_rng(1), 0.01, COMMITS - 3, 1.05)
    assert (found.last_before, found.first_after) == (COMMITS - 4, COMMITS - 3)


def test_a_drift_is_one_from_end_to_end() -> None:
    values = nights(np.random.default_rng(2), 0.01) * np.linspace(1, 1.12, COMMITS)
    (found,) = change_points(values.tolist())
    assert found.drift
    assert (found.last_before, found.first_after) == (0, COMMITS - 1)
    assert found.after / found.before == pytest.approx(1.12, abs=0.02)


def test_too_small_or_too_few_is_nothing() -> None:
    assert stepped(np.random.default_rng(0), 0.001, 30, 1.015) == []
    assert change_points([1.0, 1.0, 1.0, 2.0, 2.0]) == []
    assert change_points([0.0] * 10 + [1.0] * 10) == []


def test_values_without_noise() -> None:
    (found,) = change_points([2.0] * 10 + [2.1] * 10)
    assert (found.last_before, found.first_after, found.before) == (9, 10, pytest.approx(2.0))
    assert change_points([2.0] * 20) == []


@pytest.mark.slow
def test_false_alarms_and_planted_steps_in_many_series(capsys: pytest.CaptureFixture[str]) -> None:
    """At most one alarm in a thousand series of noise; of steps of 5%, 99% with the commit in their range."""
    generator = np.random.default_rng(11)

    def alarms(noise: float, commits: int) -> int:
        return sum(bool(change_points(nights(generator, noise, commits).tolist())) for _ in range(2000))

    false = {(noise, commits): alarms(noise, commits) for noise in NOISES for commits in (10, COMMITS, 200)}
    planted, others, right, widths = 0, 0, 0, []
    for noise in NOISES:
        for place in range(6, COMMITS - 5):
            for _ in range(40):
                found = stepped(generator, noise, place, 1.05)
                holding = [f for f in found if f.last_before < place <= f.first_after and not f.drift]
                planted, right = planted + 1, right + bool(holding)
                others += len(found) - len(holding)
                widths += [f.first_after - f.last_before for f in holding]
    with capsys.disabled():
        print(f"\nfalse alarms in 2000 series each, by noise and commits: {false}")
        print(f"{right} of {planted} steps, {others} others; ranges {np.percentile(widths, [50, 95, 100])}")
    assert sum(false.values()) <= 24
    assert right >= 0.99 * planted
    assert others <= 0.01 * planted


def between_nights(generator: np.random.Generator, kind: str) -> NDArray[np.float64]:
    """Medians that differ from night to night: by 3%; by 2%, each in part like the one before; or by 1%, with
    every tenth night slowed by some 10%."""
    if kind == "normal":
        return np.exp(generator.normal(0, 0.03, COMMITS))
    if kind == "skewed":
        slowed = (generator.random(COMMITS) < 0.1) * generator.exponential(0.1, COMMITS)
        return np.exp(generator.normal(0, 0.01, COMMITS) + slowed)
    logs = generator.normal(0, 0.02, COMMITS)
    for night in range(1, COMMITS):
        logs[night] += 0.3 * logs[night - 1]
    return np.exp(logs)


@pytest.mark.slow
def test_nights_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """Noise that is not as the search supposes: few series have a step, and fewer one that lasts.

    Where a tenth of the nights is slow, 5.6% of histories have three slow ones in a row: a step, and one
    back."""
    generator = np.random.default_rng(12)
    for kind, most, most_lasting in (("normal", 2, 2), ("skewed", 112, 20), ("correlated", 20, 20)):
        false, lasting, right = 0, 0, 0
        for _ in range(2000):
            found = change_points(between_nights(generator, kind).tolist())
            false += bool(found)
            lasting += bool(found) and abs(found[-1].after / found[0].before - 1) > MINIMUM_EFFECT
        for _ in range(400):
            values = between_nights(generator, kind)
            values[COMMITS // 2 :] *= 1.05
            right += any(f.last_before < 30 <= f.first_after for f in change_points(values.tolist()))
        with capsys.disabled():
            print(
                f"\n{kind}: {false} of 2000 series have a step, {lasting} a lasting one; {right} of 400 found"
            )
        assert false <= most
        assert lasting <= most_lasting
        assert right >= 0.75 * 400


def test_the_smallest_effect_that_counts_counts() -> None:
    smallest = math.log1p(MINIMUM_EFFECT)
    assert _doubt(np.zeros(8), np.full(8, smallest)) < 1e-6
    assert _doubt(np.zeros(8), np.full(8, 0.99 * smallest)) == 1
