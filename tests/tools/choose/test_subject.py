"""What `spbench fit` takes for granted of a model."""

import pytest

from spbench.bench.cell import Sizes
from spbench.bench.tools.choose.anatomy import Part
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.fit_verdict import TABLES, in_program_words
from spbench.bench.tools.choose.subject import (
    subject,
    text_on,
    tokens_of_rank,
)
from tests.grid import tabled
from tests.tools.jobs.job_inputs import INPUTS

OPTION = "strategy_options.placement"


def asked(strategy: str, axis: str, **settings: object) -> Asked:
    of_model = {f"sizes.{axis}": 2, "seq_len": 1024, **settings}
    return Asked(cluster="dgx-a100", gpus=2, strategy=strategy, settings=of_model)


@pytest.mark.parametrize(
    ("model", "strategy", "settings", "placement"),
    [
        ("causal-transformer-tiny", "ring_attention", {}, "zigzag"),
        ("causal-transformer-tiny", "all_gather_kv", {}, "zigzag"),
        ("causal-transformer-tiny", "ring_attention", {OPTION: "contiguous"}, "contiguous"),
        ("causal-transformer-tiny", "ring_attention", {"seq_len": 1026}, None),  # not divisible by 2 x 2
        ("causal-transformer-tiny", "ring_attention", {"model_options.window": 64}, "zigzag"),
        ("causal-transformer-tiny", "ulysses", {}, None),
        ("mistral-7b-v0.1", "ring_attention", {"seq_len": 8192}, None),  # a halo, of contiguous chunks
        ("tnl-tiny", "ring_attention", {}, None),  # linear attention has contiguous chunks alone
        ("st-dit-tiny", "ring_attention", {"seq_len": 72}, None),  # no causal mask
    ],
)  # fmt: skip
def test_text_is_placed_as_programs_do(
    model: str, strategy: str, settings: dict[str, object], placement: str | None
) -> None:
    found = subject([model], asked(strategy, "sp", **settings))
    (cell,) = found.cells
    assert cell.strategy_options.get("placement") == placement
    if placement == "zigzag" and OPTION not in settings:
        assert f"placement zigzag (--set {OPTION})" in text_on("taken", cell, said=found.said)


@tabled(__file__, "tokens_of_a_rank_show_what_an_axis_divides")
def test_tokens_of_a_rank_show_what_an_axis_divides(
    strategy: str, axis: str, batch: int, tokens: int
) -> None:
    (cell,) = subject(["causal-transformer-tiny"], asked(strategy, axis, batch=batch)).cells
    assert tokens_of_rank(cell) == tokens


@pytest.mark.parametrize(("name", "said"), [("llama_factory_v1.yaml", True), ("verl.sh", False)])
def test_a_micro_batch_that_the_job_has_is_not_taken(name: str, said: bool) -> None:
    """verl fills rows up to a number of tokens, so that its micro-batch is unknown."""
    found = subject([str(INPUTS / name)], Asked(cluster="dgx-h100", gpus=8))
    assert ("training.micro_batches" in found.said) is said
    assert (
        "taken where nothing was said: micro-batch 1" in text_on("taken", found.cells[0], said=found.said)
    ) is not said


def test_experts_have_a_line() -> None:
    settings = {"seq_len": 1024, "sizes.ep": 8}
    (cell,) = subject(["Qwen/Qwen3-30B-A3B"], Asked("dgx-h100", 16, None, settings)).cells
    assert text_on("experts", cell) == (
        "routed experts: 95% of parameters; 16 of 128 in each layer are on a rank"
    )
    assert (
        text_on("model", cell, "run.sh")
        == "the model run.sh: 30.5 billion parameters, 3.35 billion of them active, 48 layers"
    )
    assert text_on("slow", cell) == ""
    assert "; 6,144 experts of their own" in text_on("slow", cell.model_copy(update={"sizes": Sizes(dp=16)}))
    (dense,) = subject(["llama3-8b"], Asked("dgx-h100", 16, None, {"seq_len": 1024})).cells
    assert text_on("experts", dense) == ""


@pytest.mark.parametrize("program", ["", "megatron", "torchtitan", "deepspeed"])
def test_modules_have_the_words_of_the_program(program: str) -> None:
    root, mlp = (in_program_words(each, program) for each in ("FSDPDecoder", "blocks.*.mlp"))
    assert (root, mlp) == {
        "": ("the head and the loss", "blocks.*.mlp"),
        "megatron": ("output_layer and the loss", "decoder.layers.*.mlp"),
        "torchtitan": ("output and the loss", "layers.*.feed_forward"),
        "deepspeed": ("lm_head and the loss", "model.layers.*.mlp"),
    }[program]


@tabled(__file__, "parts_of_experts_are_named")
def test_parts_of_experts_are_named(kind: str, module: str, part: str) -> None:
    about = {"peak": 1, "words": str}
    of_peak = Part(kind, module, 1, 1)
    assert TABLES.record("part", of_peak, experts=True, **about)["of"] == part
    assert TABLES.record("part", of_peak, experts=False, **about)["of"] is None
