"""The answer of `spbench fit`: verdicts on its cells, changes that help the fullest cell, and the largest
sizes. Also a rank's memory as a snapshot like those of ``torch.cuda.memory._dump_snapshot``, for PyTorch's
viewer (https://pytorch.org/memory_viz) and for ``torch.cuda._memory_viz``."""

import pickle
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spbench.bench import measure
from spbench.bench.cell import Cell, SearchRequest
from spbench.bench.errors import UserError
from spbench.bench.files import cache_folder, write_whole
from spbench.bench.measurement import Outcome
from spbench.bench.tools.choose.anatomy import attempt, examine, trace_stage
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.asking import Asking, Say, Task, within
from spbench.bench.tools.choose.fit_verdict import Verdict
from spbench.bench.tools.choose.proofs import ENOUGH, MOST, BudgetPlan, Proofs, plan_budget, prove
from spbench.bench.tools.choose.subject import Subject, model_line, slow_words, subject
from spbench.plots.style import length_text, model_name, strategy_name

#: share of the progress that tracing the cells makes, if changes are tried afterwards
_EXAMINED = 0.4
#: settings that define the training job, whatever its layout
_OF_THE_JOB = ("precision", "model_options")


@dataclass(frozen=True)
class Fitting:
    """The answer whether cells fit, with the changes that would help.

    Attributes:
        verdicts: one for each cell that can run.
        others: cells that cannot run, with the reasons.
        proofs: changes of the fullest cell; None: not asked for.
        sizes: the result of :func:`largest`; None: not asked for.
        plan: switches of the fullest cell for a budget; None: not asked for.
        advise: the command line that searches for another layout.
    """

    subject: Subject
    verdicts: Sequence[Verdict]
    others: Sequence[tuple[Cell, str]] = ()
    proofs: Proofs | None = None
    sizes: Mapping[str, int | None] | None = None
    plan: BudgetPlan | None = None
    advise: str = ""

    @property
    def fullest(self) -> Verdict:
        """The verdict with the least spare bytes of cells that do not fit, else of tight ones, else of
        all."""
        return min(
            self.verdicts,
            key=lambda each: (
                each.fits,
                each.certainty.word == "fits",
                each.memory.spare_bytes,
            ),
        )

    @property
    def fits(self) -> bool:
        """Whether every cell can run and fits."""
        return not self.others and self.fullest.fits

    @property
    def surely_fits(self) -> bool:
        """Whether every cell can run and fits, and none is tight."""
        return self.fits and all(each.certainty.word == "fits" for each in self.verdicts)

    def written(self, figure: Path | None, snapshot: Path | None) -> list[Path]:
        """Write a figure and a snapshot of the fullest ranks to the paths, unless None; returns the paths."""
        at, files = self.fullest, []
        if figure is not None:
            from spbench.plots.fit_and_advise import draw_memory  # matplotlib, which takes half a second

            usable = at.measurement["usable_memory_bytes"]
            batch, length = at.cell.shape
            shape = f"batch {batch}, sequence length {length_text(length)}, {at.cell.precision}"
            layout = f"{strategy_name(at.cell.strategy)}, {at.cell.mesh_text}"
            title = f"{model_name(at.cell.model)} on {at.cell.cluster}: {layout}, {shape}"
            files.append(draw_memory(asdict(at.anatomy), usable, title, figure))
        if snapshot is not None:
            files.append(write_snapshot(at.cell, at.anatomy.ranks[0], snapshot))
        return files


