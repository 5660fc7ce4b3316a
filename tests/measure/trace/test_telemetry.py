"""Telemetry through the real nvidia-ml-py, which loads a library built from C by ctypes."""

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.measure.engines.step_times import telemetry_of
from tests.bench.nvml_library import SCENARIO, UUIDS, built, printed
from tests.grid import data

Rows = dict[str, dict[str, Any]]
STEPS = 4
SAMPLES = 6

#: watches a GPU until six samples are there or no more come; prints what is found, by scenario
CODE = f"""
import json, os, sys, time
from spbench.bench.measure.devices import telemetry
rows = {{}}
for named in sys.argv[1:]:
    scenario, _, uuid = named.partition("@")
    os.environ["{SCENARIO}"] = scenario
    telemetry._CLOSING_S = 0.2 if scenario == "hangs" else 60
    with telemetry.Telemetry(uuid or "{UUIDS[0]}", interval_s=0.001) as watched:
        while watched._thread.is_alive() and watched.samples < {SAMPLES}:
            time.sleep(0.001)
    rows[named] = watched.summary(steps={STEPS})
print(json.dumps(rows))
"""
ONE = f"@{UUIDS[1]}"
BARE = f"@{UUIDS[1].removeprefix('GPU-')}"
SCENARIOS = [
    *("", ONE, BARE, "@GPU-none", "clocks fall", "slow from the beginning", "idle", "no energy counter"),
    *("no links", "no power", "not supported", "no permission to read", "lost"),
    *("driver not loaded", "no permission", "versions differ", "hangs"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What is found in each scenario, in one process."""
    return printed(built(tmp_path_factory.mktemp("nvml")), CODE, *SCENARIOS)


def test_units(rows: Rows) -> None:
    row = rows[""]
    assert row["samples"] >= SAMPLES
    assert row["power_max_w"] == 400.5  # of 400500 mW
    assert 300.5 < row["power_mean_w"] < 400.5
    assert (row["energy_j"], row["energy_source"]) == (50, "counter")  # of 50000 mJ
    assert row["energy_per_step_j"] == 50 / STEPS
    assert (row["sm_clock_min_mhz"], row["sm_clock_max_mhz"], row["memory_clock_min_mhz"]) == (
        1980,
        1980,
        2619,
    )
    assert row["temperature_max_celsius"] == 60 + row["samples"]
    assert (row["gpu_utilization_mean_percent"], row["memory_utilization_mean_percent"]) == (97, 41)
    assert row["pcie_sent_mean_bytes_per_s"] == 1.5e6  # of 1500 KB/s
    assert row["pcie_received_mean_bytes_per_s"] == 2.5e6
    assert row["nvlink_sent_bytes"] == 1000 * 1024  # of 1000 KiB
    assert row["nvlink_received_bytes"] == 2000 * 1024
    assert (row["ecc_corrected_errors"], row["ecc_uncorrected_errors"]) == (1, 0)  # those of the stretch
    assert (row["clocks_fell"], row["clocks_note"], row["clock_reasons"]) == (False, None, [])
    assert row["problem"] is None
    assert 0 < row["watched_s"] < 60


def test_the_gpu_is_found_by_its_uuid(rows: Rows) -> None:
    assert rows[""]["gpu_name"] == "Test GPU zero"
    for named in (ONE, BARE):
        assert rows[named]["gpu_name"] == "Test GPU one"
        assert rows[named]["power_max_w"] == 300.5
    assert rows["@GPU-none"]["problem"] == "there is no such GPU: nvidia-smi -L lists them"


def test_clocks_that_fall_in_the_middle(rows: Rows) -> None:
    row = rows["clocks fall"]
    assert row["clocks_fell"] is True
    assert (row["sm_clock_min_mhz"], row["sm_clock_max_mhz"]) == (1410, 1980)
    assert row["clock_reasons"] == ["software power cap", "software thermal slowdown"]
    assert row["clocks_note"].startswith("SM clock at 1410 of 1980 MHz after 0.")
    assert row["clocks_note"].endswith("s: software power cap, software thermal slowdown")


def test_clocks_that_were_slow_all_the_time(rows: Rows) -> None:
    row = rows["slow from the beginning"]
    assert row["clocks_fell"] is True
    assert row["clocks_note"].startswith("SM clock at 1200 of 1980 MHz")
    idle = rows["idle"]
    assert (idle["clocks_fell"], idle["clocks_note"], idle["clock_reasons"]) == (None, None, ["idle"])


def test_energy_without_a_counter_is_power_times_seconds(rows: Rows) -> None:
    row = rows["no energy counter"]
    assert row["energy_source"] == "power"
    assert row["energy_j"] == pytest.approx(row["power_mean_w"] * row["watched_s"])
    assert row["energy_per_step_j"] == pytest.approx(row["energy_j"] / STEPS)
    without = rows["no power"]
    assert [without[key] for key in ("power_mean_w", "energy_j", "energy_source")] == [None] * 3
    assert (without["sm_clock_max_mhz"], without["problem"]) == (1980, None)


def test_what_the_gpu_does_not_have_is_empty(rows: Rows) -> None:
    assert (rows["no links"]["nvlink_sent_bytes"], rows["no links"]["power_max_w"]) == (None, 400.5)
    row = rows["not supported"]
    assert row["problem"] is None
    assert {key for key, value in row.items() if value not in (None, [])} == {
        *("gpu_uuid", "watched_s", "samples")
    }


PROBLEMS = data(__file__)["PROBLEMS"]


@pytest.mark.parametrize("scenario", PROBLEMS)
def test_a_problem_is_one_line(rows: Rows, scenario: str) -> None:
    row = rows[scenario]
    assert row["problem"] == PROBLEMS[scenario]
    assert row["energy_per_step_j"] is None  # of a part of the steps it would be wrong
    seen = scenario in ("lost", "hangs")
    assert (row["samples"] > 0) is seen
    assert row["power_max_w"] == (400.5 if seen else None)  # what was seen before stays


def test_refused_readings_are_named(rows: Rows) -> None:
    problem = rows["no permission to read"]["problem"]
    assert problem.startswith("no permission to read: name, sm_clock, energy_j, nvlink_sent_bytes")
    assert rows["no permission to read"]["power_mean_w"] is None


def test_an_older_driver(tmp_path: Path) -> None:
    row = printed(built(tmp_path, "-DOLD_DRIVER"), CODE, "clocks fall")["clocks fall"]
    assert row["clock_reasons"] == ["software power cap", "software thermal slowdown"]
    assert row["temperature_max_celsius"] > 60


def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()
    problem = printed(tmp_path, CODE, "")[""]["problem"]
    assert problem == "no libnvidia-ml.so.1 can be loaded: install the NVIDIA driver"


def test_without_a_gpu_nothing_is_watched() -> None:
    with telemetry_of(None) as telemetry:
        pass
    assert telemetry.summary(steps=1) == {}
