"""Compare a strategy's tensors on one rank with the single device's, tensor by tensor.

The oracle is the model on one device in float64, with torch's own kernels where the model has a choice,
so that it shares no hand-written backward with the strategies (the layer norm, which has no other version, is
compared with torch's in its unit test). The strategy then runs the same part of the model on this rank's
shards, with gradients synchronised by the code that training uses. Dropout is off on both sides.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measure.verify.beside_values import (
    check_bytes,
    check_documents,
    check_elements,
    check_norm,
    check_positions,
    masked_attention,
)
from spbench.bench.measure.verify.judged import Discrepancy, Finding, discrepancies, relative_errors
from spbench.bench.measure.verify.verified_run import SITE_DIM, Case, OneDeviceRun, VerifiedRun, share_of
from spbench.impls import CAUSAL, AsPublished, Attended, Composition, Model, Place, Strategy, with_options

#: how many runs of one device a rank keeps; the run of a tiny model takes a megabyte
KEPT_RUNS = 128
#: share of the largest element below which two elements count as the same
_SAME = 1e-10


class _OneDevice(Strategy):
    """The single device, with the vocabulary padded as for ``parts`` ranks."""

    def __init__(self, parts: int):
        super().__init__()
        self.parts = parts

    @property
    def vocabulary_parts(self) -> int:
        return self.parts

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        if attended.plain and sinks is None:
            return super().causal_attention(q, k, v)
        return masked_attention(q, k, v, attended, sinks)


@dataclass(frozen=True)
class BothRuns:
    """A case's run on this rank, and its reference runs on one device.

    Attributes:
        model: the model of all runs, without dropout.
        truth: the run on one device in float64.
        noisy: the run on one device in the case's dtype, with the model's :attr:`Model.rounding`; None: the
            dtype is float64, and the model has no rounding.
        departures: for a published baseline, how far each tensor of its own function is from the model's, the
            number of positions that differ, and of all.
        checked: the run on this rank, with the strategy.
        recorder: the recorder of the checked run's communication.
    """

    model: Model
    truth: OneDeviceRun
    noisy: OneDeviceRun | None
    checked: VerifiedRun
    recorder: Recorder
    departures: Mapping[str, tuple[Discrepancy, tuple[int, int]]]

    def tensors(self) -> Compared:
        """The tensors of :meth:`VerifiedRun.tensors`, and this rank's share of the references."""
        noisy = {} if self.noisy is None else share_of(self.noisy, self.checked)
        return Compared(share_of(self.truth, self.checked), noisy, self.checked.tensors())

    def sites(self) -> Compared:
        """The tensors at attention sites and their gradients, at this rank's range of positions."""
        compared = Compared({}, {}, {})
        for prefix, kind in (("", "values"), ("gradient of ", "gradients")):
            mine, theirs = getattr(self.checked.sites, kind), getattr(self.truth.sites, kind)
            also = theirs if self.noisy is None else getattr(self.noisy.sites, kind)
            for name in [name for name in mine if name in theirs and name in also]:
                part = self.checked.strategy.shard(theirs[name], SITE_DIM)
                if part.shape == mine[name].shape:
                    compared.expected[prefix + name], compared.got[prefix + name] = part, mine[name]
                    if self.noisy is not None:
                        compared.noisy[prefix + name] = self.checked.strategy.shard(also[name], SITE_DIM)
        return compared


@dataclass(frozen=True)
class Compared:
    """Tensors of this rank, by name, and their references.

    Attributes:
        expected: the tensors that one device computes in float64.
        noisy: the tensors that one device computes in the case's dtype; empty in float64.
        got: the tensors that the strategy computes.
    """

    expected: dict[str, Tensor]
    noisy: dict[str, Tensor]
    got: dict[str, Tensor | None]

    def discrepancies(self) -> dict[str, tuple[Discrepancy, float]]:
        """The discrepancy, and the relative error of the single device in the case's dtype, by name."""
        noise = relative_errors(self.expected, self.noisy) if self.noisy else {}
        return {
            name: (each, noise.get(name, 0.0))
            for name, each in discrepancies(self.expected, self.got).items()
        }