def fitting(
    words: Sequence[str],
    asked: Asked,
    say: Say,
    jobs: int | None,
    suggest: bool,
    longest: bool,
    budget_bytes: int | None = None,
    examined_first: Callable[[Fitting], None] = lambda answer: None,
) -> Fitting:
    """Examine the cells that command-line words name, and try what would help.

    Args:
        words, asked: the arguments of :func:`subject`.
        say: takes the current work in words, and the share of all work that is done.
        jobs: how many workers; None: one for each usable core.
        suggest: try more changes, even if the fullest cell fits.
        longest: search for the largest sizes.
        budget_bytes: bytes that the fullest rank may need, for which switches are chosen; None: no budget.
        examined_first: takes the verdicts before changes or sizes are tried.

    Raises:
        UserError: the words name nothing, or no cell can run.
    """
    about = subject(words, asked)
    with Asking(jobs) as asking:
        examined = [*_examined(about, asking, within(say, 0, _EXAMINED))]
        verdicts = [Verdict(cell, outcome.measurement) for cell, outcome in examined if outcome.measurement]
        others = [(cell, outcome.reason) for cell, outcome in examined if not outcome.measurement]
        if not verdicts:
            cell, reason = others[0]
            raise UserError(f"{cell.key}: {reason}")
        answer = Fitting(about, verdicts, others)
        fullest, proofs, sizes, plan = answer.fullest, None, None, None
        if suggest or longest or budget_bytes is not None or not fullest.fits:
            examined_first(answer)
        if budget_bytes is not None:
            plan = plan_budget(fullest.cell, budget_bytes, asking, within(say, _EXAMINED, 1))
        elif suggest or not fullest.fits:
            proofs = prove(fullest, asking, MOST if suggest else ENOUGH, within(say, _EXAMINED, 1))
        if longest:
            behind = _EXAMINED if proofs is None else 1.0
            say("looking for the longest length and the largest micro-batch", behind)
            sizes = largest(fullest.cell, asking)
    return Fitting(about, verdicts, others, proofs, sizes, plan, advise_command(words, fullest.cell, asked))


def largest(cell: Cell, asking: Asking) -> dict[str, int | None]:
    """Search for the largest ``seq_len`` and ``micro_batch`` that fit, each with all other settings as they
    are, and proved by a trace that fits and one that does not; ``batch`` is the global batch in micro-batches
    of ``micro_batch``. None: not even the smallest fits, or the size cannot be searched for."""
    searches = {
        each: cell.model_copy(update={each: None, "search": SearchRequest(quantity=each)})
        for each in ("seq_len", "batch")
    }
    tasks = [Task(each, attempt) for each in searches.values()]
    answers = {task.cell.key: outcome.measurement.get("answer") for task, outcome in asking(tasks)}
    seq_len, batch = (answers[each.key] for each in searches.values())
    micro_batch = batch and batch // (cell.sizes.dp * cell.training.micro_batches)
    return {"seq_len": seq_len, "micro_batch": micro_batch, "batch": batch}


def advise_command(words: Sequence[str], cell: Cell, asked: Asked) -> str:
    """The command line that searches for the fastest layout to train a cell's model, on as many GPUs.

    Args:
        words: the words with which the cell was asked about.
        asked: the options of that command line, of which the model's options and the precision are kept.
    """
    batch, seq_len = cell.shape
    own = {name: value for name, value in asked.settings.items() if name.split(".")[0] in _OF_THE_JOB}
    parts = [*(f"--model {shlex.quote(word)}" for word in words), f"--cluster {shlex.quote(cell.cluster)}"]
    parts += [f"--gpus {cell.sizes.world}", f"--seq-len {seq_len}", f"--batch {batch}"]
    parts += [f"--given {shlex.quote(f'{name}={value}')}" for name, value in asked.given.items()]
    return " ".join(
        ["spbench advise", *parts, *([f"--set {shlex.quote(measure.written(own))}"] if own else [])]
    )


def _examined(about: Subject, asking: Asking, say: Say) -> Iterator[tuple[Cell, Outcome]]:
    """Each cell with its outcome, in the order of the subject's cells."""
    cells = about.cells
    tasks = [Task(cell, examine) for cell in cells]
    beside = stages_beside(cells, asking.jobs)
    say(f"tracing a step of {model_line(cells[0], about.name)}{slow_words(cells[0])}", 0)
    outcomes: dict[str, Outcome] = {}
    for task, outcome in asking([*beside[:1], *tasks, *beside[1:]]):
        if task.run is examine:  # it reads the traces of stages, or meets their errors
            outcomes[task.cell.key] = outcome
            say(f"{about.shown(task.cell)}: {outcome.status}", len(outcomes) / len(cells))
            if outcome.status in ("failed", "timeout"):
                raise RuntimeError(f"{task.cell.key}: {outcome.reason}")
    yield from ((cell, outcomes[cell.key]) for cell in cells)


