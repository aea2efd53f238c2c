"""mini-sglang, unchanged, over `quire.compat` in FlashInfer's place on a GPU, and beside it over FlashInfer itself.

    PYTHONPATH=src python tools/mini_sglang.py --path <folders of mini-sglang and its packages>
    PYTHONPATH=src python tools/mini_sglang.py --path <the same and FlashInfer's> --kernels quire,flashinfer --json FILE

A checkpoint of a named shape with random weights and a tokenizer of bytes are written first, unless --checkpoint names
a folder that has one. Each of --kernels runs in a process of its own:

- "tokens": 16 requests of random prompts are decoded greedily; `equal` compares their tokens with those of the first
  kernels, as the share of tokens before the first difference. Random weights make near ties frequent.
- "1x1k", "64x1k": requests of 1,024 tokens, milliseconds per token after the first.
- "256 requests": prompts and outputs of 100 to 1,024 tokens with temperature 0.6, as mini-sglang's own benchmark has
  them; tokens per second.

mini-sglang chooses FlashAttention-3 for prefill on Hopper by default, from a package of its own; here both phases use
its backend for FlashInfer ("fi").
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quire.bench.workloads import SHAPES, Work, random_work, write_shape

KERNELS = ("quire", "flashinfer")
RESULT = "RESULT "
VOCABULARY = 10_000


def write_checkpoint(shape: str, folder: Path) -> None:
    """Write a model of a shape with random weights, and a tokenizer of single bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    write_shape(shape, folder)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    # The shape's own config.json has the keys that mini-sglang reads, which newer versions of Transformers rename.
    write_shape(shape, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


class Driver:
    """mini-sglang's offline engine.

    Args:
        checkpoint: the model's folder.
        max_batch: the most requests of a CUDA graph.
    """

    def __init__(self, checkpoint: Path, max_batch: int) -> None:
        from minisgl.core import SamplingParams
        from minisgl.llm import LLM

        self._params = SamplingParams
        options: dict[str, Any] = {"attention_backend": "fi", "max_seq_len_override": 4096, "max_extend_tokens": 16384}
        self.llm = LLM(str(checkpoint), cuda_graph_max_bs=max_batch, memory_ratio=0.7, **options)

    def generate(self, work: Sequence[Work], temperature: float = 0.0) -> tuple[list[list[int]], float]:
        """The tokens of requests, and the seconds that they took."""
        params = [
            self._params(temperature=temperature, ignore_eos=True, max_tokens=request.max_tokens) for request in work
        ]
        start = time.perf_counter()
        done = self.llm.generate([request.prompt for request in work], params)
        torch.cuda.synchronize()
        return [result["token_ids"] for result in done], time.perf_counter() - start

    def milliseconds_per_token(self, batch: int, length: int, steps: int) -> float:
        """The time of a decode step of `batch` requests: of `steps` tokens less that of one, with other prompts."""
        times = []
        for seed, tokens in enumerate((1 + steps, 1, 1 + steps, 1)):
            work = random_work(batch, (length, length), (tokens, tokens), VOCABULARY, 100 * batch + seed)
            times.append(self.generate(work)[1])
        return (times[2] - times[3]) / steps * 1e3


def measure(checkpoint: Path, requests: int) -> dict[str, Any]:
    """The figures of this process, in which the kernels have been chosen."""
    start = time.perf_counter()
    driver = Driver(checkpoint, min(256, requests))
    driver.generate(random_work(4, (100, 300), (8, 8), VOCABULARY, 0), 0.6)
    loading = time.perf_counter() - start
    tokens, _ = driver.generate(random_work(16, (20, 600), (64, 64), VOCABULARY, 1))
    wrapper = type(driver.llm.engine.attn_backend.decode_wrappers)
    work = random_work(requests, (100, 1024), (100, 1024), VOCABULARY, 2)
    per_token = {f"{n}x1k": driver.milliseconds_per_token(n, 1024, 128) for n in (1, 64)}
    generated, seconds = driver.generate(work, 0.6)
    return {
        "wrapper": f"{wrapper.__module__}.{wrapper.__qualname__}",
        "seconds_to_load": loading,
        "milliseconds_per_token": per_token,
        "requests": requests,
        "tokens_per_second": sum(map(len, generated)) / seconds,
        "tokens": tokens,
    }


def run_child(kernels: str, checkpoint: Path, requests: int) -> None:
    """Measure one of the kernels, and print the result."""
    if kernels == "quire":
        import quire.compat  # noqa: F401  (which FlashInfer's name means from now on)
    found = measure(checkpoint, requests)
    # FlashInfer's package uses the GPU when it is imported, which mini-sglang's engine refuses before its own start.
    import flashinfer

    print(RESULT + json.dumps({"kernels": kernels, "flashinfer": flashinfer.__version__, **found}), flush=True)


def run(kernels: str, args: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """Measure one of the kernels in a process of its own; the end of its output if it fails."""
    paths = [*args.path.split(os.pathsep), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--child", kernels, "--checkpoint", str(checkpoint)]
    command += ["--path", args.path, "--requests", str(args.requests)]
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.splitlines()
    results = [line for line in lines if line.startswith(RESULT)]
    if not results:
        return {"kernels": kernels, "error": "\n".join(lines[-40:])}
    result: dict[str, Any] = json.loads(results[-1].removeprefix(RESULT))
    return result


def equal_share(tokens: list[list[int]], others: list[list[int]]) -> float:
    """The share of tokens before the first difference of each request."""
    same = 0
    for mine, other in zip(tokens, others, strict=True):
        pairs = zip(mine, other, strict=True)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(mine))
    return same / sum(map(len, tokens))


def show(result: dict[str, Any]) -> None:
    if "error" in result:
        print(f"{result['kernels']} failed:\n{result['error']}")
        return
    steps = ", ".join(f"{cell} {value:.2f} ms" for cell, value in result["milliseconds_per_token"].items())
    print(
        f"{result['kernels']} ({result['wrapper']}): loaded in {result['seconds_to_load']:.0f} s; per token {steps}; "
        f"{result['requests']} requests {result['tokens_per_second']:,.0f} tokens/s; equal {result['equal']:.1%}",
        flush=True,
    )


def write(path: Path, shape: str, results: list[dict[str, Any]]) -> None:
    """Write results so far: the next kernels may take minutes to compile."""
    from quire.bench.gpu import machine

    runs = [{name: value for name, value in result.items() if name != "tokens"} for result in results]
    found = {**machine(), "operation": "mini-sglang", "shape": shape, "runs": runs}
    path.write_text(json.dumps(found, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kernels, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--path", default="", help=f"folders of packages, with {os.pathsep!r} between them")
    parser.add_argument("--kernels", default="quire", help=f"some of {','.join(KERNELS)}")
    parser.add_argument("--checkpoint", type=Path, help="default: a folder that is removed")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=KERNELS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        run_child(args.child, args.checkpoint, args.requests)
        return 0
    chosen = args.kernels.split(",")
    if unknown := set(chosen) - set(KERNELS):
        parser.error(f"--kernels {args.kernels}: {', '.join(unknown)} is none of {', '.join(KERNELS)}")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint or Path(folder)
        if not list(checkpoint.glob("*.safetensors")):
            write_checkpoint(args.shape, checkpoint)
        results: list[dict[str, Any]] = []
        for kernels in chosen:
            result = run(kernels, args, checkpoint)
            first = results[0] if results else result
            if "error" not in first and "error" not in result:
                result["equal"] = equal_share(result["tokens"], first["tokens"])
            show(result)
            results.append(result)
            if args.json:
                write(args.json, args.shape, results)
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
