"""What DeepSpeed's ZeRO-3 costs the host for each weight, in calls of a module.

    pip install deepspeed transformers
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 1 scripts/deepspeed_host.py

A Llama of 12 small layers runs forward and backward with DeepSpeed and without it, in turns, on one rank, so
that no message counts. The run without DeepSpeed says how much slower this host is than the figures of
scenarios/clusters/h100-sxm.yaml, which price the run's operators, views, nodes and modules. What DeepSpeed
adds is divided by this ratio, by the weights, and by the figure of a module's call.
"""

import copy
import statistics
import time
from collections import Counter
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {
    *["view", "_unsafe_view", "t", "transpose", "expand", "slice", "unsqueeze", "detach", "alias", "select"]
}
WARMUP, REPEATS = 3, 15


class Counted(TorchDispatchMode):
    """Counts views and other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.counts["view_s" if name in VIEWS else "operator_s"] += 1
        return func(*args, **(kwargs or {}))


def nodes_of(loss: Tensor) -> int:
    """The number of nodes of autograd behind a loss."""
    seen, left = set(), [loss.grad_fn]
    while left:
        if (node := left.pop()) is not None and node not in seen:
            seen.add(node)
            left += [further for further, _ in node.next_functions]
    return len(seen)


def main() -> None:
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 12}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    plain = copy.deepcopy(model)
    stage = {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 100}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 10**6,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": stage,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    tokens = torch.randint(0, 512, (1, 8))

    def seconds(module: Any, backward: Any) -> tuple[float, float]:
        begin = time.perf_counter()
        loss = module(input_ids=tokens, labels=tokens, use_cache=False).loss
        middle = time.perf_counter()
        backward(loss)
        return middle - begin, time.perf_counter() - middle

    both = [
        (seconds(plain, Tensor.backward), seconds(engine, engine.backward)) for _ in range(WARMUP + REPEATS)
    ]
    runs = both[WARMUP:]
    medians = [[statistics.median(run[which][part] for run in runs) for part in (0, 1)] for which in (0, 1)]
    with Counted() as operators:
        loss = plain(input_ids=tokens, labels=tokens, use_cache=False).loss
        nodes = nodes_of(loss)
        loss.backward()
    counts = {**operators.counts, "node_s": nodes, "module_s": len([*plain.modules()])}
    with open("scenarios/clusters/h100-sxm.yaml", encoding="utf-8") as file:
        host = yaml.safe_load(file)["host"]
    priced = sum(number * host[name]["value"] for name, number in counts.items())
    ratio = sum(medians[0]) / priced
    weights = len([*plain.parameters()])
    for name, before, after in zip(("forward", "backward"), *medians, strict=True):
        calls = (after - before) / ratio / weights / host["module_s"]["value"]
        print(
            f"{name}: {before * 1e3:.0f} ms, with DeepSpeed {after * 1e3:.0f} ms; {calls:.0f} calls a weight"
        )
    print(f"this host is {ratio:.2f} times slower than the figures")


if __name__ == "__main__":
    main()
