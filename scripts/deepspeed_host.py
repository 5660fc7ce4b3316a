"""What DeepSpeed's ZeRO-3 costs the host for each weight, in calls of a module.

    pip install deepspeed transformers
    DS_ACCELERATOR=cpu python scripts/deepspeed_host.py

A Llama of 12 small layers runs forward and backward with DeepSpeed and without it, in turns, as one of four
ranks of a process group that sends nothing. The run without DeepSpeed says how much slower this host is than
the figures of scenarios/clusters/h100-sxm.yaml, which price the run's operators, views, nodes and modules.
What DeepSpeed adds, without its operators and the calls of torch.distributed, which the suite prices too, is
divided by this ratio, by the weights, and by the figure of a module's call.
"""

import copy
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {
    *["view", "_unsafe_view", "t", "transpose", "expand", "slice", "unsqueeze", "detach", "alias", "select"]
}
WARMUP, REPEATS = 3, 25


class Counted(TorchDispatchMode):
    """Counts views and other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not name.startswith("c10d"):
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


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The function, which adds its seconds of the processor to ``spent``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        result = function(*args, **kwargs)
        spent[0] += time.process_time() - begin
        return result

    return call


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "4"}
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    sent = [0.0]
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(dist, name, timed(getattr(dist, name), sent))
    deepspeed.init_distributed("gloo", dist_init_required=False)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 12}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    plain = copy.deepcopy(model)
    # the persistent weights are the norms'; the numbers are to the weights as DeepSpeed's to a model of 8B
    stage = {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 100}
    stage |= {"stage3_prefetch_bucket_size": 10_000, "stage3_max_reuse_distance": 200_000}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 10**6,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": stage | {"stage3_max_live_parameters": 200_000},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    tokens = torch.randint(0, 512, (1, 8))

    def run(module: Any, backward: Any) -> list[tuple[float, float]]:
        """(seconds, those within torch.distributed) of forward, and of backward."""
        parts, loss = [], torch.empty(0)
        for part in ("forward", "backward"):
            sent[0], begin = 0.0, time.process_time()
            if part == "forward":
                loss = module(input_ids=tokens, labels=tokens, use_cache=False).loss
            else:
                backward(loss)
            parts.append((time.process_time() - begin, sent[0]))
        return parts

    both = [(run(plain, Tensor.backward), run(engine, engine.backward)) for _ in range(WARMUP + REPEATS)]
    seconds = [
        [
            statistics.median(each[which][part][0] - each[which][part][1] for each in both[WARMUP:])
            for part in (0, 1)
        ]
        for which in (0, 1)
    ]
    with open("scenarios/clusters/h100-sxm.yaml", encoding="utf-8") as file:
        host = {name: each["value"] for name, each in yaml.safe_load(file)["host"].items()}
    counts = []
    for module, backward in ((plain, Tensor.backward), (engine, engine.backward)):
        with Counted() as forward:
            loss = module(input_ids=tokens, labels=tokens, use_cache=False).loss
        nodes = nodes_of(loss)
        with Counted() as back:
            backward(loss)
        counts.append([forward.counts, back.counts])
        if module is plain:
            others = nodes * host["node_s"] + len([*plain.modules()]) * host["module_s"]
    priced = [[sum(n * host[name] for name, n in part.items()) for part in parts] for parts in counts]
    ratio = sum(seconds[0]) / (sum(priced[0]) + others)
    weights = len([*plain.parameters()])
    for part, name in enumerate(("forward", "backward")):
        before, after = seconds[0][part], seconds[1][part]
        added = (after - before) / ratio - (priced[1][part] - priced[0][part])
        calls = added / weights / host["module_s"]
        print(
            f"{name}: {before * 1e3:.0f} ms, with DeepSpeed {after * 1e3:.0f} ms; {calls:.0f} calls a weight"
        )
    print(f"this host is {ratio:.2f} times slower than the figures")


if __name__ == "__main__":
    main()