def both_runs(mesh: DeviceMesh, case: Case, *, watch: bool = False) -> BothRuns:
    """Run a case on this rank of the mesh and on one device, both on the mesh's device.

    Args:
        watch: also keep the tensors at the sites of attention.
    """
    model = with_options(case.model, {"dropout": 0.0})
    place = Place.on(mesh, case.folds)
    strategy = case.strategy.configured(place, case.options)
    plain = Case(
        Strategy,
        with_options(model, model.plain_options),
        *(case.part, case.dtype, case.batch, case.seq_len, case.seed),
    )

    of_model: Strategy = _OneDevice(strategy.vocabulary_parts)
    reference = strategy.on_one_device() if isinstance(strategy, AsPublished) else of_model

    def on_one_device(
        dtype: torch.dtype,
        strategy: Strategy = reference,
        of: Case = plain,
        given: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> OneDeviceRun:
        return _on_one_device(pickle.dumps((of, strategy, dtype, mesh.device_type, watch, {**given})))

    truth = on_one_device(torch.float64)
    # in half precision rounding decides to which of two near experts a token goes
    given = truth.choices if case.torch_dtype in (torch.float16, torch.bfloat16) else {}
    shapes = {name: x.shape for name, x in truth.outputs.items()}
    recorder = Recorder(mesh)
    recorder.meters = [recorder.communication]
    checked = VerifiedRun(
        replace(case, model=model),
        strategy,
        case.torch_dtype,
        shapes,
        Composition(place),
        device=mesh.device_type,
        recorder=recorder,
        watch=watch,
        given=given,
    )
    noisy = None
    if model.rounding or case.torch_dtype is not torch.float64:
        rounded = replace(plain, model=with_options(plain.model, model.rounding))
        noisy = on_one_device(case.torch_dtype, of=rounded, given=given)
    departures = {}
    if reference is not of_model:
        wanted, own = share_of(on_one_device(torch.float64, of_model), checked), share_of(truth, checked)
        places = {name: checked.part.output_dims.get(name.removeprefix("output ")) for name in own}
        departures = {
            name: (each, _apart(wanted[name], own[name], places[name]))
            for name, each in discrepancies(wanted, own).items()
        }
    return BothRuns(model, truth, noisy, checked, recorder, departures)


def _apart(x: Tensor, y: Tensor, places: int | tuple[int, ...] | None) -> tuple[int, int]:
    """The number of positions of this rank at which two tensors differ, and the number of all positions; (0,
    0) for tensors without positions (``places`` None)."""
    if places is None:
        return 0, 0
    dims = places if isinstance(places, tuple) else (places,)
    differ = ((x - y).abs() > _SAME * x.abs().max()).movedim(dims, tuple(range(len(dims))))
    differ = differ.flatten(0, len(dims) - 1).flatten(1).any(1)
    return int(differ.sum()), len(differ)


def check_rank(mesh: DeviceMesh, case: Case) -> list[Finding]:
    """Findings that compare this rank's tensors with its share of one device's, both on the mesh's device."""
    runs = both_runs(mesh, case)
    model, truth, checked, recorder = runs.model, runs.truth, runs.checked, runs.recorder
    return [
        *(Finding(name, each, 0.0, apart=at) for name, (each, at) in runs.departures.items()),
        *(Finding(name, each, noise) for name, (each, noise) in runs.tensors().discrepancies().items()),
        *(Finding(name, each, 0.0) for name, each in check_positions(truth, checked)),
        *(Finding(name, each, 0.0, tells=2) for name, each in check_documents(truth, checked)),
        Finding(*check_elements(truth, checked), 0.0),
        *(Finding(name, each, 0.0, tells=0) for name, each in check_bytes(recorder, case, model, checked)),
        *(Finding(name, each, 0.0) for name, each in check_norm(truth, checked)),
    ]


@lru_cache(maxsize=KEPT_RUNS)
def _on_one_device(pickled: bytes) -> OneDeviceRun:
    """The run of a case on one device, from the pickled arguments; kept, because most strategies are verified
    on the same models. Nobody may write to its tensors."""
    case, strategy, dtype, device, watch, given = pickle.loads(pickled)
    return OneDeviceRun.of(VerifiedRun(case, strategy, dtype, device=device, watch=watch, given=given))
