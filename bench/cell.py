"""A cell, the unit of work, and its parts: sizes, training options, and what it may ask for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    ValidationInfo,
    field_validator,
    model_validator,
)

from spbench.bench.setting_values import (
    MOST_POSITIONS,
    MOST_RANKS,
    MOST_STEPS,
    VARIABLES,
    Count,
    Program,
    Ranks,
    Repeats,
    Seconds,
    checked,
    names_a_file,
    read_model_file,
    with_documents,
    with_suffix,
)
from spbench.bench.yaml_files import StrictModel
from spbench.impls import (
    DEFAULT_BACKEND,
    FOLDED_AXES,
    MESH_AXES,
    backend_defaults,
    check_folds,
    given_folds,
    in_order,
    nesting,
    ranks_along,
    spelled,
)


class _UsualSizes(StrictModel):
    dp: Ranks = 1
    pp: Ranks = 1
    cp: Ranks = 1
    tp: Ranks = 1
    sp: Ranks = 1


class Sizes(_UsualSizes):
    """Ranks along each axis of the mesh, also along axes that strategies bring; at most MOST_RANKS in all.
    ``ep`` and ``etp`` arrange the ranks of each pipeline stage anew (:mod:`spbench.impls.folding`)."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Ranks] = Field(init=False)

    @model_validator(mode="before")
    @classmethod
    def _check_axes(cls, content: Any) -> Any:
        if isinstance(content, Mapping):
            known = *FOLDED_AXES, *MESH_AXES
            # the axes of strategies are looked up last, as that imports them all
            _UsualSizes.model_validate({axis: n for axis, n in content.items() if axis not in known})
            return {axis: n for axis, n in content.items() if axis not in FOLDED_AXES or n != 1}
        return content

    @model_validator(mode="after")
    def _check_world(self) -> Sizes:
        check_folds(self.by_axis)
        if self.world > MOST_RANKS:
            raise ValueError(f"{self} are {self.world} ranks; there can be {MOST_RANKS} at most")
        return self

    @property
    def by_axis(self) -> dict[str, int]:
        """The ranks along every axis, in the default order, then along folded axes of more than one rank; see
        :attr:`Cell.mesh_sizes` for a cell's own."""
        return {axis: getattr(self, axis, 1) for axis in MESH_AXES} | given_folds(self.__pydantic_extra__)

    @property
    def world(self) -> int:
        """All ranks."""
        return ranks_along(MESH_AXES, self.by_axis)

    def __str__(self) -> str:
        return spelled(self.by_axis)


def strategy_axes(strategy: str) -> list[str]:
    """The axes of a strategy, or of several around each other; see :func:`nesting`."""
    return list(nesting(strategy).axes)


def requirements(strategy: str) -> list[str]:
    """The distributions that strategies require; none unless one of the strategies is a peer."""
    return list(nesting(strategy).requires)


