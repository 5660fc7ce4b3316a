"""A cell, the unit of work of a sweep, and its parts: sizes, training options, searches and training runs."""

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

from spbench import impls
from spbench.bench import setting_values
from spbench.bench.yaml_files import StrictModel


class _UsualSizes(StrictModel):
    dp: setting_values.Ranks = 1
    pp: setting_values.Ranks = 1
    cp: setting_values.Ranks = 1
    tp: setting_values.Ranks = 1
    sp: setting_values.Ranks = 1


class Sizes(_UsualSizes):
    """The number of ranks along each axis of the mesh, also along axes of strategies; at most MOST_RANKS in
    all. ``ep`` and ``etp`` divide the same ranks of each stage again (:mod:`spbench.impls.folding`)."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, setting_values.Ranks] = Field(init=False)

    @model_validator(mode="before")
    @classmethod
    def _check_axes(cls, content: Any) -> Any:
        if isinstance(content, Mapping):
            known = *impls.FOLDED_AXES, *impls.MESH_AXES
            # the axes of strategies are looked up last, because that imports all strategies
            _UsualSizes.model_validate({axis: n for axis, n in content.items() if axis not in known})
            return {axis: n for axis, n in content.items() if axis not in impls.FOLDED_AXES or n != 1}
        return content

    @model_validator(mode="after")
    def _check_world(self) -> Self:
        impls.check_folds(self.by_axis)
        if self.world > setting_values.MOST_RANKS:
            raise ValueError(
                f"{self} are {self.world} ranks; there can be {setting_values.MOST_RANKS} at most"
            )
        return self

    @property
    def by_axis(self) -> dict[str, int]:
        """The number of ranks along every axis, in the default order, then along folded axes of more than one
        rank; :attr:`Cell.mesh_sizes` has a cell's own order."""
        return {axis: getattr(self, axis, 1) for axis in impls.MESH_AXES} | impls.given_folds(
            self.__pydantic_extra__
        )

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return impls.ranks_along(impls.MESH_AXES, self.by_axis)

    def __str__(self) -> str:
        return impls.spelled(self.by_axis)


#: the strategy of cells that are a step of the user's own program (:mod:`measure.steps`)
OWN_STEP = "own_step"


def strategy_axes(strategy: str) -> list[str]:
    """The names of the axes of a strategy, or of a combination of strategies (:func:`nesting`); of a user's
    step, dp for all ranks."""
    return ["dp"] if strategy == OWN_STEP else list(impls.nesting(strategy).axes)


def requirements(strategy: str) -> list[str]:
    """The Python distributions that a strategy or combination requires; only peers require any."""
    return list(impls.nesting(strategy).requires)


