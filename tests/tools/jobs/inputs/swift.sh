NPROC_PER_NODE=8 \
swift sft \
    --model Qwen/Qwen3-8B \
    --tuner_type full \
    --dataset 'texts' \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 2 \
    --learning_rate 1e-5 \
    --rope_scaling yarn \
    --max_length 65536 \
    --use_liger_kernel true \
    --deepspeed zero3_offload \
    --attn_impl flash_attn \
    --sequence_parallel_size 8