class TrainingOptions(BaseModel):
    """How the step is run; see :class:`Training`. Further keys are the options of the backend.

    Attributes:
        step: "inference" is a forward pass alone, of the whole batch.
        moments: "later": the first step's update makes Adam's moments; "kept": they are there before.
        batch_on_device: "part" keeps this rank's part of the batch, "whole" all of it.
        micro_batches: parts of a replica's batch that are run one after another.
        virtual_stages: runs of layers that a rank of the pipeline holds; several with "interleaved" alone.
        stage_layers: layers of each stage of the pipeline, pp x virtual_stages of them in the order of the
            layers; None: as many as the others.
        microbatch_group_size: of "interleaved", micro-batches that pass through a run of layers before the
            rank turns to its next; None: as many as the pipeline has ranks.
        overlap_p2p_communication: of "interleaved", send beside the computation.
        steps: traced one after another: communication and times are those of the last, peaks the largest.
        cublas_workspace: as the environment variable CUBLAS_WORKSPACE_CONFIG, pairs of KiB and count such as
            ":4096:8"; None: the cluster's.
        cuda_alloc_conf: as the environment variable PYTORCH_CUDA_ALLOC_CONF, "expandable_segments:True" (see
            :class:`ExpandableSegments`) or "max_split_size_mb:N" (:class:`OversizeBlocks`); None: torch's
            defaults.
        alloc_retries: of simulated allocators, whether one whose card is full gives cached memory back and
            tries again, as torch's does (``num_alloc_retries`` of torch.cuda.memory_stats; DeepSpeed warns of
            steps with such "cache flushes", runtime/zero/stage3.py). False: that is out of memory.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    step: Literal["training", "inference"] = "training"
    moments: Literal["kept", "later"] = "kept"
    backend: str = DEFAULT_BACKEND
    batch_on_device: Literal["part", "whole"] = "part"
    micro_batches: Repeats = 1
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    virtual_stages: Repeats = 1
    stage_layers: list[NonNegativeInt] | None = None
    microbatch_group_size: Repeats | None = None
    overlap_p2p_communication: bool = False
    steps: Repeats = 1
    cublas_workspace: str | None = None
    cuda_alloc_conf: str | None = None
    alloc_retries: bool = True

    @model_validator(mode="after")
    def _check_virtual_stages(self) -> TrainingOptions:
        if self.virtual_stages > 1 and self.schedule != "interleaved":
            raise ValueError("virtual_stages is for schedule: interleaved; leave it out, or set that")
        if self.virtual_stages == 1 and self.schedule == "interleaved":
            raise ValueError("schedule: interleaved needs virtual_stages: 2 or more")
        for name in ("microbatch_group_size", "overlap_p2p_communication"):
            if getattr(self, name) and self.schedule != "interleaved":
                raise ValueError(f"{name} is for schedule: interleaved; leave it out, or set that")
        return self

    @field_validator(*VARIABLES)
    @classmethod
    def _check_variables(cls, value: str | None, info: ValidationInfo) -> str | None:
        assert info.field_name is not None
        return checked(info.field_name, value)

    @model_validator(mode="after")
    def _leave_out_defaults(self) -> TrainingOptions:
        """Forget options of the backend that are given as they are anyway, so that a cell has one key."""
        given = self.__pydantic_extra__ or {}
        for name, default in backend_defaults(self.backend).items() if given else ():
            if name in given and given[name] == default and type(given[name]) is type(default):
                del given[name]
        return self

    @property
    def backend_options(self) -> Mapping[str, Any]:
        """The options of the backend that differ from their defaults, by name."""
        return self.__pydantic_extra__ or {}


class SearchRequest(StrictModel):
    """Ask for the largest ``quantity`` that fits, one of :func:`quantities`.

    Values are multiples of ``step`` (a sequence length of ``step`` a rank, where a strategy chunks sequences;
    a batch of ``step`` a micro-batch), up to ``limit``. ``timed``: simulate the time of a step at the answer
    too.
    """

    quantity: str
    step: Count = 1
    limit: Count = 2**22
    timed: bool = False


class Timing(StrictModel):
    """How many steps the distributed engine runs."""

    warmup: int = Field(default=2, ge=0, le=MOST_STEPS)
    samples: Repeats = 5


class Learning(StrictModel):
    """Ask for the losses of a training run on real data instead of a measurement; on real ranks only.

    The learning rate rises linearly to ``learning_rate`` over ``warmup`` steps, then falls linearly to zero
    after the last step. ``seed``: of weights and data. ``deviation``: of the initial matrices.
    """

    steps: Repeats
    learning_rate: PositiveFloat = 1e-3
    warmup: int = Field(default=0, ge=0, le=MOST_STEPS)
    seed: int = Field(default=1, ge=-(2**63), lt=2**63)
    deviation: PositiveFloat = 0.02


def _with_sizes(content: Any) -> Any:
    """The settings of a cell; options that are written as sizes, such as "128K", become numbers."""
    if not isinstance(content, Mapping):
        return content
    options = {name: content[name] for name in _OF_OPTIONS if isinstance(content.get(name), Mapping)}
    return {**content, **{name: {k: with_suffix(v) for k, v in o.items()} for name, o in options.items()}}


#: sections of a cell whose values each owner of options checks
_OF_OPTIONS = ("model_options", "strategy_options", "training")


class Cell(StrictModel):
    """One point of a sweep. Where ``search`` asks for batch or seq_len, that field is None.

    Attributes:
        model: a name, or the path of a Hugging Face config.json or of the folder that it lies in.
        model_config_json: what counts of that file, read when the cell is made; so a row stands for the file
            as it was, and other machines need no file.
        mesh: the axes of the mesh, from the slowest-varying rank to the fastest; None: as in MESH_AXES. Axes
            of one rank may be left out.
        device: where tensors are; the virtual engine's are fake ones on the CPU, whatever they stand for.
        rank: the rank that an engine plays which plays one alone; None: the one with the largest peak.
        meters: names of meters beside those of memory and communication.
        program: the training program whose step it stands for; "": none. Only the interval heeds it.
        variant: names a variant of settings within a scenario, for comparison and plots.
        timeout_s: seconds after which a sweep gives the cell up; in no key or row, as nothing depends on it.
    """

    model: str
    model_config_json: dict[str, Any] | None = None
    strategy: str
    sizes: Sizes = Sizes()
    mesh: list[str] | None = None
    batch: Count | None = None
    seq_len: Count | None = None
    cluster: str = "local"
    engine: str = "virtual"
    device: Literal["cpu", "cuda"] = "cpu"
    rank: NonNegativeInt | None = None
    precision: Literal["fp16", "bf16", "fp32", "fp64"] = "fp32"
    model_options: dict[str, Any] = {}
    strategy_options: dict[str, Any] = {}
    training: TrainingOptions = TrainingOptions()
    timing: Timing = Timing()
    search: SearchRequest | None = None
    learning: Learning | None = None
    meters: list[str] = []
    program: Program = ""
    variant: str = ""
    timeout_s: Seconds | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _read_files(cls, content: Any) -> Any:
        """Read the model's file and the file of its documents, from the working directory, unless that is
        done; turn sizes among the options, such as ``max_positions: 8K``, into numbers."""
        content = _with_sizes(with_documents(content))
        if isinstance(content, Mapping) and content.get("model_config_json") is None:
            model = content.get("model")
            if isinstance(model, str) and names_a_file(model):
                return {**content, "model_config_json": read_model_file(model)}
        return content

    @field_validator("mesh")
    @classmethod
    def _check_mesh(cls, order: list[str] | None, info: ValidationInfo) -> list[str] | None:
        """The order of the mesh's axes; None for the default order, so that a cell has one key."""
        if order is None or "sizes" not in info.data:
            return None
        in_order(info.data["sizes"].by_axis, order)
        return None if order == sorted(order, key=MESH_AXES.index) else order

    @model_validator(mode="after")
    def _check_together(self) -> Cell:
        if (self.batch or 1) * (self.seq_len or 1) > MOST_POSITIONS:
            raise ValueError(
                f"batch {self.batch} of {self.seq_len} positions are more than {MOST_POSITIONS} positions"
            )
        if self.precision != "bf16" and self.training.backend_options.get("exp_avg_dtype") == "bf16":
            raise ValueError("training.exp_avg_dtype: bf16 needs precision: bf16; leave one out")
        if self.precision in ("fp32", "fp64") and self.model_options.get("frozen_bits", 16) in (4, 8):
            raise ValueError(
                "model_options.frozen_bits: numbers of 16 bits hold packed weights; set precision: bf16"
            )
        return self

    @property
    def model_arguments(self) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
        """The arguments of :func:`model_preset` for the cell's model."""
        return self.model, self.model_options, self.model_config_json

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Ranks along every axis of the mesh, from the slowest-varying to the fastest."""
        return in_order(self.sizes.by_axis, self.mesh or MESH_AXES)

    @property
    def mesh_text(self) -> str:
        """The axes of more than one rank in the order of the mesh, with their ranks, as "dp2xsp8"; or "1"."""
        return spelled(self.mesh_sizes)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's; the copy has a key of its own."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("key", None)
        return copied

    @cached_property
    def key(self) -> str:
        """A stable name of the cell: readable, and a digest of all that defines it. A model's file counts by
        its path: what it holds is in the digest of what made a row (:mod:`measure.sweep.provenance`)."""
        defining = self.model_dump(exclude_defaults=True, exclude={"model_config_json"})
        content = json.dumps(defining, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        batch = "max" if self.batch is None else self.batch
        length = "max" if self.seq_len is None else self.seq_len
        named = (self.model, self.strategy, self.mesh_text, f"b{batch}", f"L{length}", self.precision)
        variant = [self.variant] if self.variant else []
        return "/".join([*named, *variant, self.cluster, self.engine, digest])

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, seq_len) of a cell that searches for neither."""
        assert self.batch is not None, "batch is searched for"
        assert self.seq_len is not None, "seq_len is searched for"
        return self.batch, self.seq_len

    def at(self, value: int) -> Cell:
        """The same cell with the searched quantity set to a value, and no search."""
        assert self.search is not None
        return self.model_copy(update={self.search.quantity: value, "search": None})
