"""Checks of a verified step other than those of values: that all positions and all elements of weights are
compared, because each is on equally many ranks; that a rank sends exactly the bytes of the closed forms; and
that packed documents do not see each other.

The oracle's attention with documents and windows is also in this module. Its mask follows from the
definition: the document of each position, and the distance of two positions.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.bench.measure.engines.plan import Plan, RankClass
from spbench.bench.measure.processes.staged_group import STAGED
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measure.verify.judged import Discrepancy, discrepancies
from spbench.bench.measure.verify.verified_run import Case, OneDeviceRun, VerifiedRun
from spbench.impls import Attended, Model, PlannedStep, Strategy, all_reduce, composed_traffic, planned_sums

#: the name of the norm that :func:`check_norm` compares
NORM = "norm of all gradients"


def check_positions(truth: OneDeviceRun, checked: VerifiedRun) -> Iterator[tuple[str, Discrepancy]]:
    """Discrepancies of positions that are not on equally many ranks, by the size of the sequence or grid.

    Without this check a strategy that gave all ranks the same chunk would be compared only with that chunk.
    """
    strategy, part = checked.strategy, checked.part
    tensors = [(x, part.sequence_dims[name]) for name, x in truth.inputs.items()]
    tensors += [(x, part.output_dims[name]) for name, x in truth.outputs.items()]
    several = [(x, dim if isinstance(dim, tuple) else (dim,)) for x, dim in tensors if dim is not None]
    grids = {tuple(x.shape[d] for d in dims) for x, dims in several}
    for sizes in sorted(grids):
        places = torch.arange(math.prod(sizes), device=checked.device).view(sizes)
        held = torch.zeros(places.numel(), dtype=torch.int64, device=checked.device)
        held[strategy.shard(places, tuple(range(len(sizes))) if len(sizes) > 1 else 0).flatten()] += 1
        all_reduce(held, _all_ranks(strategy))
        yield f"positions of {' x '.join(map(str, sizes))}", _evenness([held])


def _all_ranks(strategy: Strategy) -> dist.ProcessGroup | None:
    """The group of ranks over which a strategy and its nested ones spread one sample; None: one rank."""
    return strategy.place.group(*strategy.nested_axes)


def check_elements(truth: OneDeviceRun, checked: VerifiedRun) -> tuple[str, Discrepancy]:
    """The discrepancy of weights of which some elements are on more ranks than others, or on none."""
    kept, counts = checked.backend.gradient_places() | checked.backend.frozen_parts(), []
    for name, shape in checked.shapes.items():
        if name not in checked.experts:
            count = torch.zeros(shape, dtype=torch.int64, device=checked.device)
            if name in kept:
                kept[name].of(count).add_(1)
            counts.append(count.flatten())
    for name in sorted(truth.experts):  # a rank has only some of the experts, or parts of them
        whole = torch.zeros(truth.shapes[name], dtype=torch.int64, device=checked.device)
        if name in kept:
            held = torch.zeros(checked.shapes[name], dtype=torch.int64, device=checked.device)
            kept[name].of(held).add_(1)
            shard = checked.shards[name]
            (shard.of(whole) if shard else whole).add_(held)
        counts.append(whole.flatten())
    if not counts:
        return "elements of the weights", Discrepancy.none()
    held = all_reduce(torch.cat(counts), _all_ranks(checked.strategy)).split([len(count) for count in counts])
    return "elements of the weights", _evenness(held)


def _evenness(held: Iterable[Tensor]) -> Discrepancy:
    """No discrepancy if all places of each tensor are on equally many ranks, else one without a number.

    Args:
        held: for each tensor, the number of ranks that hold each of its places.
    """
    even = all(bool(count.min() == count.max() > 0) for count in held)
    return Discrepancy.none() if even else Discrepancy.without_number("are on more ranks than others of them")


def check_bytes(
    recorder: Recorder, case: Case, model: Model, checked: VerifiedRun
) -> Iterator[tuple[str, Discrepancy]]:
    """Discrepancies of the bytes that the step sent from the closed forms of its strategy and backend, by
    phase and collective; and of a rank's parameters from the model's sites. Only for the whole model, because
    closed forms are of whole models. It runs the optimizer's step for its messages. Not on the staged
    backend, where torch calls a group that is written in Python without the operators that meters watch.

    Args:
        recorder: the recorder of the step's communication.
    """
    if checked.part.build != model.build or (dist.is_initialized() and dist.get_backend() == STAGED):
        return
    backend, batch, seq_len = checked.backend, case.batch, case.seq_len
    with recorder, recorder.phase("optimizer"):
        backend.step()
    strategy, around, precision = backend.strategy, backend.around, backend.precision
    sizes = strategy.place.sizes
    sites = list(model.sites(batch, seq_len, strategy.vocabulary_parts))
    sums = planned_sums(sites, strategy, 1)
    width = precision.parameters.itemsize

    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return model.build(strategy, seq_len)

    step = PlannedStep(sums, 1, precision, strategy, around, build, lambda: [[True, False]], backend.options)
    entries = [
        *composed_traffic(sites, strategy, around.stage, 1, width, partial(backend.tied_bytes, step)),
        *backend.traffic(step),
    ]
    plan = Plan([RankClass(around.stage, {}, (0,))], [entries], sizes)
    for each in plan.difference(recorder.communication, 0, has_values=True):
        sent, formula = each["metered_bytes"], each["formula_bytes"]
        yield (
            f"{each['phase']} {each['collective']} over {each['axis']}",
            Discrepancy.without_number(f"sends {sent} bytes, {formula} by the closed form"),
        )
    # the module is built again, because a backend may have cut or padded its parameters
    held, counted = sum(p.numel() for p in build().parameters()), sum(each.elements for each in sums)
    counted += sum(strategy.held_elements(s) * s.count for s in sites if s.kind == "frozen_parameters")
    if held != counted:
        yield "parameters", Discrepancy.without_number(f"are {held} elements, {counted} by the model's sites")


def check_norm(truth: OneDeviceRun, checked: VerifiedRun) -> Iterator[tuple[str, Discrepancy]]:
    """The discrepancy of the norm of all gradients, if the optimizer's step in :func:`check_bytes` took one.
    A norm that left gradients out or counted them twice would clip by a wrong factor."""
    norm = checked.backend.gradient_norm
    if norm is not None:
        of_weights = [x for n, x in truth.tensors.items() if n.removeprefix("gradient of ") in truth.shapes]
        expected = torch.stack([x.double().norm() for x in of_weights if x is not None]).norm()
        yield from discrepancies({NORM: expected}, {NORM: norm}).items()


def document_of_positions(attended: Attended, length: int) -> Tensor:
    """[L]: the number of the document that each position of a sequence belongs to."""
    names = [number for number, n in enumerate(attended.documents or (length,)) for _ in range(n)]
    return torch.tensor(names)


def seen_pairs(attended: Attended, length: int) -> Tensor:
    """[L, L]: whether the query of a row sees the key of a column."""
    document, place = document_of_positions(attended, length), torch.arange(length)
    back = place[:, None] - place
    seen = (back >= 0) & (document[:, None] == document)
    return seen if attended.window is None else seen & (back < attended.window)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, attended: Attended, sinks: Tensor | None = None
) -> Tensor:
    """Softmax attention by the whole matrix of masked scores: q [B, Z, L, A], k, v [B, G, L, A] -> [B, Z, L,
    A]. ``sinks`` [Z] are one more column of the scores, whose probability is dropped."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    hidden = ~seen_pairs(attended, q.shape[2]).to(q.device)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v


