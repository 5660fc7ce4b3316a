"""Training steps of torchtitan 0.3.0: its own configurations, models, parallelize functions, losses, clipping
of gradients and optimizers. Tokenizer, data, logs and checkpoints are left out, and the inputs are random.
Each function without arguments is a step, for example of `spbench trace torchtitan_steps.py:llama3_8b`.

torch 2.13 has no annotations of spmd_types in fully_shard, so the steps take torchtitan's backend
partial_dtensor. They take scaled_dot_product_attention, as its jobs of 2025 do.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_16b as deepseek_job
from torchtitan.models.llama3.config_registry import llama3_8b as llama3_job
from torchtitan.tools import utils
from torchtitan.trainer import Trainer


def step_of(config, spec, loss, local_batch=None, **parallelism):
    """A callable that does one step of torchtitan's Trainer, as Trainer.__init__ and train_step do it.

    Args:
        config, spec: a job's configuration, and the model that replaces its model.
        loss: "chunked", torchtitan's default today, or "plain", of logits of the whole sequence.
    """
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec = spec
    config.parallelism = replace(config.parallelism, **{"spmd_backend": "partial_dtensor"} | parallelism)
    batch = local_batch or config.training.local_batch_size
    config.training = replace(config.training, disable_cuda_graphs=True, local_batch_size=batch)
    config.loss = config.loss if loss == "chunked" else config.loss.loss_fn
    config.compile = replace(config.compile, enable=False)
    training, model_config = config.training, spec.model
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dims.build_mesh()
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    model_config.update_from_config(config=config)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        model = model_config.build()
    trainer = object.__new__(Trainer)
    trainer.config, trainer.parallel_dims, trainer.model_config = config, dims, model_config
    trainer.device, trainer.ntokens_seen = utils.get_local_device(), 0
    trainer.loss_fn = config.loss.build(compile_config=config.compile)
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    model.to_empty(device=utils.device_type)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    trainer.model_parts = [model]
    if loss == "chunked":
        trainer.loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    optimizers = config.optimizer.build(model_parts=[model])
    if spec.post_optimizer_build_fn is not None:
        spec.post_optimizer_build_fn(optimizers, [model], dims)
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=training.steps)
    trainer.train_context = dist_utils.get_spmd_context(parallel_dims=dims)
    trainer.fwd_bwd_fn = trainer._forward_backward_body
    shape = batch, training.seq_len

    def step():
        optimizers.zero_grad()
        positions = torch.arange(shape[1]).expand(shape).to(trainer.device)
        tokens, labels = (torch.randint(model_config.vocab_size, shape).to(trainer.device) for _ in range(2))
        valid = (labels != -100).sum()
        if dims.dp_enabled:
            valid = dist_utils.dist_sum_tensor(valid, dims.get_mesh("batch"))
        inputs = {"input": tokens, "positions": positions}
        output = trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=valid)
        pp, parameters = dims.get_optional_mesh("pp"), list(model.parameters())
        clip = partial(dist_utils.clip_grad_norm_, foreach=True, pp_mesh=pp, ep_enabled=dims.ep_enabled)
        clip(parameters, training.max_norm)
        optimizers.step()
        schedulers.step()
        return output.detach()

    return step


def llama3_8b(loss="chunked", **parallelism):
    return step_of(llama3_job(), llama3.model_registry("8B", attn_backend="varlen"), loss, **parallelism)


llama3_8b_plain = partial(llama3_8b, "plain")
llama3_8b_plain_tp2 = partial(llama3_8b, "plain", tensor_parallel_degree=2)
llama3_8b_cp8 = partial(llama3_8b, context_parallel_degree=8, data_parallel_shard_degree=1)


def deepseek_16b():
    """DeepSeek-V3-16B with experts over 8 ranks. Each expert gets as many tokens as the others: torchtitan
    reads the numbers from the device, and fake tensors have none."""
    job, spec = deepseek_job(), deepseek_v3.model_registry("16B", attn_backend="varlen")
    batch, routed = 8, next(layer.moe.router.top_k for layer in spec.model.layers if layer.moe is not None)

    def even(_, local_counts, global_counts, ep_size):
        counts = torch.ops._c10d_functional.wait_tensor(global_counts).reshape(-1)
        each = [batch * job.training.seq_len * routed // ep_size] * ep_size
        return counts, each, each

    AllToAllTokenDispatcher._sync_token_count_exchange = even
    return step_of(job, spec, "plain", batch, expert_parallel_degree=8)
