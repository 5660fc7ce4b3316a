"""spbench: a benchmark and reproduction suite for sequence parallelism.

This is the public API, for notebooks and for plug-ins. A small scenario on virtual ranks, in this process:

>>> import spbench
>>> cell = spbench.Cell(
...     model="bert-tiny", strategy="ring_self_attention", sizes={"sp": 2}, batch=2, seq_len=32
... )
>>> table = spbench.run(cell, jobs=0)
>>> table[["world_size", "status", "sent_bytes", "formula_sent_bytes"]].iloc[0].to_dict()
{'world_size': 2, 'status': 'ok', 'sent_bytes': 369800, 'formula_sent_bytes': 369800}
>>> bool(2**20 < table["peak_memory_bytes"][0] < 2**21)
True

``spbench.run("max_seqlen", strategies=["tensor_parallel"], output="results")`` runs part of a packaged
scenario by worker processes and keeps the results, ``read_results`` reads them again, and ``verify`` compares
strategies with the single-device model. Columns have their units in their names.

To add a strategy, model, backend, engine, meter, searched quantity or kind of answer, derive from
:class:`Strategy`, :class:`Model`, :class:`Backend`, :class:`Engine`, :class:`Meter`, :class:`Quantity` or
:class:`Answer`, and register it by an entry point; CONTRIBUTING.md has an example of each.

Names are imported when they are first used, so that ``import spbench`` imports nothing else.
"""

from __future__ import annotations

from importlib import import_module

#: type checkers take it for true; the module typing is left out, as nothing catches an interrupt so early
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from spbench.api import advise, measure_step, read_results, run, verify
    from spbench.bench.cell import Cell
    from spbench.bench.command_line.options import printed
    from spbench.bench.command_line.output import Output, Table
    from spbench.bench.errors import UserError
    from spbench.bench.measure import Scenario, plan
    from spbench.bench.measure.engines.engine import Engine, Quantity
    from spbench.bench.measure.trace.meter import Call, Communication, Meter
    from spbench.bench.measurement import Measurement
    from spbench.bench.tools.calibrate.log_findings import (
        AttentionSpeed,
        Findings,
        LogFile,
        TimedCollective,
        TimedMatmul,
        TimedPass,
    )
    from spbench.bench.tools.changes.export_command import Exported, ExportRequest
    from spbench.bench.tools.jobs.flags import Flag, Flags, program_flags
    from spbench.bench.tools.jobs.job import Argument, Job, Setting
    from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
    from spbench.bench.tools.papers.answer import Answer, load_scenario
    from spbench.bench.tools.papers.comparison import Comparison
    from spbench.bench.tools.papers.selector import Selector
    from spbench.bench.tools.papers.sources import PublishedPlace
    from spbench.bench.yaml_files import PublishedNumber
    from spbench.impls import collectives
    from spbench.impls.backends.backend import Backend
    from spbench.impls.backends.planned_step import PlannedStep
    from spbench.impls.composition import ONE_STAGE, Stage
    from spbench.impls.models.blocks.architecture import FeedForward
    from spbench.impls.models.blocks.decoder import DecoderModel
    from spbench.impls.models.causal_transformer import CausalTransformerModel
    from spbench.impls.models.model import Model, ModelPart
    from spbench.impls.options import Options
    from spbench.impls.strategies.base import Shard, Site, Strategy, Unsupported, mark_shard
    from spbench.impls.strategies.sequence_chunks import SequenceChunks
    from spbench.impls.traffic import Traffic

#: the modules in which the public names are, for :func:`__getattr__`; type checkers read the imports above
_HOMES = {
    "spbench.api": ("advise", "measure_step", "read_results", "run", "verify"),
    "spbench.bench.tools.calibrate.log_findings": (
        "AttentionSpeed",
        "Findings",
        "LogFile",
        "TimedCollective",
        "TimedPass",
        "TimedMatmul",
    ),
    "spbench.bench.cell": ("Cell",),
    "spbench.bench.command_line.options": ("printed",),
    "spbench.bench.command_line.output": ("Output", "Table"),
    "spbench.bench.tools.papers.comparison": ("Comparison",),
    "spbench.bench.tools.papers.sources": ("PublishedPlace",),
    "spbench.bench.tools.papers.selector": ("Selector",),
    "spbench.bench.tools.papers.answer": ("Answer", "load_scenario"),
    "spbench.bench.yaml_files": ("PublishedNumber",),
    "spbench.bench.measure": ("Scenario", "plan"),
    "spbench.bench.measure.engines.engine": ("Engine", "Quantity"),
    "spbench.bench.measure.trace.meter": ("Call", "Communication", "Meter"),
    "spbench.bench.errors": ("UserError",),
    "spbench.bench.tools.changes.export_command": ("ExportRequest", "Exported"),
    "spbench.bench.tools.jobs.flags": ("Flag", "Flags", "program_flags"),
    "spbench.bench.tools.jobs.job": ("Argument", "Job", "Setting"),
    "spbench.bench.tools.jobs.job_files": ("JobFile", "JobFiles"),
    "spbench.bench.measurement": ("Measurement",),
    "spbench.impls.backends.backend": ("Backend", "PlannedStep"),
    "spbench.impls.composition": ("ONE_STAGE", "Stage"),
    "spbench.impls.models.blocks.decoder": ("DecoderModel",),
    "spbench.impls.models.blocks.architecture": ("FeedForward",),
    "spbench.impls.models.causal_transformer": ("CausalTransformerModel",),
    "spbench.impls.models.model": ("Model", "ModelPart"),
    "spbench.impls.options": ("Options",),
    "spbench.impls.strategies.base": ("Shard", "Site", "Strategy", "Unsupported", "mark_shard"),
    "spbench.impls.strategies.sequence_chunks": ("SequenceChunks",),
    "spbench.impls.traffic": ("Traffic",),
}

__all__ = [
    "ONE_STAGE",
    "Answer",
    "Argument",
    "AttentionSpeed",
    "Backend",
    "Call",
    "CausalTransformerModel",
    "Cell",
    "Communication",
    "Comparison",
    "DecoderModel",
    "Engine",
    "ExportRequest",
    "Exported",
    "FeedForward",
    "Findings",
    "Flag",
    "Flags",
    "Job",
    "JobFile",
    "JobFiles",
    "LogFile",
    "Measurement",
    "Meter",
    "Model",
    "ModelPart",
    "Options",
    "Output",
    "PlannedStep",
    "PublishedNumber",
    "PublishedPlace",
    "Quantity",
    "Scenario",
    "Selector",
    "SequenceChunks",
    "Setting",
    "Shard",
    "Site",
    "Stage",
    "Strategy",
    "Table",
    "TimedCollective",
    "TimedMatmul",
    "TimedPass",
    "Traffic",
    "Unsupported",
    "UserError",
    "advise",
    "collectives",
    "load_scenario",
    "mark_shard",
    "measure_step",
    "plan",
    "printed",
    "program_flags",
    "read_results",
    "run",
    "verify",
]


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use (PEP 562)."""
    if name == "collectives":
        value: Any = import_module("spbench.impls.collectives")
    else:
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
