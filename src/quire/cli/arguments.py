"""The arguments of all commands. This module does not import torch, so help and usage errors are printed at once."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from quire import __version__
from quire.distribution import DISTRIBUTION
from quire.engine.config import EngineConfig
from quire.server.config import ServerConfig
from quire.server.limits import ServerLimits

_FILE = "a file of prompts, one per line; if it has lines of nothing but ---, prompts are what stands between them"
_BENCH = (
    "Time attention or other layers beside torch and, on a GPU, installed peers, or the engine beside others, under "
    "ceilings of the same run."
)
_CELL = (
    'what to time, like "gqa4 p16 8x2k", of layers "rmsnorm 4096 x64", for latency "64x1k+128" or "1k into 64x1k" (may '
    "be given again)"
)
_PEERS = (
    "decode, prefill: a list of fa3, flashinfer, cudnn, flex (which is compiled for each cell) and sdpa; layers: of "
    "torch.compile and flashinfer; throughput, latency: of invariant (batch-invariant Quire), transformers and vllm"
)
_ADAPTERS = (
    "requests have N adapters (LoRA) of random values in turn; latency: or each of several numbers (0,1,8) of them; "
    "serve: of the first N that the server lists, or of the named ones (a,b,...), drawn by Zipf's law"
)
_SERVER = "--model (a name; default: the first it lists), --file, --requests, --input, --output, --seed hold here, too."
_RATE = "requests per second, which arrive at random; inf: all at once; 1,2,4: one after the other (1)"
_CHAT = (
    "Talk to a model. Ctrl-C stops an answer, Ctrl-D ends, /help lists the commands. Lines of a pipe are answered one "
    "by one. A model without a chat template completes the text so far. Without --max-tokens, an answer in a chat may "
    "fill the context."
)
_CALIBRATE = (
    "Measure the scales of an fp8 cache over texts and write them to a file, for quire serve --kv-cache-scales. The "
    "texts should resemble those of later requests."
)
_SERVE = "Serve a model over HTTP with OpenAI's interface, until SIGINT or SIGTERM."
_MODEL = "a checkpoint folder, or a name of the Hugging Face hub (owner/name); default: the bundled model"
_CODE = "run Python code that comes with the checkpoint, if it needs that"
_SAMPLING = "What is not given is the checkpoint's, in its generation_config.json, or else what stands in parentheses."


def parser() -> argparse.ArgumentParser:
    """The parser of `quire`. The parsed `command` is the name of the module of `quire.cli` that runs it."""
    main = argparse.ArgumentParser(prog="quire", description="Attention for LLM serving over paged key/value caches.")
    main.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _generate(commands)
    _chat(commands)
    _calibrate(commands)
    _serve(commands)
    _check(commands)
    _env(commands)
    _bench(commands)
    return main


def _generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="complete prompts", description="Complete prompts, all at once.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; without any, and without --file: stdin")
    parser.add_argument("--file", type=Path, help=_FILE)
    parser.add_argument("--model", help=_MODEL)
    parser.add_argument("--json", action="store_true", help="a JSON object per prompt, and one for the summary")

    sampling = _sampling(parser)
    sampling.add_argument("--logprobs", type=int, metavar="N", help="with --json: those of the N most likely tokens")
    _engine(parser)


def _chat(commands: Any) -> None:
    parser = commands.add_parser("chat", help="talk to a model in the terminal", description=_CHAT)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a checkpoint folder, or a name of the hub; with --url, a name there"
    )
    parser.add_argument("--url", help="talk to a server with OpenAI's interface, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="with --url: sent as a bearer token")
    _sampling(parser)
    _engine(parser)


def _sampling(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    sampling = parser.add_argument_group("sampling", _SAMPLING, argument_default=argparse.SUPPRESS)
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="tokens to generate at most (128)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token (0)")
    sampling.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens; 0: of all (0)")
    sampling.add_argument("--top-p", type=float, metavar="P", help="from those that have this probability together (1)")
    sampling.add_argument("--min-p", type=float, metavar="P", help="from those so likely beside the most likely (0)")
    sampling.add_argument("--seed", type=int, help="makes samples repeat")
    sampling.add_argument("--repetition-penalty", type=float, metavar="R", help="on tokens of prompt and output (1)")
    sampling.add_argument("--presence-penalty", type=float, metavar="R", help="on tokens of the output (0)")
    sampling.add_argument("--frequency-penalty", type=float, metavar="R", help="on them, once for each time (0)")
    sampling.add_argument("--stop", action="append", help="end before this string (may be given again)")
    sampling.add_argument("--stop-token-ids", type=int, nargs="+", metavar="ID", help="end after one of these tokens")
    sampling.add_argument("--ignore-eos", action="store_true", help="do not end at the model's own end tokens")
    return sampling


def _engine(parser: argparse.ArgumentParser) -> None:
    """The flags of `EngineConfig`."""
    _flags(parser, "engine", EngineConfig)


def _flags(parser: argparse.ArgumentParser, title: str, config: type[Any]) -> None:
    """A flag for each field of a dataclass that has a help for it. Those that are not given are left out of the
    arguments.
    """
    group = parser.add_argument_group(title, argument_default=argparse.SUPPRESS)
    for option in fields(config):
        flag, settings = option.name.replace("_", "-"), dict(option.metadata)
        if not settings:
            continue
        if option.default is True:
            group.add_argument(f"--no-{flag}", dest=option.name, action="store_false", **settings)
        elif option.default is False:
            group.add_argument(f"--{flag}", action="store_true", **settings)
        elif option.default == ():
            group.add_argument(f"--{flag}", **settings)
        else:
            shown = "" if option.default is None else f" ({option.default})"
            settings = {"type": type(option.default), **settings, "help": settings["help"] + shown}
            group.add_argument(f"--{flag}", **settings)


def _serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=_SERVE)
    parser.add_argument("model", nargs="?", help=_MODEL)
    _flags(parser, "server", ServerConfig)
    _flags(parser, "limits", ServerLimits)
    _engine(parser)


def _calibrate(commands: Any) -> None:
    parser = commands.add_parser("calibrate", help="measure the scales of an fp8 cache", description=_CALIBRATE)
    add = parser.add_argument
    add("output", type=Path, metavar="FILE", help="a safetensors file to write")
    add("prompts", nargs="*", metavar="TEXT", help="texts; without any, and without --file: stdin")
    add("--file", type=Path, help=_FILE)
    add("--model", help=_MODEL)
    _engine(parser)


def _check(commands: Any) -> None:
    description = (
        "Compare every kernel family that this machine can run with the oracle, on random batches, and norms and "
        "activations with their formulas in float64."
    )
    parser = commands.add_parser("check", help="compare all kernel families with the oracle", description=description)
    parser.add_argument("--seed", type=int, help="of the random batches; a new one each time by default")
    parser.add_argument("--batches", type=int, default=3, help="per row of the table")
    parser.add_argument("--backend", help="only this kernel family, and no norms and activations")
    parser.add_argument("--json", action="store_true")


def _env(commands: Any) -> None:
    description = "Versions, devices, and which kernel families are available."
    parser = commands.add_parser("env", help="versions, devices, kernel families", description=description)
    parser.add_argument("--json", action="store_true")


def _bench(commands: Any) -> None:
    parser = commands.add_parser("bench", help="time attention, other layers or the engine", description=_BENCH)
    parser.add_argument("operation", choices=("decode", "prefill", "layers", "throughput", "latency", "serve"))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU unless said otherwise, if there is one")
    parser.add_argument("--backend", default="auto", help="kernel family (see quire env)")
    parser.add_argument("--cell", action="append", help=_CELL)
    parser.add_argument("--peers", help=_PEERS)
    parser.add_argument("--rounds", type=int, default=11, help="of which the median counts")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path("-"),
        help="write JSON to a file, after each cell, or without one to stdout",
    )
    parser.add_argument(
        "--plot", type=Path, help=f"draw rates under their ceiling, as PNG (needs {DISTRIBUTION}[bench])"
    )

    engine = parser.add_argument_group("throughput and latency of the engine")
    engine.add_argument("--model", help=_MODEL)
    engine.add_argument(
        "--shape",
        help="random weights: qwen3-0.6b, qwen3-8b, qwen3-30b-a3b, [half-]llama-3.1-8b, llama-3.1-70b, gpt-oss-20b",
    )
    engine.add_argument(
        "--weights",
        metavar="FORMAT,...",
        help="of a shape, each timed: bf16, fp8, fp8-block, int4, mxfp4 (of experts alone); stay quantized on a GPU",
    )
    engine.add_argument("--trust-remote-code", action="store_true", help=_CODE)
    engine.add_argument("--file", type=Path, help='throughput: JSON lines with "prompt" and "max_tokens"')
    engine.add_argument("--requests", type=int, default=256, help="throughput: requests of random tokens (256)")
    engine.add_argument("--input", default="100:1024", metavar="MIN:MAX", help="tokens of their prompts (100:1024)")
    engine.add_argument("--output", default="100:1024", metavar="MIN:MAX", help="tokens that they generate (100:1024)")
    engine.add_argument("--seed", type=int, default=0, help="of random tokens and lengths (0)")
    engine.add_argument("--max-num-seqs", type=int, default=256, help="requests that run at once, in all engines (256)")
    engine.add_argument("--max-batched-tokens", type=int, help="tokens that a step of Quire computes")
    engine.add_argument("--page-size", type=int, help="of Quire's cache")
    engine.add_argument("--tensor-parallel-size", type=int, metavar="N", help="GPUs that compute the model together")
    engine.add_argument("--context-parallel-size", type=int, metavar="N", help="GPUs that divide Quire's cache")
    engine.add_argument("--num-pages", type=int, help="in Quire's cache")
    engine.add_argument("--adapters", metavar="N", help=_ADAPTERS)
    engine.add_argument("--adapter-rank", type=int, default=16, metavar="R", help="of these random adapters (16)")
    engine.add_argument("--max-adapters", type=int, metavar="N", help="that are on the device at once (all)")

    server = parser.add_argument_group("serve: a server with OpenAI's interface", _SERVER)
    server.add_argument("--url", default="http://127.0.0.1:8000", help="(http://127.0.0.1:8000)")
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    server.add_argument("--clients", type=int, default=1, metavar="N", help="processes that send and read (1)")
    server.add_argument("--rate", default="1", metavar="R,...", help=_RATE)
    server.add_argument("--ttft-limit", type=float, metavar="MS", help="for the first token of a good request")
    server.add_argument("--itl-limit", type=float, metavar="MS", help="for each further one, in the mean of a request")
    server.add_argument("--timeout", type=float, default=600, metavar="S", help="after which a request failed (600)")
    server.add_argument("--vocab-size", type=int, default=4096, help="random token ids are below it (4096)")