def stages_beside(cells: Sequence[Cell], jobs: int) -> list[Task]:
    """Tasks that trace single pipeline stages at the same time as the whole cells: each trace is kept on
    disk, where the worker that examines the whole cell reads it. There are none if the cells occupy all
    workers, or if no cache is kept.

    The tasks are the last stage and the second, because an examination begins with the first. The stages
    between differ only in their micro-batches, and few of them are traced.
    """
    if len(cells) >= jobs or cache_folder() is None:
        return []
    return [
        Task(cell.model_copy(), partial(trace_stage, stage=stage))
        for cell in cells
        for stage in sorted({1, cell.sizes.pp - 1} - {0}, reverse=True)
        if cell.sizes.pp > 1
    ]


#: the first address of a snapshot, like those of a card
_BASE = 0x7F0000000000


def write_snapshot(cell: Cell, rank: int, path: Path) -> Path:
    """Write a snapshot of a rank's memory over set-up and the traced steps; returns the path.

    Raises:
        UserError: the file cannot be written.
    """
    with measure.keeping_traces():
        log = measure.trace_rank(cell, rank, events=measure.can_time(cell)).memory
    return write_whole(path, pickle.dumps(snapshot(log, measure.allocator_of(cell))))


def snapshot(
    log: measure.MemoryLog, kind: type[measure.CachingAllocator] = measure.CachingAllocator
) -> dict[str, Any]:
    """The snapshot of a log: its events, and its segments at the end, with the blocks of an allocator of
    class ``kind`` on a card without a limit. In place of a stack trace it names a storage's kind, module and
    phase; ``time_us`` is the number of the event."""
    allocator, kinds, streams = kind(), log.categories(), log.streams or [0] * len(log.sizes)
    held: dict[int, Any] = {}
    frames: dict[int, list[dict[str, Any]]] = {}
    storages: dict[int, int] = {}
    events: list[dict[str, Any]] = []

    def note(action: str, at: int, number: int, address: int, nbytes: int) -> None:
        stream, of = streams[number], frames[number]
        place = {"addr": _BASE + address, "size": nbytes, "stream": stream, "frames": of, "time_us": at}
        events.append({"action": action, **place})

    for at, event in enumerate(log.events):
        number = abs(event) - 1
        nbytes = log.sizes[number]
        if event < 0 and number in held:
            block = held.pop(number)
            for action in ("free_requested", "free_completed"):
                note(action, at, number, block.address, nbytes)
            del storages[block.address]
            allocator.give_back(block)
        elif event > 0 and nbytes:
            reserved = allocator.reserved
            held[number] = block = allocator.take(nbytes, streams[number])
            module = log.place_names[log.places[number]] if log.places else ""
            step, phase = log.step_of(at), log.phase_of(at)
            words = (kinds[number], module, f"{phase} of step {step}" if step else phase)
            frames[number] = [{"name": word, "filename": "spbench", "line": 0} for word in words if word]
            storages[block.address] = number
            if allocator.reserved > reserved:
                note("segment_alloc", at, number, block.address, allocator.reserved - reserved)
            note("alloc", at, number, block.address, nbytes)
    segments = []
    for blocks in allocator.segments():
        stream, small = allocator.pool_of(blocks[0][0])
        pool = {"stream": stream, "segment_type": "small" if small else "large"}
        pool["is_expandable"] = kind is measure.ExpandableSegments
        segments.append({**_segment(blocks, storages, log.sizes, frames), **pool})
    return {"segments": segments, "device_traces": [events], "allocator_settings": {}}


def _segment(
    blocks: list[tuple[int, int, bool]],
    storages: Mapping[int, int],
    sizes: list[int],
    frames: Mapping[int, list[dict[str, Any]]],
) -> dict[str, Any]:
    allocated = sum(nbytes for _, nbytes, free in blocks if not free)
    total = sum(nbytes for _, nbytes, _ in blocks)
    shown = [
        {
            "address": _BASE + address,
            "size": nbytes,
            "requested_size": 0 if free else sizes[storages[address]],
            "state": "inactive" if free else "active_allocated",
            "frames": [] if free else frames[storages[address]],
        }
        for address, nbytes, free in blocks
    ]
    return {
        "device": 0,
        "address": _BASE + blocks[0][0],
        "total_size": total,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(each["requested_size"] for each in shown),
        "segment_pool_id": (0, 0),
        "frames": [],
        "blocks": shown,
    }
