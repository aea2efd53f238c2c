"""Test which architectures of causal language models in Transformers run, with tiny random configurations.

    python tools/architectures.py --out docs/models.md          # all of them, about 15 minutes on two cores
    python tools/architectures.py --only llama phimoe           # some, printed

A model of each architecture generates greedy tokens twice: by Transformers' `generate`, prompt by prompt, and by `LLM`,
in shared batches and chunks, with cached prefixes. "Runs" means that the tokens are equal. A process tests a few of the
architectures, so that none can end the run by a crash, a hang or its use of memory.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

# The limits of an architecture.
SECONDS, GIBIBYTES = 240, 8
PARAMETERS = 20_000_000
# Logits that differ by less than TIE may swap with the order of float32 sums.
TIE = 1e-4
VOCAB, LAYERS = 96, 4
KINDS = ("sliding_attention", "full_attention")
SIZES = {  # by a pattern for the end of an attribute's name; the first match counts
    r"(vocab_size\w*|group_vocab)": VOCAB,
    r"(hidden_size|d_model|n_embd|emb(ed(ding)?)?_dim|embedding_size|word_embed_proj_dim|model_dim|dim_model)": 64,
    r"(intermediate_size\w*|ffn_dim|d_ff|dim_ff|n_inner|ffn_hidden_size|d_inner|ff_dim)": 96,
    r"(key_value_heads|kv_heads|n_head_kv)": 2,
    r"(attention_heads|num_heads|n_heads?|linear_num_\w+_heads)": 4,
    r"(head_dim|kv_channels|d_kv)": 16,
    r"(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|max_target_positions|seq_length)": 128,
    r"(sliding_window\w*|window_size|attention_chunk_size|attn_window|attention_window)": 8,
    r"(q_lora_rank|kv_lora_rank|o_lora_rank)": 16,
    r"(experts_per_tok|experts_per_token|top_k|topk|moe_topk|moe_k)": 2,
    r"(n_group|topk_group|num_expert_group|n_groups)": 1,
    r"(experts|num_local_experts|n_routed_experts)": 4,
    r"(max_window_layers|num_kv_shared_layers)": 2,
    r"(rotary_dim|index_topk)": 8,
    r"(first_k_dense_replace|num_dense_layers|n_dense_layers)": 1,
    r"(hidden_layers|num_layers|n_layers?|decoder_layers|encoder_layers|depth)": LAYERS,
}
DEFAULTS = {  # for attributes that are None or False
    "is_decoder": True,
    "use_sliding_window": True,
    "sliding_window": 8,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
OVERRIDES: dict[str, dict[str, Any]] = {  # further attributes that a tiny configuration needs
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "cohere_compass_text": {"rope_parameters": {k: {"rope_type": "default", "rope_theta": 1e4} for k in KINDS}},
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 1e4}},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_assistant": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"layers_block_type": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 16},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32, "head_dim": 16},
    "mamba2": {"num_heads": 8},
    "xlm": {"n_words": VOCAB},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"hybrid_layer_ids": [1, 3], "layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


PAGE = """# Models

`tools/architectures.py` made this page on {date}, with Transformers {version}: of the {total} architectures that it has
a causal language model for, {runs} run, {refused} are refused, {untried} could not be tried, and {wrong} are wrong.

Each had a tiny configuration, random weights, float32 and a CPU, with windows shorter than the prompts and all kinds of
layers that the default configuration has.

- *runs*: greedy tokens were those of `generate` in Transformers, packed with other requests, in chunks, after prefixes
  found in the cache, and decoded.
- *refused*: `LLM` raises a ValueError with this reason before it serves anything.
- *not tried*: such a configuration could not be made, or `generate` itself failed with it, for the reason in the table.
- *wrong*: tokens were others, or it failed without a refusal. That is a defect.

A checkpoint may ask for more than its architecture's defaults do, and is checked when it is loaded, whatever stands
here: `LLM` compares the logits of a few tokens, in shared steps and in chunks, with those of its own attention in
Transformers. A layer that attends more than once is refused, and so are a window that does not reach the attention
function, and arguments that the function does not know. A position encoding that changes with the longest request of a
step (longrope, as in Phi-3 of 128k tokens) runs with `LLM(..., max_model_len=...)`, up to the length at which it
changes.

## How they are made fast

The modelling code is that of Transformers; three things happen around it when `LLM` loads a checkpoint.

- *Merged projections*: in a forward pass of one token, linear layers of one module that are called with the very same
  tensor are found, whatever their names: q, k and v, gate and up, the two low-rank projections of DeepSeek. Their
  weights become rows of one weight, without a second copy, and the first layer computes the product of all. A layer
  that is called with another tensor computes its own product. Code that cannot use the columns runs as it was.
