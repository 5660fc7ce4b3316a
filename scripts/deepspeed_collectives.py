"""Writes the collectives of DeepSpeed's ZeRO on two ranks, as YAML, for the tests of these backends.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 scripts/deepspeed_collectives.py OUT

Of stage 3 these are a micro-batch's, with the options in test_host_states.yaml; of stages 1 and 2 a step's,
in their order, for each of the runs in test_deepspeed_zero2.yaml. Both files are of tests/impls/backends.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
EXPERTS |= {"shared_expert_intermediate_size": 192}
TESTS = Path(__file__).parents[1] / "tests" / "impls" / "backends"

sent: list[tuple[str, str, int]] = []
phase = ["forward"]


def noted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose largest tensor's bytes are noted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        sizes = [x.nbytes for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        sent.append((phase[0], kind, max(sizes)))
        return function(*args, **kwargs)

    return call


def run(
    zero: Mapping[str, Any],
    micro_batches: int,
    sizes: Mapping[str, int],
    kind: tuple[Any, Any] = (LlamaConfig, LlamaForCausalLM),
    recomputes: bool = True,
    **settings: Any,
) -> None:
    """Run three steps, of which :data:`sent` then has the last one's collectives."""
    config = kind[0](**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    model = kind[1](config).to(torch.bfloat16).train()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers' Trainer gives matrices a weight decay, and vectors none
    parts = [[p for p in model.parameters() if (p.dim() > 1) == matrices] for matrices in (True, False)]
    if zero["stage"] == 3:
        parts = [[*model.parameters()]]
    settings |= {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": dict(zero),
    }
    optimizer = torch.optim.AdamW([{"params": part} for part in parts])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    tokens = torch.arange(8)[None]
    for _ in range(3):  # stage 3 records its trace in the second
        sent.clear()
        for _ in range(micro_batches):
            phase[0] = "forward"
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            phase[0] = "backward"
            engine.backward(loss)
            phase[0] = "optimizer"
            engine.step()
    engine.destroy()


def of_stage_3(sizes: Mapping[str, int] = SIZES, *model: Any) -> dict[str, list[int]]:
    recorded = yaml.safe_load((TESTS / "test_host_states.yaml").read_text(encoding="utf-8"))
    options = recorded["options"] | (recorded["of experts"] if model else {})
    run({"stage": 3, **options}, 1, sizes, *model)
    words = {"all_gather": "gathers", "reduce_scatter": "sums", "all_reduce": "all-reduces"}
    by_kind: dict[str, list[int]] = {}
    for each, kind, nbytes in sent:
        by_kind.setdefault(f"{each} {words[kind]}", []).append(nbytes)
    return by_kind


def of_smaller_stages() -> dict[str, list[str]]:
    runs = yaml.safe_load((TESTS / "test_deepspeed_zero2.yaml").read_text(encoding="utf-8"))["runs"]
    orders = {}
    for name, each in runs.items():
        # the partitions' border lies within a matrix
        run(
            each["zero"],
            each["micro_batches"],
            SIZES | {"intermediate_size": 208},
            **each.get("settings", {}),
        )
        orders[name] = [f"{phase} {kind} {nbytes}" for phase, kind, nbytes in sent]
    return orders


for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "reduce"):
    short = name.removesuffix("_into_tensor").removesuffix("_tensor")
    setattr(dist, name, noted(short, getattr(dist, name)))
# an operator that is compiled first, and that only ranks of one node with a memory in common use
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
deepspeed.init_distributed("gloo")
mixture = SIZES | EXPERTS, (Qwen2MoeConfig, Qwen2MoeForCausalLM)
written = {
    "stage 3": of_stage_3(),
    "experts": of_stage_3(*mixture, False),
    "experts again": of_stage_3(*mixture, True),
    "runs": of_smaller_stages(),
}
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(yaml.safe_dump(written, width=120), encoding="utf-8")
