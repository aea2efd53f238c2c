"""Complete prompts with Transformers and Quire's attention: one padded batch, a static cache, and continuous batching.

python examples/transformers_generate.py [path/to/checkpoint]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import quire.integrations.transformers  # noqa: F401  (which registers "quire")
from quire.engine import shipped_model

PROMPTS = ["import os\n", "def read_lines(path):\n    with open(", "class Stack:\n    def __init__(self):\n"]

folder = sys.argv[1] if len(sys.argv) > 1 else shipped_model()
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="quire").to(device).eval()

inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True).to(device)
options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
for cache in ("dynamic", "static"):
    outputs = model.generate(**inputs, **options, cache_implementation=cache)
    print(f"--- {cache} cache", *tokenizer.batch_decode(outputs, skip_special_tokens=True), sep="\n")

print("--- continuous batching")
found = model.generate_batch(
    [tokenizer(prompt).input_ids for prompt in PROMPTS], generation_config=GenerationConfig(**options)
)
for key in sorted(found):
    print(tokenizer.decode(found[key].prompt_ids + found[key].generated_tokens))