- *Compiled layers*: on a GPU (`LLM(compile="auto")`; `True` and `False` decide for any device), torch.compile compiles
  the decoder layers, so that norms, rotary embedding, activations and residual additions are fused. Attention is one
  operation to it, `torch.ops.quire.attend_layer`. Layers of one class share compiled code, which is made for one token,
  for the few tokens whose products have a kernel of their own, and for any other number, and again for steps with
  adapters. Compilation takes its time once; torch keeps what it compiled on disk, in `TORCHINDUCTOR_CACHE_DIR`, which
  by default is under /tmp. What cannot be compiled runs as Transformers has it, and a RuntimeWarning says why.
- *Weights straight to the device*: weights are pages of the mapped files, in the checkpoint's dtype, until several
  threads copy them to the device, so that no second copy is in host memory.

The logits that are compared at load are computed through all of this, those that they are compared with through none.
`LLM(folder, load_format="dummy")` makes random weights for a folder with nothing but a config.json.

## Architectures

| class | model_type | | why |
|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="the page to write; without it, results are printed")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types, as in config.json")
    parser.add_argument("--keep", type=Path, help="a file of results: those in it are not computed again")
    parser.add_argument("--work", nargs="+", metavar="TYPE", help=argparse.SUPPRESS)  # for subprocesses
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return 0
    known = (
        {r["type"]: r for r in map(json.loads, args.keep.read_text().splitlines())}
        if args.keep and args.keep.exists()
        else {}
    )
    names = args.only or list(architectures())
    for result in supervise([name for name in names if name not in known]):
        known[result["type"]] = result
        print(f"{result['type']}: {result['what']} {result['why']}", flush=True)
        if args.keep:
            args.keep.write_text("".join(json.dumps(r) + "\n" for r in known.values()))
    if args.out:
        args.out.write_text(page([known[name] for name in names]))
    return 1 if any(r["what"] == "wrong" for r in known.values()) else 0


def architectures() -> dict[str, str]:
    """The class of each model type."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    # The type of a model that sees images is loaded with the class that does.
    return {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


def supervise(names: list[str]) -> Iterator[dict[str, str]]:
    """Results of subprocesses with up to 12 names each. If one ends early, the name that it was testing has failed."""
    while names:
        done = subprocess.run([sys.executable, __file__, "--work", *names[:12]], capture_output=True, text=True)
        results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(results) < len(names[:12]):
            why = f"its process ended with {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2]}"
            if done.returncode == -signal.SIGALRM:
                why = f"it took more than {SECONDS} s"
            results.append({"type": names[len(results)], "what": "wrong", "why": why})
        yield from results
        names = names[len(results) :]


def work(names: list[str]) -> None:
    """Test architectures, and print their results. The alarm ends the process."""
    import torch
    from transformers.utils import logging

    resource.setrlimit(resource.RLIMIT_DATA, (GIBIBYTES << 30, GIBIBYTES << 30))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name in names:
        signal.alarm(SECONDS)
        torch.manual_seed(sum(name.encode()))
        with tempfile.TemporaryDirectory() as folder:
            what, why = attempt(name, Path(folder) / "windows")
            if what in ("refused", "untried") and attempt(name, Path(folder) / "full", windows=False)[0] == "runs":
                what, why = "runs", f"not with sliding windows: {why}"
        why = re.sub(r"\bit( can't be run:|:| has) ", "", " ".join(why.replace(f"{folder}/windows", "it").split()))
        print(json.dumps({"type": name, "what": what, "why": why[:300]}), flush=True)


def attempt(name: str, folder: Path, windows: bool = True) -> tuple[str, str]:
    """An architecture's result and its reason; `windows` adds sliding windows to configurations without them."""
    import torch
    from transformers import AutoConfig

    from quire.engine import LLM
    from quire.engine.multimodal import auto_class

    prompts = make_prompts()
    try:
        save(name, folder, windows)
        network = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32)
        expected = [own_tokens(network, prompt) for prompt in prompts]
    except Exception as error:
        return "untried", f"{type(error).__name__}: {error}"
    try:
        for page_size, most in ((4, 7), (16, 2048)):
            with LLM(folder, device="cpu", num_pages=256, page_size=page_size, max_batched_tokens=most) as llm:
                for _ in range(2):  # prompts are in the prefix cache the second time
                    check(network, llm, prompts, expected)
    except AssertionError as error:
        return "wrong", str(error)
    except ValueError as error:
        return "refused", str(error)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    return "runs", ""