def check_documents(truth: OneDeviceRun, checked: VerifiedRun) -> Iterator[tuple[str, Discrepancy]]:
    """Discrepancies of a document's outputs when only other documents' inputs change, in two more forwards;
    none for a model whose sequences are not packed."""
    strategy, part = checked.strategy, checked.part
    attended = strategy.packed
    if len(attended.documents) < 2:
        return
    of_positions = document_of_positions(attended, sum(attended.documents)) % 2
    for changed in range(2):
        inputs = {}
        for name, x in truth.inputs.items():
            dim, values = part.sequence_dims[name], x.detach()
            if isinstance(dim, int):
                other = values + 1 if x.is_floating_point() else (values + 1) % (values.max() + 1)
                where = (of_positions == changed).to(x.device)
                values = torch.where(where.view(-1, *[1] * (x.ndim - 1 - dim)), other, values)
            inputs[name] = strategy.shard(values, dim).to(checked.inputs[name].dtype).clone()
        with torch.no_grad():
            outputs = checked.module(inputs)
        others = strategy.shard(of_positions != changed, 0).nonzero().flatten()
        before, after = {}, {}
        for name, x in outputs.items():
            if isinstance(dim := part.output_dims[name], int):
                key, index = f"output {name} of other documents", others.to(x.device)
                before[key] = checked.outputs[name].detach().index_select(dim, index)
                after[key] = x.index_select(dim, index)
        yield from discrepancies(before, after).items()
