#!/bin/bash
nproc=$1
save=$2
shift 2
SP_SIZE=${SP_SIZE:-2}
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc -m verl.trainer.sft_trainer \
    data.train_files=$HOME/train.parquet \
    data.max_token_len_per_gpu=8192 \
    optim.lr=1e-4 engine=fsdp engine.ulysses_sequence_parallel_size=$SP_SIZE \
    model.path=Qwen/Qwen3-8B model.lora_rank=32 model.target_modules=all-linear \
    trainer.default_local_dir="$save" "$@"
