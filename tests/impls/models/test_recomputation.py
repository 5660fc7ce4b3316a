"""Recomputation in backward: gradients, bytes sent, what runs again and what is held. It is of all but some
operators, ends at the last tensor that backward needs, or is as torch's reentrant checkpoint has it.
What torch.compile fuses: gradients, operators, and bytes kept beside a layer that it has compiled.

What torch compiles of layers in activation checkpoints, which prime_rl_dense.yaml rests on.

Checkpoints on the host: gradients are those of checkpoints on the device, also where copies are as late as
the waits of streams allow, and a wait that is left out is seen."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint

from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.simulator.program import Kind
from spbench.impls.collectives import reduce_from_group
from spbench.impls.kernels import copy_stream
from spbench.impls.kernels.dropout import DropoutRandom
from spbench.impls.kernels.projection import project
from spbench.impls.kernels.rms_norm import plain_rms_norm
from spbench.impls.kernels.rotary import rotated
from spbench.impls.models.blocks import experts, recomputation
from spbench.impls.models.blocks.host_checkpoints import HostCheckpoints
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.observed_work import noting_host_work
from spbench.impls.registries import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import default_dtype, initialize
from tests.cells import make_cell
from tests.impls.models.deferred_streams import Device
from tests.impls.models.test_fusions import kept_by_a_layer

GROUPED = "causal-transformer-tiny-gqa"
SEPARATE = {"separate_projections": True}
OPERATORS = SEPARATE | {"recompute": "operators"}
FULL = {"recompute": "full", "recompute_layers": 1}
EARLY = {"recompute": "full", "recompute_early_stop": True}


def gradients_of(
    preset: str, device: Device | None = None, *, passes: int = 1, **options: Any
) -> dict[str, Tensor]:
    """Gradients of a model, by parameter, after the forwards of some batches and then their backwards in the
    same order, as a pipeline stage has them."""
    model = model_preset(preset, options)
    with default_dtype(torch.float64):
        module = model.build(Strategy(seed=5), 16)
        initialize(module, 0, deviation=0.3)
        batches = [model.inputs(2, 16, torch.Generator().manual_seed(i)) for i in range(passes)]
        with device or nullcontext():
            losses = [module(batch)["loss"] for batch in batches]
            for loss in losses:
                loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


gradients = partial(gradients_of, "gpt3-tiny", dropout=0.2, attention_dropout=0.3)


#: options of a model, and recomputation
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *product(
        [{"library": "megatron-local", "attention": attention} for attention in ("flash", "unfused")],
        [{"recompute": "selective"}, {"recompute": "full"}, {"recompute": "full", "recompute_layers": 2}],
    ),
    *product([{"dropout": 0.0}, {"dropout": 0.2}], [EARLY, FULL | {"recompute_reentrant": True}]),
    *product([SEPARATE, SEPARATE | {"qkv_bias": True, "biases": False, "mlp": "swiglu"}], [OPERATORS]),
]


@pytest.mark.parametrize(("options", "recompute"), CASES)
def test_gradients_are_those_without_recomputation(
    options: dict[str, Any], recompute: dict[str, Any]
) -> None:
    plain, again = gradients(**options), gradients(**options | recompute)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-11, atol=1e-14)


def test_dropout_changes_gradients() -> None:
    """Else the test above could not fail."""
    dropped, whole = gradients(), gradients(dropout=0.0, attention_dropout=0.0)
    assert any(not torch.allclose(dropped[name], gradient) for name, gradient in whole.items())


def trace(**changes: Any) -> Trace:
    """A step of two layers."""
    fields = {"model_options": {"layers": 2}} | changes
    return tracing.trace(
        make_cell("causal-transformer-tiny", "single", {}, 1, 16, "fp32", **fields), events=True
    )


def kernels(of: Trace) -> Counter[str]:
    program = of.program
    return Counter(program.names[name] for name in program.name[program.kind == Kind.KERNEL])


# -- what runs again -----------------------------------------------------------------------------------------


def test_each_second_product_and_what_is_cheap_run_again() -> None:
    """3 of the 7 products of each of two layers."""
    plain = kernels(trace(model=GROUPED, model_options=SEPARATE))
    again = kernels(trace(model=GROUPED, model_options=OPERATORS)) - plain
    assert again["mm"] == 2 * 3
    assert again["flash_attention"] == 0
    assert again["silu"] == 2


@pytest.mark.parametrize(("layers", "every", "recomputed"), [(4, 2, 2), (3, 2, 1), (4, 3, 1)])
def test_one_layer_of_each_interval_runs_again(layers: int, every: int, recomputed: int) -> None:
    full = {"recompute": "full", "recompute_method": "interval", "recompute_layers": every}
    plain = kernels(trace(model_options={"layers": layers}))
    again = kernels(trace(model_options=full | {"layers": layers})) - plain
    assert again == Counter({name: n for name, n in again.items() if n % recomputed == 0})
    assert again["flash_attention"] == recomputed


def test_the_second_run_keeps_the_products_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.12 asks the policy in both runs, later ones in the first; an odd number must not shift it."""
    asked: list[Any] = []
    monkeypatch.setattr(
        recomputation,
        "create_selective_checkpoint_contexts",
        lambda policy: (asked.append(policy), (nullcontext(), nullcontext()))[1],
    )
    first, again = recomputation._keeping()
    (policy,) = asked
    kept = {}
    for context, run in ((first, False), (again, True)):
        with context:
            of_run = SelectiveCheckpointContext(is_recompute=run)
            kept[run] = [policy(of_run, torch.ops.aten.mm.default) for _ in range(7)]
    assert kept[False] == kept[True]
    assert kept[True].count(CheckpointPolicy.MUST_SAVE) == 4


