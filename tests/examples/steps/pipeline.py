"""A training step of a pipeline, a stage on each rank, by `torch.distributed.pipelining`; torch only."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

LAYERS, WIDTH, BATCH, MICRO_BATCHES = 4, 64, 8, 4


class Stage(nn.Module):
    """The layers of a stage, with their names in the whole model."""

    def __init__(self, stage: int, stages: int):
        super().__init__()
        mine = range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages)
        self.layers = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH) for i in mine})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def train():
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)  # the same on all stages
    stage, stages = dist.get_rank(), dist.get_world_size()
    model = Stage(stage, stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # without these examples stages ask each other for shapes
    part = torch.empty(BATCH // MICRO_BATCHES, WIDTH, device="meta", requires_grad=True)
    whole = PipelineStage(model, stage, stages, torch.device("cpu"), input_args=(part,), output_args=(part,))
    schedule = Schedule1F1B(whole, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        is_last = stage == stages - 1
        schedule.step(
            *([x] if stage == 0 else []), target=y if is_last else None, losses=losses if is_last else None
        )
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if is_last else None

    return step


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train()())
    dist.destroy_process_group()
