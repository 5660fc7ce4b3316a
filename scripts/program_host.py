"""What programs cost the host beside operators, views, nodes and modules: each part, in calls of a module.

    python scripts/program_host.py fully_shard --ranks 1     # or 2, without messages
    python scripts/program_host.py tensor_parallel
    pip install deepspeed transformers
    LOCAL_RANK=0 DS_ACCELERATOR=cpu python scripts/program_host.py deepspeed --ranks 4    # or deepspeed_zero2
    python scripts/program_host.py checkpoint    # the second run's calls of modules are among its backward's

A model of 12 small layers runs forward and backward as the program runs the model, and plainly, in turns, on
one rank. Times are of the process, so that other processes count little. The plain runs say how much slower
this host is than the figures of scenarios/clusters/h100-sxm.yaml, which price their operators, views, nodes
and modules. What the program adds, without the operators, views and nodes that it adds (a backend of the
suite calls them), is divided by this ratio and by the figure of a module's call. By weights and units: the
least squares over models of several sizes.
"""

import copy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {
    *["view", "_unsafe_view", "t", "transpose", "expand", "slice", "unsqueeze", "detach", "alias", "select"],
    *["as_strided", "split", "split_with_sizes", "unbind", "chunk"],
}
#: operators that only a profiler sees, or that only mark an order
MARKS = {"_record_function_enter_new", "_record_function_exit", "wait_tensor", "_wrap_tensor_autograd"}
WARMUP, REPEATS, LAYERS, HIDDEN = 3, 20, 12, 32


class Run(NamedTuple):
    """A way to run the model: ``forward`` returns the loss, of which ``backward`` is called."""

    module: nn.Module
    forward: Callable[[nn.Module], Tensor]
    backward: Callable[[Tensor], Any] = Tensor.backward


class Part(NamedTuple):
    """A model that runs in two ways, the units and weights that the program has hooks for, and whether the
    suite's backend has the nodes of autograd that the program adds."""

    plain: Run
    program: Run
    units: int
    weights: int
    nodes: bool = True


class Counted(TorchDispatchMode):
    """Counts views and other operators of plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        name = func._schema.name.partition("::")[2]
        if name not in MARKS:
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


def seconds(run: Run) -> tuple[float, float]:
    """The process's seconds of a forward and of a backward."""
    begin = time.process_time()
    loss = run.forward(run.module)
    middle = time.process_time()
    run.backward(loss)
    end = time.process_time()
    run.module.zero_grad()
    return middle - begin, end - middle


def work(run: Run) -> tuple[Counter[str], Counter[str]]:
    """The numbers of operators, views, nodes and modules of a forward and of a backward."""
    with Counted() as forward:
        loss = run.forward(run.module)
    forward.counts["module_s"] = len([*run.module.modules()])
    nodes = nodes_of(loss)
    with Counted() as backward:
        run.backward(loss)
    run.module.zero_grad()
    return forward.counts, backward.counts + Counter(node_s=nodes)


