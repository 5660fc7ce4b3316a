"""Stand-ins for the engines, and a small scenario: importable by other processes."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Measurement
from spbench.bench.engines.distributed import launch
from spbench.bench.files.cluster import load_cluster
from tests.bench.gates import LOG, answer
from tests.bench.gates import log as _log

#: two strategies at a few sizes, one claim of each kind
SCENARIO = """
title: A small scenario
paper: rsa
defaults:
  cluster: piz-daint-p100
  model: bert-tiny
  batch: 64
  precision: fp16
  search: {quantity: seq_len, step: 4}
  model_options: {dropout: 0.0}
groups:
  - {strategy: tensor_parallel, sizes: {tp: [1, 2]}}
  - strategy: ring_self_attention
    sizes: {sp: [1, 4, 8]}
    model_options: {layers: 3}
variants:
  first: {training: {moments: later}}
  steady: {training: {moments: kept}}
claims:
  - claim: rsa-max-seqlen-base
    published: {file: rsa_claims.csv}
    numerator: {strategy: ring_self_attention, world: 8}
    denominator: {strategy: tensor_parallel, world: 2}
    note: a ratio
  - claim: rsa-linformer-upper-bound
    published: {file: rsa_claims.csv}
    numerator: {strategy: ring_self_attention, world: 4, model_options: {layers: 3}}
inferred_from:
  - setting: "model_options.layers: 3"
    answers: [rsa-linformer-upper-bound]
    reason: fewer would not fit the bound
"""


def moody(cell: Cell) -> Measurement:
    """As :func:`answer`; the process dies of two ranks, and prints where it should not."""
    print("noise of an engine")
    if cell.sizes.world == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(cell)


def logged(cell: Cell) -> Measurement:
    """As :func:`answer`, and writes to LOG when a cell begins and ends."""
    _log(f"begin {cell.sizes.world}")
    time.sleep(0.1)  # long enough for a second cell to begin, if one could
    _log(f"end {cell.sizes.world}")
    return answer(cell)


def meeting(cell: Cell) -> Measurement:
    """As :func:`answer`, once as many cells have begun as this one has ranks; fails if they do not come."""
    _log(f"begin {cell.sizes.world}")
    deadline = time.monotonic() + 60.0
    while len(Path(os.environ[LOG]).read_text().splitlines()) < cell.sizes.world:
        if time.monotonic() > deadline:
            raise TimeoutError("it runs alone")
        time.sleep(0.02)
    return answer(cell)


def hanging(cell: Cell) -> Measurement:
    """As :func:`answer`, but two ranks never end: on the engine virtual in Python, on the distributed one in
    a collective that rank 1 does not join. Writes the processes to LOG."""
    _log(str(os.getpid()))
    if cell.sizes.world == 2:
        print("last words", file=sys.stderr)
        if cell.engine == "distributed":
            launch(cell, in_a_collective_alone)
        waits_for_ever()
    return answer(cell)


def waits_for_ever() -> None:
    while True:
        time.sleep(0.01)


def in_a_collective_alone(mesh: DeviceMesh, cell: Cell) -> None:
    _log(str(os.getpid()))
    if dist.get_rank() == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as stubborn as a process can be
        waits_for_ever()
    dist.all_reduce(torch.ones(1))


def dying_later(cell: Cell) -> Measurement:
    """As :func:`answer`; the process that measured two ranks dies a moment afterwards."""
    _log(str(os.getpid()))
    if cell.sizes.world == 2:
        threading.Timer(1.0, os._exit, [7]).start()
    return answer(cell)


def ending_with_words(cell: Cell) -> Measurement:
    """The process ends itself, and says why only on standard error."""
    print("many words\n" * 5000, file=sys.stderr)
    print("cannot open the heart of gold", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def cluster_of(cell: Cell) -> Measurement:
    """The figures of the cell's cluster, and a reason with its name."""
    figures = load_cluster(cell.cluster).model_dump(mode="json")
    return Measurement(reason=f"cluster {cell.cluster} is this one", meters={"cluster": figures})
