from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

LENGTH = 16384
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")
arguments = SFTConfig(output_dir="out", per_device_train_batch_size=1, max_length=LENGTH, packing=True)
SFTTrainer(model=model, args=arguments).train()
