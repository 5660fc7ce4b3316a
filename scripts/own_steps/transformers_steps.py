"""Training steps of transformers' models: under fully_shard, and as accelerate prepares them (FSDP2). Each
function without arguments is a step, for example of `spbench trace transformers_steps.py:qwen3_8b`."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

LENGTH = 4096


def model_of(name):
    """The model of NAME.json next to this file, a config.json, on meta, with layers checkpointed."""
    settings = json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**settings, attn_implementation="sdpa", use_cache=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def step_of(model, optimizer, backward=torch.Tensor.backward):
    def step():
        tokens = torch.randint(model.config.vocab_size, (1, LENGTH), device="cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def sharded(name):
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = model_of(name)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    return step_of(model, torch.optim.AdamW(model.parameters(), fused=True))


def qwen3_8b():
    return sharded("qwen3_8b")


def mixtral_8x7b():
    return sharded("mixtral_8x7b")


def accelerated_qwen3_8b():
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        reshard_after_forward=True,
        mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = model_of("qwen3_8b").to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    return step_of(model, optimizer, accelerator.backward)
