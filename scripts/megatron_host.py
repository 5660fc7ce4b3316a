"""What Megatron-Core's router and all-to-all dispatcher cost the host beside operators, in calls of a module.

    pip install --no-deps megatron-core==0.16.1
    python scripts/megatron_host.py --ranks 16

As program_host.py measures other programs: a model of 12 small layers runs with Megatron-Core's experts and
with an MLP, in turns, on one rank of a group whose messages take no time.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import click
import torch
import torch.distributed as dist
from program_host import HIDDEN, LAYERS, Block, Part, Run, loss_of, print_calls, without_messages
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


def parts_of(ranks: int) -> Iterator[Part]:
    """Megatron-Core's router and all-to-all dispatcher of 128 experts, 8 for each token, in place of an MLP.
    Experts pass rows on, a permutation of TransformerEngine is one operator, and messages take no time."""
    without_messages(ranks)
    for name in ("all_to_all_single", "all_gather_into_tensor", "all_reduce"):
        setattr(dist, name, lambda *_, **__: SimpleNamespace(wait=bool))
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
    yield Part(Run(plain, loss_of), Run(layers, loss_of), LAYERS, 0)


@click.command(help=__doc__)
@click.option("--ranks", default=16, help="Ranks over which experts are spread.")
def main(ranks: int) -> None:
    print_calls(parts_of(ranks))


if __name__ == "__main__":
    main()
