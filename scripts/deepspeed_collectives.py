"""Writes the collectives of a micro-batch under DeepSpeed's ZeRO-3, as YAML, for test_deepspeed_zero3.yaml.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 scripts/deepspeed_collectives.py OUT

The options of stage 3 are those of that file.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
RECORDED = Path(__file__).parents[1] / "tests" / "impls" / "backends" / "test_deepspeed_zero3.yaml"
STAGE_3 = {"stage": 3, **yaml.safe_load(RECORDED.read_text(encoding="utf-8"))["options"]}

sent: dict[str, list[int]] = {}
phase = ["forward"]


def noted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose largest tensor's bytes are noted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        sizes = [x.nbytes for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        sent.setdefault(f"{phase[0]} {kind}", []).append(max(sizes))
        return function(*args, **kwargs)

    return call


for name, kind in (("all_gather_into_tensor", "gathers"), ("reduce_scatter_tensor", "sums")):
    setattr(dist, name, noted(kind, getattr(dist, name)))
dist.all_reduce = noted("all-reduces", dist.all_reduce)
deepspeed.init_distributed("gloo")
config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
model = LlamaForCausalLM(config).to(torch.bfloat16).train()
model.gradient_checkpointing_enable({"use_reentrant": False})
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": STAGE_3,
}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings
)
tokens = torch.arange(8)[None]
for _ in range(3):  # the trace is recorded in the second
    sent.clear()
    phase[0] = "forward"
    loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
    phase[0] = "backward"
    engine.backward(loss)
    phase[0] = "optimizer"
    engine.step()
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(yaml.safe_dump(sent), encoding="utf-8")
