"""What Megatron-Core's experts and recomputation cost the host beyond dense layers, in calls of a module.

    pip install --no-deps megatron-core==0.16.1
    python scripts/megatron_host.py --ranks 16

As program_host.py measures other programs: models of 12 small layers run in turns on one rank of a group,
whose messages take no time. They have an MLP, Megatron-Core's experts in its place, or Megatron-Core's dense
layers: with dropout (as Megatron-LM's functional tests run them), without it, and recomputed.

Megatron-Core's dense layer with dropout takes the host R times as long as the figures of its operators,
views, nodes and modules say. The scales of clusters that are fitted to these tests stand for R. So of a part
that takes t seconds, and whose operators should take u, t / R - u is not in these clusters' times.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from program_host import HIDDEN, LAYERS, Block, Run, loss_of, price_of, seconds, without_messages, work
from torch import Tensor, nn


class PassedOn(nn.Module):
    """Experts that return their rows times the rows' weights."""

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    def forward(self, rows: Tensor, lengths: Any, weights: Tensor) -> tuple[Tensor, None]:
        return rows * weights[:, None].to(rows.dtype), None


class Routed(nn.Module):
    """Megatron-Core's MoELayer without its second result, which is always None."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


class Permuted(torch.autograd.Function):
    """An operator in place of each kernel of TransformerEngine that permutes rows and their weights."""

    @staticmethod
    def forward(ctx: Any, shape: Any, *tensors: Tensor) -> Any:
        ctx.shapes = [x.shape for x in tensors]
        made = tuple(x.new_zeros([*shape, *x.shape[len(shape) :]]) for x in tensors)
        return made if len(made) > 1 else made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *(y.new_zeros(shape) for y, shape in zip(gradients, ctx.shapes, strict=True))


class Layers(nn.Module):
    """Megatron-Core's layers, each of which ``again`` runs again in backward."""

    def __init__(self, layers: nn.ModuleList, again: Callable[..., Tensor] | None):
        super().__init__()
        self.layers, self.again = layers, again
        self.mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)  # of the 8 ranks' tokens

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)[:1].detach().requires_grad_()
        for layer in self.layers:

            def run(x: Tensor, layer: nn.Module = layer) -> Tensor:
                y: Tensor = layer(hidden_states=x, attention_mask=self.mask)[0]
                return y

            x = run(x) if self.again is None else self.again(run, False, x)
        return x


class Norm(nn.LayerNorm):
    """torch's norm, which Megatron-Core refuses under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps)


def no_message(*_: Any, **__: Any) -> Any:
    return SimpleNamespace(wait=bool)


def dense_runs(ranks: int) -> dict[str, Run]:
    """Dense layers of Megatron-Core under tensor and sequence parallelism: with dropout, whose states of the
    generator are forked, without dropout, and without dropout but recomputed."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import layers, mappings, random
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    for module in (layers, mappings):
        module.dist_all_gather_func = module.dist_reduce_scatter_func = no_message
    buffer = SimpleNamespace(get_tensor=lambda shape, dtype, *_, **__: torch.empty(shape, dtype=dtype))
    for module in (layers, mappings, parallel_state):
        module.get_global_memory_buffer = lambda: buffer
    state = torch.zeros(16, dtype=torch.uint8)  # a GPU's generator has 16 bytes
    random._get_cuda_rng_state = lambda *_, **__: state.clone()
    random._set_cuda_rng_state = lambda *_, **__: None
    random.get_cuda_rng_tracker().states_ = {
        f"{name}-parallel-rng": state for name in ("model", "data", "expert")
    }

    def run(dropout: float, again: Callable[..., Tensor] | None = None) -> Run:
        unfused = ("masked_softmax", "bias_dropout", "bias_activation", "apply_rope", "gradient_accumulation")
        config = TransformerConfig(
            tensor_model_parallel_size=min(8, ranks),
            sequence_parallel=True,
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=8,
            ffn_hidden_size=2 * HIDDEN,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_cpu_initialization=True,
            attention_softmax_in_fp32=False,
            **{f"{name}_fusion": False for name in unfused},
        )
        spec = get_gpt_layer_local_spec()
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        made = (build_module(spec, config=config, layer_number=number + 1) for number in range(LAYERS))
        return Run(Layers(nn.ModuleList(made).bfloat16(), again), loss_of)

    return {"dropout": run(0.1), "dense": run(0.0), "again": run(0.0, random.checkpoint)}


