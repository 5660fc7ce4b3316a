"""What a layer of experts holds on a card, beside a measured layer and what switches save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from spbench.bench.measure.engines.tracing import fake_mesh, no_cyclic_collection
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measure.trace.torch_internals import FakeTensorMode
from spbench.impls.kernels.grouped_matmul import GROUPED_STREAMS, GROUPED_WORKSPACES
from spbench.impls.kernels.projection import TRANSFORMER_ENGINE, mark_library
from spbench.impls.models.blocks.experts import MixtureModule
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import model_preset
from spbench.impls.place import Place
from spbench.impls.strategies.nesting import nesting
from spbench.impls.training.step import default_dtype

#: tests/functional_tests/test_cases/common/moe_perf of NVIDIA/Megatron-LM, cases deepseek_*_tp1ep8_bf16: its
#: configuration has no gate and no shared experts, and one step's output and gradient live on into the next
LAYER: Mapping[str, Any] = {
    "hidden": 7168,
    "inner": 2048,
    "expert_inner": None,
    "heads": 8,
    "kv_heads": None,
    "mlp": "erf_gelu",
    "experts": 32,
    "experts_per_token": 8,
    "router": "sigmoid",
    "router_groups": 8,
    "router_group_topk": 4,
    "router_bias": True,
    "library": TRANSFORMER_ENGINE,
    "permutation": "fused",
}
WORKSPACE = 2**25 + 2**10
WORKSPACES = {
    "cublas": 2**25,
    "transformer_engine": WORKSPACE,
    GROUPED_WORKSPACES: GROUPED_STREAMS * WORKSPACE,
}


def peak_of_layer(options: Mapping[str, Any]) -> int:
    """Bytes at the peak of the second of two steps of one layer on 8 ranks, 4096 tokens each."""
    model, sizes = model_preset("moe-tiny", {**LAYER, **options}), {"dp": 8, "ep": 8}
    assert isinstance(model, CausalTransformerModel)
    with fake_mesh(sizes, 0) as mesh, no_cyclic_collection(), default_dtype(torch.bfloat16):
        recorder = Recorder(mesh)
        with FakeTensorMode(), recorder:
            layer = MixtureModule(model, nesting("single").configured(Place.on(mesh, sizes)))
            mark_library(layer, model.library)
            x = torch.empty(1, 4096, 7168, requires_grad=True)
            torch.mm(*(torch.empty(16, 16, dtype=torch.float32) for _ in range(2)))
            for last in (False, True):
                x.grad = None
                layer.zero_grad(set_to_none=True)
                with recorder.step(last=last):
                    y = layer(x)
                    d_y = torch.empty_like(y)
                    y.backward(d_y)
        log = recorder.memory.log.with_workspaces(WORKSPACES)
    events, sizes_of = np.array(log.events), np.array(log.sizes)
    levels = np.cumsum(np.sign(events) * sizes_of[np.abs(events) - 1])
    return int(levels[log.ends[0] : log.ends[1]].max())


@pytest.mark.parametrize(
    ("dispatcher", "measured", "within"),
    # routing was random there, so a rank's rows are some per mille off the mean
    [
        ("all_to_all", 3442750464, 0.005),
        ("node_deduplicated", 2445288448, 0.01),
        ("hybrid_ep", 2424369664, 0.01),
    ],
)
def test_peak_of_a_layer_on_h100(dispatcher: str, measured: int, within: float) -> None:
    assert peak_of_layer({"dispatcher": dispatcher}) == pytest.approx(measured, rel=within)


def test_activations_that_are_made_again_are_not_kept() -> None:
    again = {"recompute": "selective", "recompute_modules": ("moe_act",)}
    # the result of gelu, and its product with weights: [32768, 2048] each, in bf16
    assert peak_of_layer({}) - peak_of_layer(again) == pytest.approx(2 * 2**15 * 2048 * 2, rel=0.01)


def saved_by_layer(options: Mapping[str, Any], sizes: Mapping[str, int], strategy: str) -> int:
    """Bytes that a layer's forward of 64 positions of a tiny model keeps for backward."""
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return x

    model = model_preset("moe-tiny", options)
    assert isinstance(model, CausalTransformerModel)
    with fake_mesh(sizes, 0) as mesh, FakeTensorMode(), default_dtype(torch.bfloat16):
        layer = MixtureModule(model, nesting(strategy).configured(Place.on(mesh, sizes)))
        mark_library(layer, model.library)
        x = torch.empty(1, 64 // sizes.get("tp", 1), model.hidden, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            layer(x)
    return sum(kept.values())


# by experts, features [24] and their weights are kept in bf16, or rows [48]
@pytest.mark.parametrize(("weighted", "features"), [("output", 24), ("input", 48)])
def test_rows_that_tokens_weigh_are_kept_in_float32(weighted: str, features: int) -> None:
    sizes, weighing = {"dp": 2, "ep": 2}, {"expert_weighting": weighted}
    by_experts, by_tokens = (
        saved_by_layer(weighing | {"expert_weighting_at": at}, sizes, "single")
        for at in ("experts", "tokens")
    )
    assert by_tokens - by_experts == 64 * 3 * ((48 + 1) * 4 - (features + 1) * 2)


@pytest.mark.parametrize("fp8", ["none", "tensorwise"])
def test_input_of_shared_experts_is_gathered_once_beside_the_dispatch(fp8: str) -> None:
    options = {"shared_inner": 64, "fp8": fp8, "library": TRANSFORMER_ENGINE}
    in_turn, beside = (
        saved_by_layer(options | {"shared_overlap": overlap}, {"tp": 2}, "megatron_sp")
        for overlap in (False, True)
    )
    assert beside - in_turn == (64 * 48 * 2 if fp8 == "none" else 0)


@pytest.mark.parametrize("library", ["torch", TRANSFORMER_ENGINE])
def test_megatron_gathers_tokens_into_a_buffer_that_stays(library: str) -> None:
    model, sizes = (
        model_preset("moe-tiny", {"dispatcher": "all_gather", "library": library}),
        {"dp": 2, "ep": 2},
    )
    assert isinstance(model, CausalTransformerModel)
    with fake_mesh(sizes, 0) as mesh, FakeTensorMode():
        strategy = nesting("single").configured(Place.on(mesh, sizes))
        layer = MixtureModule(model, strategy)
        for length in (16, 8):
            layer(torch.empty(1, length, model.hidden))
        held = strategy.buffer.take((1,), torch.empty(1)).untyped_storage().nbytes()
    # of both ranks, the longer of the two; nothing before where memory is made for them
    assert held == (4 if library == "torch" else 2 * 16 * model.hidden * 4)