class Attention(nn.Module):
    def __init__(self, parts: int):
        super().__init__()
        self.heads = 4 // parts
        self.wq, self.wk, self.wv = (nn.Linear(HIDDEN, HIDDEN // parts, bias=False) for _ in range(3))
        self.wo = nn.Linear(HIDDEN // parts, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y: Tensor = self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return y


class FeedForward(nn.Module):
    def __init__(self, parts: int):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, 2 * HIDDEN // parts, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * HIDDEN // parts, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Block(nn.Module):
    """A layer as torchtitan has it, with 1 / ``parts`` of its heads and features."""

    def __init__(self, parts: int = 1):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention, self.feed_forward = Attention(parts), FeedForward(parts)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


def loss_of(module: nn.Module) -> Tensor:
    y = module(torch.ones(1, 4, HIDDEN, dtype=next(module.parameters()).dtype))
    return (y.to_local() if hasattr(y, "to_local") else y).float().sum()


def without_messages(ranks: int) -> Any:
    """A mesh of ranks of which only the first exists."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


def fully_shard_parts(ranks: int) -> Iterator[Part]:
    """Units of 3, 9 and 25 weights under torch's fully_shard, with weights in float32 cast to bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = without_messages(ranks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for weights in (2, 8, 24):
        plain = nn.Sequential(
            *(
                nn.Sequential(
                    nn.RMSNorm(HIDDEN), *(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(weights))
                )
                for _ in range(LAYERS)
            )
        )
        sharded = copy.deepcopy(plain)
        for each in sharded:
            fully_shard(each, mesh=mesh, mp_policy=policy)
        fully_shard(sharded, mesh=mesh, mp_policy=policy)
        yield Part(Run(plain.bfloat16(), loss_of), Run(sharded, loss_of), LAYERS, LAYERS * (weights + 1))


def tensor_parallel_parts(ranks: int) -> Iterator[Part]:
    """Layers in the plan of torchtitan's apply_tp (models/llama3/infra/parallelize.py), and local layers."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    mesh, plan = without_messages(2), dict[str, Any]()
    for name in ("attention", "feed_forward"):
        plan[name] = tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan |= {name: tp.SequenceParallel() for name in ("attention_norm", "ffn_norm")}
    plan |= {f"attention.{name}": tp.ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {f"feed_forward.{name}": tp.ColwiseParallel() for name in ("w1", "w3")}
    for name in ("attention.wo", "feed_forward.w2"):
        plan[name] = tp.RowwiseParallel(output_layouts=Shard(1))
    layers = nn.Sequential(*(Block() for _ in range(LAYERS)))
    for layer in layers:
        tp.parallelize_module(layer, mesh, plan)
    plain = nn.Sequential(*(Block(2) for _ in range(LAYERS)))
    yield Part(Run(plain, loss_of), Run(layers, loss_of), LAYERS, 9 * LAYERS)


class HostEvent:
    """An event in Python around calls of the driver that take no time, as torch.cuda.Event is one around
    calls that take some."""

    def record(self, stream: Any = None) -> None:
        stream = current_stream() if stream is None else stream

    def wait(self, stream: Any = None) -> None:
        stream = current_stream() if stream is None else stream

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HostStream:
    """A stream as :class:`HostEvent` is an event (torch/cuda/streams.py)."""

    def __init__(self, *_: Any, **__: Any):
        self.device = torch.device("cpu")

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: HostEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: "HostStream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        pass


def current_stream(device: Any = None) -> HostStream:
    """A new object, as torch.cuda.current_stream makes one."""
    return HostStream(stream_id=0, device_index=0, device_type=1)


class HostStreamContext:
    """torch.cuda.StreamContext, without the calls of the driver."""

    def __init__(self, stream: HostStream):
        self.stream = stream

    def __enter__(self) -> None:
        self.before = current_stream()
        if self.before.device != self.stream.device:
            raise RuntimeError("one device only")

    def __exit__(self, *_: Any) -> None:
        if self.before.device != self.stream.device:
            raise RuntimeError("one device only")


def as_on_a_gpu() -> None:
    """Have DeepSpeed call streams, events and ranges on this CPU as it does on a GPU; the calls of the driver
    within them take no time."""
    from deepspeed import accelerator as accelerators
    from deepspeed.accelerator import cpu_accelerator

    def nothing(*_: Any, **__: Any) -> None:
        pass

    class OnHost(cpu_accelerator.CPU_Accelerator):  # type: ignore[misc]
        Stream, Event = HostStream, HostEvent
        stream, current_stream = staticmethod(HostStreamContext), staticmethod(current_stream)
        default_stream = staticmethod(current_stream)
        range_push, range_pop = nothing, nothing

        def is_synchronized_device(self) -> bool:
            return False

        resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    torch.Tensor.record_stream = nothing  # type: ignore[method-assign, assignment]
    accelerators.set_accelerator(OnHost())


def small_llama() -> Any:
    """A Llama of transformers, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": LAYERS}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


def loss_of_llama(module: Any) -> Tensor:
    tokens = torch.arange(8)[None]
    loss: Tensor = module(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def checkpoint_parts(ranks: int) -> Iterator[Part]:
    """Layers that torch's checkpoint runs again, without reentrance."""
    plain = small_llama()
    again = copy.deepcopy(plain)
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    yield Part(Run(plain, loss_of_llama), Run(again, loss_of_llama), LAYERS, 0)


def deepspeed_parts(ranks: int, stage: int = 3) -> Iterator[Part]:
    """A Llama of transformers under a stage of DeepSpeed's ZeRO, whose buckets are to the weights as those of
    a model of 8B; calls of torch.distributed, which the suite prices, take no time."""
    without_messages(ranks)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        setattr(dist, name, lambda *_, **__: SimpleNamespace(wait=bool))
    import deepspeed

    as_on_a_gpu()
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo", dist_init_required=False)
    model = small_llama()
    plain = copy.deepcopy(model)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 10**6,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": 500_000_000 if stage == 3 else 50_000,
            "stage3_param_persistence_threshold": 100,
            **{f"stage3_max_{name}": 200_000 for name in ("reuse_distance", "live_parameters")},
            "stage3_prefetch_bucket_size": 10_000,
        },
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    weights = len([*plain.parameters()])
    program = Run(engine, loss_of_llama, engine.backward)
    yield Part(Run(plain, loss_of_llama), program, 0, weights, nodes=False)


PARTS = {
    "fully_shard": fully_shard_parts,
    "tensor_parallel": tensor_parallel_parts,
    "checkpoint": checkpoint_parts,
    "deepspeed": deepspeed_parts,
    "deepspeed_zero2": partial(deepspeed_parts, stage=2),
}


@click.command(help=__doc__)
@click.argument("part", type=click.Choice([*PARTS]))
@click.option("--ranks", default=2, help="Ranks that share the weights of fully_shard.")
def main(part: str, ranks: int) -> None:
    print_calls(PARTS[part](ranks))


def price_of() -> Callable[[Mapping[str, int]], float]:
    """What a host's work takes by the figures of a cluster, in seconds, from its numbers by figure."""
    with open("scenarios/clusters/h100-sxm.yaml", encoding="utf-8") as file:
        figures = {name: of["value"] for name, of in yaml.safe_load(file)["host"].items() if "value" in of}
    return lambda counts: sum(number * figures[name] for name, number in counts.items())


def print_calls(parts: Iterator[Part]) -> None:
    """Print what the programs of ``parts`` add, in calls of a module."""
    torch.set_num_threads(1)
    priced = price_of()
    rows, added, ratios = [], [], []
    for each in parts:
        both = [(seconds(each.plain), seconds(each.program)) for _ in range(WARMUP + REPEATS)][WARMUP:]
        plain, program = np.median(np.array(both), axis=0)
        plain_work, program_work = work(each.plain), work(each.program)
        ratios.append(plain.sum() / sum(map(priced, plain_work)))
        if not each.nodes:
            program_work[1]["node_s"] = plain_work[1]["node_s"]
        own = np.array([priced(a) - priced(b) for a, b in zip(program_work, plain_work, strict=True)])
        rows.append((each.units, each.weights))
        added.append((program - plain, own))
    ratio = statistics.median(ratios)
    calls = [(more / ratio - own) / priced({"module_s": 1}) for more, own in added]
    print(f"this host is {ratio:.2f} times slower than the figures")
    known = [column for column in (0, 1) if len(rows) > 1 or (rows[0][0] == 0) == bool(column)]
    solved = np.linalg.lstsq(np.array(rows)[:, known], np.array(calls), rcond=None)[0]
    for name, of in zip([("unit", "weight")[column] for column in known], solved, strict=True):
        print(f"calls of a module for each {name}: {of[0]:.0f} in forward, {of[1]:.0f} in backward")


if __name__ == "__main__":
    main()