def expert_runs(ranks: int) -> dict[str, Run]:
    """Megatron-Core's router and all-to-all dispatcher of 128 experts, 8 for each token, and an MLP in their
    place. Experts pass rows on, a permutation of TransformerEngine is one operator, messages take no time."""
    without_messages(ranks)
    for name in ("all_to_all_single", "all_gather_into_tensor", "all_reduce"):
        setattr(dist, name, no_message)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    event = SimpleNamespace(synchronize=bool)
    nothing = SimpleNamespace(wait_stream=bool, synchronize=bool, record_event=lambda: event)
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_: nothing  # type: ignore[misc, assignment]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment]
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    def moved(x: Any, as_numpy: bool = False, **_: Any) -> Any:
        return x.numpy() if as_numpy and torch.is_tensor(x) else x

    own = token_dispatcher.gather_from_sequence_parallel_region

    def gathered(x: Tensor, group: Any = None, **options: Any) -> Tensor:
        y: Tensor = own(x, group=group, **options)
        return y if x.is_floating_point() else x.repeat(dist.get_world_size(group))

    token_dispatcher.gather_from_sequence_parallel_region = gathered
    token_dispatcher.maybe_move_tensor_to_cpu = moved
    moe_utils.te_general_gemm = None
    moe_utils.HAVE_TE = True
    moe_utils.fused_permute = moe_utils.fused_sort_chunks_by_index = lambda x, *_: Permuted.apply(x.shape, x)
    moe_utils.fused_unpermute = lambda x, *_, restore_shape, **__: Permuted.apply(restore_shape, x)
    moe_utils.fused_sort_chunks_by_index_with_probs = lambda x, p, *_: Permuted.apply((len(x),), x, p)
    moe_utils.fused_permute_with_probs = lambda x, p, places, num_out_tokens: (
        *Permuted.apply((num_out_tokens,), x, p[:, 0]),
        places,
    )
    parallel = {"tensor_model_parallel_size": min(8, ranks), "expert_model_parallel_size": ranks}
    parallel_state.initialize_model_parallel(
        **parallel, expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )
    config = TransformerConfig(
        **parallel,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        num_moe_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=HIDDEN,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=1e-3,
        moe_router_load_balancing_type="aux_loss",
        moe_router_dtype="fp32",
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    plain = nn.Sequential(*(Block() for _ in range(LAYERS))).bfloat16()
    layers = nn.Sequential(*(Block() for _ in range(LAYERS))).bfloat16()
    for number, layer in enumerate(layers, start=1):
        layer.feed_forward = Routed(MoELayer(config, MoESubmodules(experts=PassedOn), number))
    config.moe_permute_fusion = True  # not earlier, because it puts indices on a card
    return {"plain": Run(plain, loss_of), "experts": Run(layers, loss_of)}


@click.command(help=__doc__)
@click.option("--ranks", default=16, help="Ranks over which experts are spread.")
@click.option("--repeats", default=60, help="Runs of each model.")
def main(ranks: int, repeats: int) -> None:
    torch.set_num_threads(1)
    price, runs = price_of(), expert_runs(ranks) | dense_runs(ranks)
    taken = np.array([[seconds(run) for run in runs.values()] for _ in range(5 + repeats)])[5:]
    took = dict(zip(runs, np.median(taken, axis=0) / LAYERS, strict=True))
    own = {name: np.array([price(each) for each in work(run)]) / LAYERS for name, run in runs.items()}
    host = took["plain"].sum() / own["plain"].sum()
    ratio = took["dropout"].sum() / own["dropout"].sum() / host
    print(f"this host is {host:.2f} times slower than the figures; R is {ratio:.2f}")
    per_call = price({"module_s": 1})

    def calls(seconds: Any, operators: Any) -> Any:
        return (seconds / host / ratio - operators) / per_call

    experts = calls(took["experts"] - took["plain"], own["experts"] - own["plain"])
    print(
        "calls of a module for each layer with experts: {:.0f} in forward, {:.0f} in backward".format(
            *experts
        )
    )
    again = calls(took["again"].sum() - took["dense"].sum(), own["dense"][0])
    print(f"for each layer's second run: {again:.0f}")


if __name__ == "__main__":
    main()