class TrainingOptions(BaseModel):
    """How the step is run; see :class:`Training`. Further keys are the options of the backend.

    Attributes:
        step: "training", or "inference": only a forward pass of the whole batch.
        moments: "later": the first step's update allocates Adam's moments; "kept": they exist before it.
        batch_on_device: "part": a rank holds only its part of the batch; "whole": all of the batch.
        micro_batches: the number of parts of a replica's batch that are run one after another.
        virtual_stages: the number of runs of layers on a rank of the pipeline; above 1 only if "interleaved".
        stage_layers: the numbers of layers of the pp x virtual_stages stages, in the order of the layers;
            None: the same number for each stage.
        microbatch_group_size: if "interleaved", the number of micro-batches that pass through a run of layers
            before the rank turns to its next run; None: the number of ranks of the pipeline.
        overlap_p2p_communication: if "interleaved", whether ranks send while they compute.
        steps: the number of traced steps: communication and times are of the last step, peaks the largest.
        cublas_workspace: the value of the environment variable CUBLAS_WORKSPACE_CONFIG, pairs of KiB and
            count such as ":4096:8"; None: the cluster's.
        cuda_alloc_conf: the value of the environment variable PYTORCH_CUDA_ALLOC_CONF,
            "expandable_segments:True" (:class:`ExpandableSegments`) or "max_split_size_mb:N"
            (:class:`OversizeBlocks`); None: torch's defaults.
        alloc_retries: whether a simulated allocator whose card is full frees its cached memory and tries
            again, as torch's does (``num_alloc_retries`` of torch.cuda.memory_stats; DeepSpeed warns of such
            "cache flushes", runtime/zero/stage3.py). False: the step is out of memory.
        cuda_graph: what CUDA graphs launch in a simulated step, without work of the host: the kernels of
            forward and backward ("layers"), or also their communication ("full_iteration").
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    step: Literal["training", "inference"] = "training"
    moments: Literal["kept", "later"] = "kept"
    backend: str = impls.DEFAULT_BACKEND
    batch_on_device: Literal["part", "whole"] = "part"
    micro_batches: setting_values.Repeats = 1
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    virtual_stages: setting_values.Repeats = 1
    stage_layers: list[NonNegativeInt] | None = None
    microbatch_group_size: setting_values.Repeats | None = None
    overlap_p2p_communication: bool = False
    steps: setting_values.Repeats = 1
    cublas_workspace: str | None = None
    cuda_alloc_conf: str | None = None
    alloc_retries: bool = True
    cuda_graph: Literal["none", "layers", "full_iteration"] = "none"

    @model_validator(mode="after")
    def _check_virtual_stages(self) -> Self:
        if self.schedule == "interleaved" and self.virtual_stages == 1:
            raise ValueError("schedule: interleaved needs virtual_stages: 2 or more")
        for name in ("virtual_stages", "microbatch_group_size", "overlap_p2p_communication"):
            given = getattr(self, name) != type(self).model_fields[name].default
            if given and self.schedule != "interleaved":
                raise ValueError(f"{name} is for schedule: interleaved; leave it out, or set that")
        return self

    @field_validator(*setting_values.VARIABLES)
    @classmethod
    def _check_variables(cls, value: str | None, info: ValidationInfo) -> str | None:
        assert info.field_name is not None
        return setting_values.checked(info.field_name, value)

    @model_validator(mode="after")
    def _leave_out_defaults(self) -> Self:
        """Remove options of the backend that have their default values, so that equal cells have one key."""
        given = self.__pydantic_extra__ or {}
        for name, default in impls.backend_defaults(self.backend).items() if given else ():
            if name in given and given[name] == default and type(given[name]) is type(default):
                del given[name]
        return self

    @property
    def backend_options(self) -> Mapping[str, Any]:
        """The options of the backend that differ from their defaults, by name."""
        return self.__pydantic_extra__ or {}


class SearchRequest(StrictModel):
    """A request for the largest ``quantity`` (one of :func:`quantities`) that fits.

    The search tries multiples of ``step`` (for a sequence length, ``step`` positions a rank if the strategy
    chunks sequences; for a batch, ``step`` samples a micro-batch), up to ``limit``. With ``timed``, the time
    of a step at the answer is simulated too.
    """

    quantity: str
    step: setting_values.Count = 1
    limit: setting_values.Count = 2**22
    timed: bool = False


class Timing(StrictModel):
    """The numbers of steps that the distributed engine runs before timing and with timing."""

    warmup: int = Field(default=2, ge=0, le=setting_values.MOST_STEPS)
    samples: setting_values.Repeats = 5


class Learning(StrictModel):
    """A request for the losses of a training run on real data instead of a measurement; on real ranks only.

    The learning rate rises linearly over ``warmup`` steps, then falls linearly to zero after the last step.
    Weights and data depend on ``seed``; ``deviation`` is the standard deviation of the initial matrices.
    """

    steps: setting_values.Repeats
    learning_rate: PositiveFloat = 1e-3
    warmup: int = Field(default=0, ge=0, le=setting_values.MOST_STEPS)
    seed: int = Field(default=1, ge=-(2**63), lt=2**63)
    deviation: PositiveFloat = 0.02


def _with_sizes(content: Any) -> Any:
    """The settings of a cell, with options that are written as sizes, such as "128K", turned into numbers."""
    if not isinstance(content, Mapping):
        return content
    options = {name: content[name] for name in _OF_OPTIONS if isinstance(content.get(name), Mapping)}
    return {
        **content,
        **{name: {k: setting_values.with_suffix(v) for k, v in o.items()} for name, o in options.items()},
    }


#: the sections of a cell whose values the model, the strategy or the backend checks
_OF_OPTIONS = ("model_options", "strategy_options", "training")


class Cell(StrictModel):
    """One point of a sweep. Where ``search`` asks for batch or seq_len, that field is None.

    Attributes:
        model: a name, or the path of a Hugging Face config.json or of the folder that it lies in; or a user's
            step, such as "step.py:train", with the strategy OWN_STEP.
        model_config_json: the fields of that file that matter, read when the cell is made, so that a row is
            of the file as it was, and other machines do not need the file; of a step, the file's whole path.
        mesh: the axes of the mesh, from the slowest-varying rank to the fastest; None: as in MESH_AXES. Axes
            of one rank may be left out.
        device: the device of tensors; the virtual engine always has fake tensors on the CPU.
        rank: the rank that an engine of a single rank runs; None: the rank with the largest peak.
        meters: the names of further meters, in addition to memory and communication.
        program: the program whose padding of documents and errors of times the step has; "": none.
        variant: the name of a variant of settings within a scenario, for comparison and plots.
        timeout_s: seconds after which a sweep gives the cell up; not in keys and rows.
    """

    model: str
    model_config_json: dict[str, Any] | None = None
    strategy: str
    sizes: Sizes = Sizes()
    mesh: list[str] | None = None
    batch: setting_values.Count | None = None
    seq_len: setting_values.Count | None = None
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
    program: setting_values.Program = ""
    variant: str = ""
    timeout_s: setting_values.Seconds | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _read_files(cls, content: Any) -> Any:
        """Read the model's file and the file of its documents, relative to the working directory, unless they
        were read before; turn sizes in options, such as ``max_positions: 8K``, into numbers."""
        content = _with_sizes(setting_values.with_documents(content))
        if isinstance(content, Mapping) and content.get("model_config_json") is None:
            model = content.get("model")
            named = setting_values.names_a_file, setting_values.names_a_step
            if isinstance(model, str) and any(names(model) for names in named):
                return {**content, "model_config_json": setting_values.read_model_file(model)}
        return content

    @field_validator("mesh")
    @classmethod
    def _check_mesh(cls, order: list[str] | None, info: ValidationInfo) -> list[str] | None:
        """The order of the mesh's axes; None for the default order, so that equal cells have one key."""
        if order is None or "sizes" not in info.data:
            return None
        impls.in_order(info.data["sizes"].by_axis, order)
        return None if order == sorted(order, key=impls.MESH_AXES.index) else order

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.batch or 1) * (self.seq_len or 1) > setting_values.MOST_POSITIONS:
            asked = f"batch {self.batch} of {self.seq_len} positions"
            raise ValueError(f"{asked} are more than {setting_values.MOST_POSITIONS} positions")
        if self.precision != "bf16" and self.training.backend_options.get("exp_avg_dtype") == "bf16":
            raise ValueError("training.exp_avg_dtype: bf16 needs precision: bf16; leave one out")
        if self.precision in ("fp32", "fp64") and self.model_options.get("frozen_bits", 16) in (4, 8):
            packed = "numbers of 16 bits hold packed weights"
            raise ValueError(f"model_options.frozen_bits: {packed}; set precision: bf16")
        return self

    @property
    def model_arguments(self) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
        """The arguments of :func:`model_preset` for the cell's model, with documents padded as by the cell's
        program."""
        options = self.model_options
        if options.get("documents"):
            options = impls.padded_options(options, self.program, self.strategy, self.sizes.by_axis)
        return self.model, options, self.model_config_json

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The number of ranks along every axis of the mesh, from the slowest-varying axis to the fastest."""
        return impls.in_order(self.sizes.by_axis, self.mesh or impls.MESH_AXES)

    @property
    def mesh_text(self) -> str:
        """The axes of more than one rank in the mesh's order, with their ranks: "dp2xsp8"; or "1"."""
        return impls.spelled(self.mesh_sizes)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced, as pydantic's, except that the copy computes its own key."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("key", None)
        return copied

    @cached_property
    def key(self) -> str:
        """A stable name of the cell: readable parts, then a digest of all its settings. A model's file counts
        by its path; a row's digest covers the content (:mod:`measure.sweep.provenance`)."""
        defining = self.model_dump(exclude_defaults=True, exclude={"model_config_json"})
        content = json.dumps(defining, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        none = "-" if self.strategy == OWN_STEP else "max"
        batch = none if self.batch is None else self.batch
        length = none if self.seq_len is None else self.seq_len
        named = (self.model, self.strategy, self.mesh_text, f"b{batch}", f"L{length}", self.precision)
        variant = [self.variant] if self.variant else []
        return "/".join([*named, *variant, self.cluster, self.engine, digest])

    @property
    def shape(self) -> tuple[int, int]:
        """The pair (batch, seq_len) of a cell that searches for neither."""
        assert self.batch is not None, "batch is searched for"
        assert self.seq_len is not None, "seq_len is searched for"
        return self.batch, self.seq_len

    def at(self, value: int) -> Self:
        """The cell with the searched quantity set to ``value``, and without its search."""
        assert self.search is not None
        return self.model_copy(update={self.search.quantity: value, "search": None})
