"""quire generate: complete prompts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from quire.cli.loading import engine_config, loading
from quire.engine import SamplingParams

if TYPE_CHECKING:
    from quire.engine import LLM, Completion


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(**{f.name: getattr(args, f.name) for f in fields(SamplingParams) if hasattr(args, f.name)})
    prompts = read_prompts(args)
    with loading():
        from quire.engine import LLM

        llm = LLM(args.model, engine_config(args))
    with llm:
        good = []
        for i, prompt in enumerate(prompts):
            try:
                llm.check(prompt, params, f"prompt {i}")
                good.append(prompt)
            except ValueError as error:
                print(f"quire: error: {error}", file=sys.stderr)
        if not good:
            return 1
        start = time.perf_counter()
        done = _print_json(llm, good, params) if args.json else _print_text(llm, good, params)
        _summarise(llm, done, time.perf_counter() - start, args.json)
        failed = [c.error for c in done if c.finish_reason == "error"]
    for message in failed:
        print(f"quire: error: {message}", file=sys.stderr)
    return 1 if failed or len(good) < len(prompts) else 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line, of --file, or of stdin; ValueError if there are none."""
    prompts = list(args.prompts)
    if args.file is not None:
        prompts += _split(_read(f"--file {args.file}", lambda: args.file.read_text(encoding="utf-8")))
    elif not prompts and not sys.stdin.isatty():
        prompts = _split(_read("stdin", sys.stdin.read))
    if not prompts:
        raise ValueError("there are no prompts: give some as arguments, with --file, or on stdin")
    return prompts


def _read(name: str, read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text: {error}") from None


def _split(text: str) -> list[str]:
    # `splitlines` would also split at line separators of Unicode, which prompts may contain.
    lines = text.removesuffix("\n").split("\n")
    if "---" not in lines:
        return [line for line in lines if line]
    prompts: list[list[str]] = [[]]
    for line in lines:
        if line == "---":
            prompts.append([])
        else:
            prompts[-1].append(line)
    return [prompt for prompt in map("\n".join, prompts) if prompt]


def _print_text(llm: LLM, prompts: list[str], params: SamplingParams) -> list[Completion]:
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        try:
            return llm.generate(prompts, params, on_update=lambda i, part: print(part.text, end="", flush=True))
        finally:
            print()
    from tqdm import tqdm

    texts, counts = list(prompts), [0] * len(prompts)
    reasons, shown = dict[int, str](), 0

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
        "prefix_tokens_reused": stats.cached_tokens,
        "preemptions": stats.preemptions,
    }
    if as_json:
        print(json.dumps({"summary": summary}))
        return
    facts = (
        f"{len(done)} prompts in {seconds:.1f} s",
        f"{stats.prompt_tokens} prompt tokens ({summary['prompt_tokens_per_second']}/s)",
        f"{stats.cached_tokens} of them reused",
        f"{stats.generated_tokens} generated ({summary['generated_tokens_per_second']}/s)",
        f"{stats.peak_pages} of {llm.num_pages} pages used",
        f"{stats.preemptions} preemptions",
    )
    print("\n" + " · ".join(facts), file=sys.stderr)