def make_prompts() -> list[list[int]]:
    """Short prompts, some of them longer than windows, and some with a common prefix."""
    import torch

    # Special tokens have the lowest ids.
    start = torch.randint(20, VOCAB, (24,)).tolist()
    return [
        [*start[:n], *torch.randint(20, VOCAB, (m,)).tolist()] for n, m in ((24, 13), (0, 1), (24, 2), (13, 9), (0, 3))
    ]


def own_tokens(network: Any, prompt: list[int], count: int = 12) -> list[int]:
    """The tokens that Transformers' `generate` appends to one prompt."""
    import torch

    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out: list[int] = network.generate(torch.tensor([prompt]), **options)[0].tolist()
    assert len(out) == len(prompt) + count, "generate makes no tokens after a prompt"
    return out[len(prompt) :]


def check(network: Any, llm: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Compare the tokens of all prompts. At the first difference, both tokens must have nearly equal logits."""
    import torch

    from quire.engine import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=len(expected[0]), ignore_eos=True)
    for prompt, own, done in zip(prompts, expected, llm.generate(prompts, params), strict=True):
        assert done.finish_reason == "length", f"a request ends by {done.finish_reason}: {done.error}"
        at = next((i for i, (a, b) in enumerate(zip(done.token_ids, own, strict=True)) if a != b), None)
        if at is not None:
            with torch.inference_mode():
                logits = network(torch.tensor([prompt + own[:at]])).logits[0, -1]
            gap = float(logits[own[at]] - logits[done.token_ids[at]])
            assert gap < TIE, f"token {at} of a prompt of {len(prompt)} is another, {gap:.2g} less likely"


def save(name: str, folder: Path, windows: bool = True) -> None:
    """Save a checkpoint with weights so large that the next token depends on all visible tokens."""
    import torch
    from transformers import CONFIG_MAPPING

    from quire.engine.multimodal import auto_class

    kind = CONFIG_MAPPING[name]
    config = kind(**{**shrunk(kind().to_dict(), windows), **OVERRIDES.get(name, {})})
    with torch.device("meta"):
        size = auto_class(config).from_config(config).num_parameters()
    if size > PARAMETERS:
        raise ValueError(f"it has {size / 1e6:.0f} million parameters")
    model = auto_class(config).from_config(config, dtype=torch.float32)
    for key, weight in model.named_parameters():
        if weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=0.2)
        elif "sink" in key:
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder)


def shrunk(config: dict[str, Any], windows: bool) -> dict[str, Any]:
    """The attributes of a configuration that change in its tiny version."""
    small: dict[str, Any] = {}
    layers = next((v for k, v in config.items() if re.search(r"(num_hidden_layers|n_layers?|num_layers)$", k)), None)
    for key, value in config.items():
        if key == "layer_types" and value:
            both = windows and "sliding_window" in config and set(value) <= set(KINDS)
            kinds = KINDS if both else sorted(set(value), key=value.index)
            small[key] = [kinds[i % len(kinds)] for i in range(LAYERS)]
        elif key.endswith("token_id") and isinstance(value, (int, list)):
            small[key] = 1
        elif isinstance(value, dict) and key.endswith("config"):
            small[key] = shrunk(value, windows) | {k: v for k, v in value.items() if k == "model_type"}
        elif isinstance(value, dict) and "mrope_section" in value:
            small[key] = {**value, "mrope_section": [2, 3, 3]}
        elif isinstance(value, list) and len(value) == layers:
            small[key] = value[:LAYERS]
        elif key in DEFAULTS and value in (None, False) and (windows or "window" not in key):
            small[key] = DEFAULTS[key]
        elif isinstance(value, int) and not isinstance(value, bool):
            new = next((new for end, new in SIZES.items() if re.search(rf"(^|_){end}$", key)), value)
            small[key] = new if new == LAYERS else min(new, value)
    heads, kv_heads = "num_attention_heads", "num_key_value_heads"
    if config.get(heads) == config.get(kv_heads) and kv_heads in small:
        small[kv_heads] = small[heads]
    return small


def page(results: list[dict[str, str]]) -> str:
    """The text of docs/models.md."""
    import transformers

    classes, counts = architectures(), Counter(r["what"] for r in results)
    words = {"runs": "runs", "refused": "refused", "untried": "not tried", "wrong": "**wrong**"}
    rows = [
        f"| {classes[r['type']]} | {r['type']} | {words[r['what']]} | {r['why'].replace('|', '/')[:160]} |"
        for r in results
    ]
    text = PAGE.format(
        version=transformers.__version__, date=date.today(), total=len(results), **{k: counts[k] for k in words}
    )
    return text + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
