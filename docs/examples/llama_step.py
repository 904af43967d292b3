"""A small Llama on random weights reads a prompt and generates 32 tokens."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, vocab_size=8000,
)  # fmt: skip
model = LlamaForCausalLM(config).eval()
prompt = torch.randint(0, config.vocab_size, (1, 1024))
with torch.no_grad():
    tokens = model.generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=0)
print(f"{tokens.shape[1] - prompt.shape[1]} tokens")
