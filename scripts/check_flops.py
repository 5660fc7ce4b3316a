"""Check the MFU of rows of results against the FLOPs of their models, which are computed again.

    python scripts/check_flops.py FILE.jsonl ...

MFU x datasheet FLOP/s x ranks x step time must be the FLOPs of the model's forward on a single device, times
3 in training. For each strategy the script also prints the forward FLOPs of all ranks over the model's: the
ratio is above 1 if ranks repeat or pad work. Exit code 1 if a row fails.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.step_times import model_flops
from spbench.bench.measure.sweep.results import read_rows

#: the largest relative error of a row's numbers multiplied
ROUNDING = 1e-9


def held(row: dict[str, Any]) -> str | None:
    """The problem with a row's MFU, in words; "" if the MFU is right, None if the row has no MFU."""
    measured = row["measurement"] or {}
    if not measured.get("mfu"):
        return None
    cell = Cell.model_validate(row["cell"])
    if cell.search is not None:
        cell = cell.model_copy(update={cell.search.quantity: measured["answer"], "search": None})
    rates = load_cluster(cell.cluster).device.peak_flops_per_s
    peak = next(figure.value for name, figure in rates.items() if name == cell.precision)
    assert peak is not None
    utilized = measured["mfu"] * peak * cell.sizes.world * measured["step_time_s"]
    model = model_flops(cell)
    if abs(utilized - model) > ROUNDING * model:
        return f"MFU x peak x ranks x step time is {utilized:.6g} FLOPs, the model has {model:.6g}"
    return ""


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("files", type=Path, nargs="+")
    torch.set_num_threads(1)
    wrong = checked = 0
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for path in parser.parse_args().files:
        for row in read_rows(path)[0]:
            if (problem := held(row)) is None:
                continue
            checked += 1
            if problem:
                wrong += 1
                print(f"{row['key']}: {problem}")
            elif flops := row["measurement"].get("flops"):
                training = row["cell"].get("training") or {}
                times = 1 if training.get("step") == "inference" else 3
                shares[row["cell"]["strategy"]].append(times * flops["forward"] / flops["model"])
    for strategy, of_rows in sorted(shares.items()):
        least, most = min(of_rows), max(of_rows)
        print(f"{strategy}: forward FLOPs of all ranks over the model's, {least:.4f} to {most:.4f}")
    print(f"{checked} rows with an MFU, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