def gradient_of_summed_product(mesh: DeviceMesh, keep: bool) -> list[float]:
    """The gradient of a weight, in a block whose backward needs its first product summed over the ranks."""
    group = mesh.get_group("tp")
    weight = torch.ones(2, 2, dtype=torch.float64).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return reduce_from_group(x @ weight, group) ** 2

    x = torch.full((1, 2), 1.0 + mesh.get_local_rank("tp"), dtype=torch.float64)
    y = recomputed(block, DropoutRandom(0), x, keep=True) if keep else block(x)
    y.sum().backward()
    return weight.grad.flatten().tolist()


def test_a_kept_product_is_summed_over_ranks_once(pool: RankPool) -> None:
    """In place, it would be summed again when the block runs again, which torch does not allow."""
    assert pool.run({"tp": 2}, gradient_of_summed_product, False) == [[12.0] * 4, [24.0] * 4]
    assert pool.run({"tp": 2}, gradient_of_summed_product, True) == [[12.0] * 4, [24.0] * 4]


@pytest.mark.parametrize(("layers_a_run", "runs"), [(1, 2), (2, 1)])
def test_the_last_product_of_a_run_and_what_follows_do_not_run_again(layers_a_run: int, runs: int) -> None:
    """The product that closes the MLP, and the sum with the hidden state."""
    full = {"layers": 2, "recompute": "full", "recompute_layers": layers_a_run}
    whole = kernels(trace(model_options=full))
    stopped = kernels(trace(model_options=full | {"recompute_early_stop": True}))
    assert whole - stopped == Counter({"mm": runs, "add": runs})
    assert not stopped - whole


# -- what is held, as by torch's reentrant checkpoint -------------------------------------------------------


def peak_bytes(**options: Any) -> int:
    """The peak of a step on one device, which is in backward."""
    options = {"layers": 4, "loss_tile": 16, **FULL, **options}
    peak = trace(batch=2, seq_len=128, model_options=options).memory.peak()
    assert peak.phase == "backward"
    return peak.nbytes


def by_torch(run: Callable[..., Any], *inputs: Any, **_: Any) -> Any:
    return checkpoint(run, *inputs, use_reentrant=True, preserve_rng_state=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"mlp_tile": 8, "attention": "flash_attention_2", "kv_heads": 1}],
    ids=["mlp", "attention"],
)
def test_the_peak_is_that_of_the_reentrant_checkpoint(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without, held = peak_bytes(**options), peak_bytes(**options, recompute_reentrant=True)
    assert held > without
    monkeypatch.setattr(recomputation, "checkpoint", by_torch)
    assert held == peak_bytes(**options)


# -- what is refused -----------------------------------------------------------------------------------------


MODEL, ALL = "causal-transformer-tiny", ["swiglu", "rope"]
L, H, HEADS, INNER = 128, 64, 4, 128


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def step(**options: Any) -> tuple[dict[str, Tensor], Counter[str]]:
    """The gradients of a step by name, and how often it calls each operator."""
    model = model_preset(MODEL, options)
    module = model.build(Strategy(), 6).double()
    initialize(module, 0, deviation=0.3)
    inputs = model.inputs(2, 6, torch.Generator().manual_seed(0))
    with _Counted() as counted:
        module(inputs | {"loss_weights": inputs["loss_weights"].double()})["loss"].backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}, counted.counts


