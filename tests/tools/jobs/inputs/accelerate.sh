#!/bin/bash
accelerate launch --num_processes 8 --mixed_precision bf16 --use_deepspeed --zero_stage 3 \
    --seq_parallel_communication_data_type bf16 --use_parallelism_config true \
    --parallelism_config_sp_size 4 \
    sft.py --model_name_or_path Qwen/Qwen3-8B --max_length 65536 --packing true \
    --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --learning_rate 1e-5 \
    --gradient_checkpointing true --attn_implementation flash_attention_2 --bf16 true --output_dir out
