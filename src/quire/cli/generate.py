"""quire generate: complete prompts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.engine.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine import LLM, Completion

_FILE_HELP = "a file of prompts, one per line; if it has lines of nothing but ---, prompts are what stands between them"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("generate", help="complete prompts", description="Complete prompts, all at once.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; without any, and without --file: stdin")
    parser.add_argument("--file", type=Path, help=_FILE_HELP)
    parser.add_argument(
        "--model", type=Path, help="a Hugging Face checkpoint folder; default: the one that comes with Quire"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object per prompt, and one for the summary")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128)
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--seed", type=int)
    sampling.add_argument("--repetition-penalty", type=float, default=1.0)
    sampling.add_argument("--presence-penalty", type=float, default=0.0)
    sampling.add_argument("--frequency-penalty", type=float, default=0.0)
    sampling.add_argument("--stop", action="append", default=[], help="end before this string (may be given again)")
    sampling.add_argument("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID")
    sampling.add_argument("--ignore-eos", action="store_true")
    sampling.add_argument("--logprobs", type=int, metavar="N", help="with --json: those of the N likeliest tokens")

    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", default="cpu")
    engine.add_argument("--dtype", default="auto", help="of weights and cache; auto is float32 on the CPU")
    engine.add_argument("--backend", default="auto", help="kernel family (see quire env)")
    engine.add_argument("--max-model-len", type=int, help="tokens of a prompt and its output; default: the context")
    engine.add_argument("--page-size", type=int, default=16)
    engine.add_argument("--num-pages", type=int, help="pages in the cache")
    engine.add_argument("--max-num-seqs", type=int, default=64, help="requests that run at once")
    engine.add_argument("--max-batched-tokens", type=int, default=2048, help="tokens that a step computes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(**{f.name: getattr(args, f.name) for f in fields(SamplingParams)})
    prompts = _prompts(args)
    if not prompts:
        raise ValueError("there are no prompts: give some as arguments, with --file, or on stdin")

    from quire.engine import LLM

    names = ("device", "dtype", "backend", "max_model_len", "page_size", "num_pages", "max_num_seqs")
    options = {name: getattr(args, name) for name in (*names, "max_batched_tokens")}
    with LLM(args.model, **options) as llm:
        good = []
        for i, prompt in enumerate(prompts):
            try:
                llm.check(prompt, params, f"prompt {i}")
                good.append(prompt)
            except ValueError as error:
                print(f"quire: error: {error}", file=sys.stderr)
        if not good:
            return 1
        began = time.perf_counter()
        done = _print_json(llm, good, params) if args.json else _print_text(llm, good, params)
        _summarise(llm, done, time.perf_counter() - began, args.json)
        failed = [c.error for c in done if c.finish_reason == "error"]
    for message in failed:
        print(f"quire: error: {message}", file=sys.stderr)
    return 1 if failed or len(good) < len(prompts) else 0


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompts)
    if args.file is not None:
        prompts += _split(args.file.read_text(encoding="utf-8"))
    elif not prompts and not sys.stdin.isatty():
        prompts = _split(sys.stdin.read())
    return prompts


def _split(text: str) -> list[str]:
    lines = text.splitlines()
    if "---" not in lines:
        return [line for line in lines if line]
    parts: list[list[str]] = [[]]
    for line in lines:
        if line == "---":
            parts.append([])
        else:
            parts[-1].append(line)
    return [part for part in ("\n".join(lines) for lines in parts) if part]


def _print_text(llm: LLM, prompts: list[str], params: SamplingParams) -> list[Completion]:
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        done = llm.generate(prompts, params, on_update=lambda i, part: print(part.text, end="", flush=True))
        print()
        return done
    from tqdm import tqdm

    texts, counts, reasons, shown = list(prompts), [0] * len(prompts), dict[int, str](), 0

    def update(i: int, part: Completion) -> None:
        """Print prompts in their order, each as soon as it and those before it are complete."""
        nonlocal shown
        texts[i] += part.text
        counts[i] += len(part.token_ids)
        if part.finish_reason is not None:
            reasons[i] = part.finish_reason
            bar.update()
        while shown in reasons:
            tqdm.write(f"--- {shown}: {reasons[shown]}, {counts[shown]} tokens\n{texts[shown]}")
            shown += 1

    with tqdm(total=len(prompts), unit="prompt", file=sys.stderr, leave=False, disable=None) as bar:
        return llm.generate(prompts, params, on_update=update)


def _print_json(llm: LLM, prompts: list[str], params: SamplingParams) -> list[Completion]:
    done = llm.generate(prompts, params)
    for prompt, completion in zip(prompts, done, strict=True):
        print(json.dumps({"prompt": prompt, **asdict(completion)}))
    return done


def _summarise(llm: LLM, done: list[Completion], seconds: float, as_json: bool) -> None:
    stats = llm.stats
    summary = {
        "prompts": len(done),
        "seconds": round(seconds, 3),
        "prompt_tokens": stats.prompt_tokens,
        "prompt_tokens_per_second": round(stats.prompt_tokens / seconds, 1),
        "generated_tokens": stats.generated_tokens,
        "generated_tokens_per_second": round(stats.generated_tokens / seconds, 1),
        "pages_used": stats.peak_pages,
        "pages": llm.num_pages,
        "prefix_tokens_reused": stats.reused_tokens,
        "preemptions": stats.preemptions,
    }
    if as_json:
        print(json.dumps({"summary": summary}))
        return
    parts = (
        f"{len(done)} prompts in {seconds:.1f} s",
        f"{stats.prompt_tokens} prompt tokens ({summary['prompt_tokens_per_second']}/s)",
        f"{stats.reused_tokens} of them reused",
        f"{stats.generated_tokens} generated ({summary['generated_tokens_per_second']}/s)",
        f"{stats.peak_pages} of {llm.num_pages} pages used",
        f"{stats.preemptions} preemptions",
    )
    print("\n" + " · ".join(parts), file=sys.stderr)