@pytest.mark.parametrize("separate", [True, False])
def test_fused_kernels_have_the_same_gradients_in_fewer_calls(separate: bool) -> None:
    apart, calls = step(separate_projections=separate)
    together, fewer = step(separate_projections=separate, fusions=ALL)
    for name, gradient in apart.items():
        torch.testing.assert_close(together[name], gradient)
    assert not fewer["silu"]
    assert fewer.total() < calls.total()


def _layer(x: Tensor, weights: list[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """A layer of Llama in torch's operators."""
    norm, of_q, of_k, of_v, out, mlp_norm, gate, up, down = weights
    n = plain_rms_norm(x, norm)
    q, k, v = (F.linear(n, w).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (of_q, of_k, of_v))
    o = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
    y = x + F.linear(o.transpose(1, 2).flatten(2), out)
    m = plain_rms_norm(y, mlp_norm)
    return y + F.linear(F.silu(F.linear(m, gate)) * F.linear(m, up), down)


def _kept_when_compiled(backend: str) -> int:
    """Bytes that the layer's forward keeps of what it is given and makes, but for weights and angles."""
    shapes = [(H,), *[(H, H)] * 4, (H,), (INNER, H), (INNER, H), (H, INNER)]
    weights = [torch.rand(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    cos, sin = (torch.rand(L, H // HEADS // 2, dtype=torch.bfloat16) for _ in range(2))
    x = torch.rand(1, L, H, dtype=torch.bfloat16, requires_grad=True)
    shared = {w.untyped_storage().data_ptr() for w in (*weights, cos, sin)}
    kept: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in shared:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = torch.compile(_layer, backend=backend)(x, weights, cos, sin)
    del y
    return sum(kept.values())


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("backend", ["inductor", "aot_eager_decomp_partition"])
def test_a_layer_keeps_what_a_compiled_one_does(backend: str) -> None:
    cell = {"model": "causal-transformer-1b", "strategy": "single", "batch": 1, "seq_len": L}
    sizes = {"hidden": H, "heads": HEADS, "inner": INNER, "separate_projections": True}
    ours = kept_by_a_layer(**cell, model_options={**sizes, "fusions": ALL})
    apart = kept_by_a_layer(**cell, model_options={**sizes, "rms_norm": "plain"})
    # attention of a CPU returns heads before positions, so that their features side by side are a copy
    copy = 2 * L * H
    assert ours == _kept_when_compiled(backend) - copy
    assert ours < apart


class Layer(nn.Module):
    def __init__(self, branches: bool):
        super().__init__()
        self.linear, self.branches = nn.Linear(8, 8), branches

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.linear(x)
        if self.branches and positions.diff().sum() == 0:
            y = y + 1
        return x + torch.sin(y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointed", "branches", "compiled"),
    [(False, False, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_a_checkpointed_layer_with_a_branch_on_a_tensor_is_not_compiled(
    checkpointed: bool, branches: bool, compiled: bool
) -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    layer: nn.Module = Layer(branches)
    if checkpointed:
        layer = checkpoint_wrapper(layer, preserve_rng_state=False)
    layer.compile(backend=backend)
    layer(torch.randn(4, 8, requires_grad=True), torch.arange(4)).sum().backward()
    assert bool(graphs) == compiled


LAYERS = 4
ON_HOST = {"recompute": "full", "checkpoints": "host"}
gradients_of_gpt = partial(gradients_of, "gpt3-tiny", layers=LAYERS, dropout=0.2)


def wrong(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name, gradient in theirs.items() if not torch.equal(ours[name], gradient)]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"recompute_layers": 3}, {"recompute_method": "block", "recompute_layers": 2},
     {"recompute_method": "interval", "recompute_layers": 2}, {"recompute_early_stop": True}],
)  # fmt: skip
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_those_of_checkpoints_on_the_device(
    options: dict[str, Any], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients_of_gpt(passes=passes, recompute="full", **options)
    assert wrong(gradients_of_gpt(passes=passes, **ON_HOST, **options), expected) == []
    late = Device(monkeypatch)
    assert wrong(gradients_of_gpt(late, passes=passes, **ON_HOST, **options), expected) == []
    assert late.faults == []
    assert late.copied > 0


def test_each_input_goes_once_and_all_but_the_last_come_back() -> None:
    """The last is still there when backward follows; of micro-batches that wait longer all come back."""
    assert copies() == {"to_host_": LAYERS, "to_device_": LAYERS - 1}
    # the first of two stages is one forward ahead: of three backwards two do not follow on their own forward
    ahead = copies(sizes={"pp": 2}, training={"micro_batches": 3})
    assert ahead == {"to_host_": 3 * LAYERS // 2, "to_device_": 3 * LAYERS // 2 - 1}


def copies(**changes: Any) -> Counter[str]:
    fields = {"model_options": {"layers": LAYERS, **ON_HOST}} | changes
    asked = make_cell("gpt3-tiny", "single", {}, 3, 16, "fp32", **fields)
    of = kernels(tracing.trace(asked, events=True))
    return Counter({name: of[name] for name in ("to_host_", "to_device_")})


def deaf(stream: str) -> Callable[[Device, pytest.MonkeyPatch], None]:
    def plant(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        device.deaf.add(stream)

    return plant


def without_waits_in(method: str) -> Callable[[Device, pytest.MonkeyPatch], None]:
    """A tensor is freed while it is copied (``_keep``), or used before it is there (``_back``)."""

    def plant(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        waiting = getattr(HostCheckpoints, method)

        def without(self: HostCheckpoints, x: Any) -> Any:
            device.deaf.add("compute")
            try:
                return waiting(self, x)
            finally:
                device.deaf.discard("compute")

        monkeypatch.setattr(HostCheckpoints, method, without)

    return plant


def one_buffer(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All inputs are copied to the same memory of the host."""
    make, made = copy_stream.host_empty_like, []

    def once(x: Tensor) -> Tensor:
        made.append(make(x)) if not made else None
        return made[0]

    monkeypatch.setattr(copy_stream, "host_empty_like", once)


@pytest.mark.parametrize(
    "plant",
    [deaf("compute"), deaf("copies"), without_waits_in("_keep"), without_waits_in("_back"), one_buffer],
)
def test_a_wait_that_is_left_out_is_seen(
    plant: Callable[[Device, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients_of_gpt(recompute="full")
    device = Device(monkeypatch)
    plant(device, monkeypatch)
    found = gradients_of_gpt(device, **ON_HOST)
    assert device.faults or wrong(found, expected)


@pytest.mark.parametrize("where", ["save_on_cpu", "pageable"])
def test_checkpoints_that_are_waited_for_have_the_same_gradients(where: str) -> None:
    waited = gradients_of_gpt(passes=2, **{**ON_HOST, "checkpoints": where})
    assert not wrong(waited, gradients_of_gpt(passes=2, recompute="full"))


@pytest.mark.parametrize("where", ["host", "save_on_cpu", "pageable"])
def test_nothing_is_held_after_backward(where: str) -> None:
    """On the host, though the module lives on."""
    options = {"layers": LAYERS, **ON_HOST, "checkpoints": where}
    log = tracing.trace(
        make_cell("gpt3-tiny", "single", {}, 2, 16, "fp32", model_options=options)
    ).host_memory
    assert len(log.sizes) == LAYERS
    assert sorted(map(abs, log.events)) == sorted([*range(1, LAYERS + 1)] * 2)
    assert len(log.tags) == (LAYERS if where == "pageable" else 0)


def test_checkpointing_is_full_recomputation_too() -> None:
    model_preset("causal-transformer-tiny", {"checkpointing": True, "checkpoints": "host"})


class Products(TorchDispatchMode):
    """Counts matmuls."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket is torch.ops.aten.mm
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("own", "early_stop", "products"), [(0, True, 3), (1, True, 4), (0, False, 4)])
def test_a_programs_function_runs_its_last_matmul_again(own: bool, early_stop: bool, products: int) -> None:
    """As DeepSpeed's does, since it keeps its operands only after the matmul; and what the hooks for kept
    tensors cost the host is told once for each run."""
    weight, noted = nn.Parameter(torch.randn(3, 2)), list[int]()
    weight.spbench_own_function = own  # type: ignore[attr-defined]
    x = torch.randn(4, 2, requires_grad=True)
    with Products() as counted, noting_host_work(lambda calls, checks: noted.append(calls)):
        how = {"early_stop": early_stop, "calls": recomputation.TORCH_CALLS}
        recomputed(lambda x: project(x, weight), DropoutRandom(0), x, **how).sum().backward()
    assert counted.number == products
    assert noted == [*recomputation.TORCH_CALLS]
    torch.testing.assert_close(weight.grad, x.sum(0).expand(3, 2))


@pytest.mark.parametrize(
    ("library", "calls"),
    [("torch", {0}), ("megatron-local", {0, experts.ROUTED_CALLS, recomputation.MEGATRON_CALLS[1]})],
)
def test_megatrons_python_of_experts_and_of_second_runs_is_told(library: str, calls: set[int]) -> None:
    noted = list[int]()
    with noting_host_work(lambda calls, checks: noted.append(calls)):
        gradients_of("moe-tiny", library=library, recompute="full")
    assert set(noted) == calls
