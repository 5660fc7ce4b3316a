"""Fit the hosts of Megatron-LM's functional tests, on golden values of 22 cases without experts.

    python scripts/host_figures.py FOLDER

The figures of the hosts in scenarios/clusters/*-megatron-tests.yaml come from this script: a scale for each
kind of machine, and for all of them together what a collective and what a step cost the host, before both are
multiplied by the scale. The fit is by least squares on logarithms of the time of a step (SciPy's soft_l1,
which bounds what a single case can do), with a weak prior at the figures that other machines have. Each case
is left out in turn, which shows how far off a case is that the fit has not seen. Traces are kept in FOLDER,
because all of them take ten minutes to make.
"""

import math
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import Cluster, load_cluster
from spbench.bench.measure.engines import class_traces, virtual
from spbench.bench.measure.simulator.simulate import Simulator
from spbench.bench.tools.papers.megatron_cases import CASES, GOLDEN_FILES, cases, machine_of
from spbench.bench.tools.papers.sources import published_file

FITTED = [
    "bert_mcore_tp1_pp2",
    "bert_mcore_tp1_pp4_vp2",
    "bert_mcore_tp2_pp2",
    "bert_mcore_tp2_pp2_local_spec",
    "bert_mcore_tp4_pp1",
    "gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files",
    "gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute",
    "gpt3_mcore_te_tp1_pp2_resume_torch_dist_cp4_a2a_p2p_nondeterministic",
    "gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings",
    "gpt3_mcore_te_tp1_pp4_resume_torch_dist_swiglu",
    "gpt3_mcore_te_tp1_pp4_vp1_tunable_overlap",
    "gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split",
    "gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_cp2_nondeterministic",
    "gpt3_mcore_te_tp2_pp1_multi_dist_optimizer_instances",
    "gpt3_mcore_te_tp2_pp2_cp2",
    "gpt3_mcore_te_tp2_pp2_resume_torch_dist_cross_entropy_loss_fusion",
    "gpt3_mcore_te_tp2_pp2_resume_torch_dist_no_create_attention_mask_in_dataloader",
    "gpt3_mcore_te_tp4_pp1_resume_torch_dist_qk_layernorm_test_mode",
    "gpt3_mcore_tp1_pp1_dist_optimizer_overlap_grad_reduce_param_gather",
    "gpt3_mcore_tp1_pp2",
    "gpt3_mcore_tp2_pp2_uninstall_te",
    "gpt3_mcore_tp4_pp1_resume_torch_dist",
]
MACHINES = ("dev_dgx_a100", "dev_dgx_h100", "dev_dgx_gb200")
#: the figures that all machines share, and the value to which the prior draws each, in seconds
SHARED = {"collective_s": 89e-6, "step_s": 10e-3}
FIGURES = [*MACHINES, *SHARED]
START = np.log([4.0, 3.0, 3.0, 30e-6, 10e-3])
#: the prior's width in logarithms: a factor of e**5 away from it costs as much as an error by a factor of e
PRIOR_WIDTH = 5.0
STEP = 0.02


@dataclass(frozen=True)
class Timed:
    """A case on a machine. Attributes: the seconds of its step as measured, and a simulator of its trace."""

    case: str
    machine: str
    seconds: float
    simulator: Simulator
    cluster: Cluster

    def error(self, logarithms: np.ndarray) -> float:
        """The logarithm of predicted over measured seconds, with these logarithms of :data:`FIGURES`."""
        values = dict(zip(FIGURES, np.exp(logarithms).tolist(), strict=True))
        host = self.cluster.host
        assert host is not None
        changed = {name: getattr(host, name).model_copy(update={"value": values[name]}) for name in SHARED}
        changed["scale"] = host.scale.model_copy(update={"value": values[self.machine]})
        self.simulator.cluster = self.cluster.model_copy(update={"host": host.model_copy(update=changed)})
        return math.log(self.simulator().step_time_s / self.seconds)


def timed_cases(folder: Path) -> list[Timed]:
    """Each case of :data:`FITTED` on each machine on which it was timed; its trace is in the folder after."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = (row for file in GOLDEN_FILES for row in published_file(file).rows if row["iter_s"])
    seconds = {(row["case"], row["golden"]): float(row["iter_s"]) for row in rows}
    timed = []
    for each in cases(CASES):
        place = (each.case, each.golden)
        if each.case not in FITTED or each.golden not in MACHINES or place not in seconds:
            continue
        path = folder / f"{each.case}@{machine_of(each.golden)[0]}.pickle"
        cell = each.cell
        assert isinstance(cell, Cell), cell
        if not path.exists():
            traced = virtual.trace_classes(cell, events=True)
            path.write_bytes(pickle.dumps((traced.traces, traced.classes, traced.fold)))
            print(cell.key, flush=True)
        traces, classes, fold = pickle.loads(path.read_bytes())
        axis = class_traces.marked_axis(cell)
        cluster = load_cluster(cell.cluster)
        simulator = Simulator(
            [trace.program for trace in traces],
            [each.ranks for each in classes],
            cluster,
            cell.precision,
            class_traces.model_parameters(cell),
            fold,
            virtual.model_preset(*cell.model_arguments).attention_kernel,
            None if axis is None else [*cell.mesh_sizes].index(axis),
        )
        timed.append(Timed(*place, seconds[place], simulator, cluster))
    return timed


def main() -> None:
    timed = timed_cases(Path(sys.argv[1]))
    drawn = np.log(list(SHARED.values()))

    def residuals(x: np.ndarray) -> np.ndarray:
        prior = (x[len(MACHINES) :] - drawn) / PRIOR_WIDTH
        return np.append([each.error(x) for each in timed], prior)

    best = least_squares(
        residuals, START, loss="soft_l1", f_scale=0.2, diff_step=STEP, max_nfev=10, x_scale=0.3
    )
    figures = dict(zip(FIGURES, np.exp(best.x).tolist(), strict=True))
    print({name: float(f"{value:.3g}") for name, value in figures.items()})
    # a case is left out to first order: a step of Gauss and Newton from the fit to all cases
    now = residuals(best.x)
    slopes = [(residuals(best.x + STEP * one) - now) / STEP for one in np.eye(len(FIGURES))]
    weights = (1 + (now / 0.2) ** 2) ** -0.25
    left_out = {}
    for case in FITTED:
        kept = np.array([each.case != case for each in timed] + [True] * len(SHARED))
        rows = np.transpose(slopes)[kept] * weights[kept, None]
        move = np.linalg.lstsq(rows, -now[kept] * weights[kept], rcond=None)[0]
        for each in timed:
            if each.case == case:
                left_out[case, each.machine] = math.exp(each.error(best.x + move)) - 1
    for (case, machine), error in left_out.items():
        print(f"{case:80} {machine:14} {error:+.1%}")
    for machine in ("", *MACHINES):
        sizes = [abs(error) for (_, own), error in left_out.items() if machine in ("", own)]
        print(
            f"{machine or 'all':14} {len(sizes)} left out: {np.median(sizes):.1%} in the median, "
            f"75% within {np.quantile(sizes, 0.75):.1%}"
        )


if __name__ == "__main__":
    main()
