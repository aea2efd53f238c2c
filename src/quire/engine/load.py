"""Making an engine from a configuration: the model, the number of pages, the runner and its CUDA graphs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.definition.checks import as_dtype
from quire.engine import moe, projections
from quire.engine.adapters.pool import AdapterPool
from quire.engine.arguments import usable_device
from quire.engine.checkpoint import check_files, check_weights, load_network, read_config
from quire.engine.compiled_layers import CompiledLayers
from quire.engine.config import EngineConfig
from quire.engine.decoder_layers import (
    decoder_layers,
    first_layers,
    last_norms,
    num_layers_of_all_kinds,
    recorded_norms,
)
from quire.engine.engine import Engine
from quire.engine.graph_inputs import StepShape
from quire.engine.hub import checkpoint_folder, download_weights
from quire.engine.memory import free_pages, profiled_pages
from quire.engine.model import Model
from quire.engine.probe import check_kinds, check_layers, record
from quire.engine.reading import load_tokenizer
from quire.engine.runner import Runner
from quire.engine.scales import Scales, read_scales
from quire.engine.selfcheck import ROUNDING, ROUNDING_OF_FEW_LAYERS, check_runner, logits_differ
from quire.engine.weights.modules import QuantizedWeight
from quire.steps import fp8_dtype

if TYPE_CHECKING:
    from quire.engine.parallel.ranks import Ranks


def load_engine(source: str | Path, config: EngineConfig, runner: type[Runner] = Runner) -> Engine:
    """Make the engine of a checkpoint.

    Args:
        source: the checkpoint's folder, or its name on the Hugging Face hub.
        config: the configuration.
        runner: the class that computes steps.

    Raises:
        FileNotFoundError: the checkpoint or its files are missing.
        OSError: a name of the hub could not be downloaded (`quire.engine.hub`).
        ValueError: the configuration does not fit the machine, the runner or the model, or the checkpoint is broken or
            not supported.
        RankError: one of several ranks has ended, or does not answer.
    """
    if config.speculative_tokens and not runner.supports_all_logits:
        what = f"{runner.__name__} computes the logits of the last token of each request only"
        raise ValueError(f"speculative_tokens = {config.speculative_tokens}: {what}")
    if config.max_adapters and not runner.supports_adapters:
        what = f"{runner.__name__} computes steps without the adapters of requests"
        raise ValueError(f"max_adapters = {config.max_adapters}: {what}")
    device = usable_device(config.device)
    config = config.on(device)
    max_batched_tokens = config.max_batched_tokens
    assert max_batched_tokens is not None
    if config.num_ranks > 1:
        made = _load_led_runner(source, device, config, runner)
    else:
        made = load_runner(source, device, config, runner)
    try:
        engine = Engine(made, config.max_num_seqs, max_batched_tokens, speculative_tokens=config.speculative_tokens)
        if config.cuda_graphs:
            with nullcontext() if made.leader is None else made.leader.capturing():
                rows = min(engine.scheduler.max_rows, max_batched_tokens)
                made.capture(engine.sampler, rows, max_batched_tokens, _progress)
    except BaseException:
        if made.leader is not None:
            made.leader.close()
        raise
    return engine


def _load_led_runner(source: str | Path, device: torch.device, config: EngineConfig, runner: type[Runner]) -> Runner:
    """The runner of the first of several ranks, which leads the others."""
    refused = config.ranks_option
    if runner is not Runner:
        raise ValueError(f"{refused}: {runner.__name__} computes all of a model")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        count = torch.cuda.device_count() - device.index
        if count < config.num_ranks:
            raise ValueError(f"{refused}: there are {count} GPUs from {device} on")
    from quire.engine.parallel import torchrun
    from quire.engine.parallel.follower import serve
    from quire.engine.parallel.leader import Leader

    if torchrun.rank_of(config):
        # The rest of the program is that of rank 0.
        serve(torchrun.connect(), load_runner)
        sys.exit(0)
    folder = _fetch(source, config)[0]
    config = replace(config, revision=None)
    leader = Leader(folder, config, device)
    try:
        with leader.loading():
            made = load_runner(folder, device, config, ranks=leader.ranks)
    except BaseException:
        leader.close()
        raise
    made.leader = leader
    if made.adapters is not None:
        made.adapters.leader = leader
    return made


def load_runner(
    source: str | Path,
    device: torch.device,
    config: EngineConfig,
    runner: type[Runner] = Runner,
    ranks: Ranks | None = None,
) -> Runner:
    """Load the model of a checkpoint, and make its runner with a cache.

    Args:
        source, device: as of `load_model`.
        config: the configuration on the device.
        runner: the class that computes steps.
        ranks: those that compute the model together, of which each calls this function; None: this process alone.

    Raises:
        FileNotFoundError, OSError, ValueError: as `load_engine`.
    """
    model = load_model(source, device, config, ranks)
    scales, adapters = _cache_scales(model, config), _adapter_pool(model, config, ranks)
    make = partial(_make_runner, _runner_class(runner, config, ranks), model, config, scales, adapters, ranks)
    made = make(_num_pages(model, config, make, ranks))
    check_runner(made, random_weights=config.load_format == "dummy")
    return made


def load_model(
    source: str | Path, device: torch.device, config: EngineConfig | None = None, ranks: Ranks | None = None
) -> Model:
    """Load the model of a checkpoint to a device.

    Args:
        source: the folder of a Hugging Face checkpoint, with config.json, *.safetensors, and the tokenizer's files for
            text; or its name on the hub.
        device: of weights and cache, in place of that of the configuration.
        config: of which revision, dtype, max_model_len, compile, load_format, dequantize, trust_remote_code,
            batch_invariant and pooling are read.
        ranks: those that compute the model together, of which this one loads its part; None: the whole model is loaded.

    Raises:
        FileNotFoundError: the checkpoint, its config.json or its weights are missing.
        OSError: a name of the hub could not be downloaded (`quire.engine.hub`).
        ValueError: the checkpoint is broken, quantized or of an unsupported kind, or max_model_len exceeds its context.
    """
    config = (config or EngineConfig()).on(device)
    dummy, trusted = config.load_format == "dummy", config.trust_remote_code
    dtype = None if config.dtype == "auto" else as_dtype(config.dtype)
    folder, description = _fetch(source, config)
    on_gpu = device.type == "cuda"
    dequantize = not on_gpu if config.dequantize == "auto" else config.dequantize
    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    parts = ranks if config.tensor_parallel_size > 1 else None
    # With tensor parallelism, weights stay mapped files until `_divide` copies this rank's part to the device.
    first = device if parts is None or dummy else torch.device("cpu")
    network = load_network(folder, description, first, dtype, dummy, trusted, dequantize, parts)
    network = network.to(first).eval().requires_grad_(False)
    model = Model(folder, network, load_tokenizer(folder, trusted), config.max_model_len)
    model.pooling = config.pooling
    if (on_gpu or not dequantize) and moe.can_replace(network):
        model.replacements.append(moe.ReplacedExperts(network))
    if ranks is not None:
        _divide(model, config, ranks, device)
    attentions = _find_layers(model)
    if on_gpu if config.compile == "auto" else config.compile:
        _compile(model, attentions)
    if config.batch_invariant:
        assert config.max_batched_tokens is not None
        model.pad_steps(config.max_batched_tokens)
    return model


def _fetch(source: str | Path, config: EngineConfig) -> tuple[Path, Any]:
    """The folder of a checkpoint, with its weights if they are to be read, and Transformers' configuration of it."""
    folder = checkpoint_folder(source, config.revision, config.trust_remote_code)
    check_files(folder)
    # What can't be run is refused before its weights are downloaded.
    description = read_config(folder, config.trust_remote_code)
    if config.load_format != "dummy":
        download_weights(source, folder)
        check_weights(folder)
    return folder, description


def _divide(model: Model, config: EngineConfig, ranks: Ranks, device: torch.device) -> None:
    """Keep this rank's part of a model, or all of it if the ranks divide the cache. Random weights are divided already,
    and there is no whole model with which to compare them.
    """
    if config.tensor_parallel_size > 1:
        if config.load_format != "dummy":
            _shard(model, ranks, device)
        return
    from quire.engine.parallel.experts import choose_by_first

    for experts in moe.expert_modules(model.network):
        choose_by_first(experts, ranks)


def _shard(model: Model, ranks: Ranks, device: torch.device) -> None:
    """Keep this rank's part of a model on a device, and check that the first layers of all kinds compute what those of
    the whole model do on the CPU. A plan may not fit a model that does something between two linear layers.
    """
    from quire.engine.parallel.shard import planned, refusal, shard

    planned(model.network, ranks, model.folder)
    exact, length = model.dtype == torch.float32, min(5, model.context)
    # Rounding to 16 bits routes a token to other experts where two are nearly as good. A wrong plan is wrong for any
    # tokens.
    attempts = 3 if not exact and moe.expert_modules(model.network) else 1
    first = [model.vocab_size // 3 + 5 * attempt for attempt in range(attempts)]
    rows = [torch.tensor([[(start + 7 * i * i) % model.vocab_size for i in range(length)]]) for start in first]
    count = num_layers_of_all_kinds(model.network)
    expected = _first_logits(model, count, rows)
    shard(model.network, ranks, model.folder, device)
    model.move(device)
    try:
        found = _first_logits(model, count, rows)
    except ValueError as error:
        what = "divided by Transformers' tensor-parallel plan, it does not compute"
        raise ValueError(f"{refusal(model.folder, ranks)}: {what}: {error}") from error
    pairs = zip(found, expected, strict=True)
    # Products with quantized weights may round activations, too, and on a GPU in another way than on the CPU.
    is_quantized = any(isinstance(module, QuantizedWeight) for module in model.network.modules())
    rounding = ROUNDING if is_quantized else ROUNDING_OF_FEW_LAYERS
    if all(logits_differ(ours, whole.to(device), exact, rounding) for ours, whole in pairs):
        what = "divided by Transformers' tensor-parallel plan, it has other logits than as a whole"
        raise ValueError(f"{refusal(model.folder, ranks)}: {what}")


def _first_logits(model: Model, count: int, rows: Sequence[Tensor]) -> list[Tensor]:
    """The logits that Transformers' code computes of rows of tokens with the first `count` decoder layers."""
    with first_layers(model.network, count):
        return [model.transformers_logits(row.to(model.device)) for row in rows]


def _find_layers(model: Model) -> list[nn.Module]:
    """Record the parameters of each layer's attention in a forward pass of one token, and merge linear layers; return
    the modules of attention.
    """
    check_kinds(model)
    with projections.recorded(model.network) as groups:
        found = record(model, [0])
    check_layers(model, found.layers)
    count = len(found.layers)
    model.layers = [found.layers[i] for i in range(count)]
    merged = projections.merge(groups)
    try:
        record(model, [0, min(1, model.context - 1)])
        model.replacements += merged
    except ValueError:
        # The modelling code cannot use columns of a product, for example because it takes a view of whole rows.
        for linears in merged:
            linears.enable(False)
    return [found.modules[i] for i in range(count)]


def _compile(model: Model, attentions: list[nn.Module]) -> None:
    """Compile the decoder layers, and the norms that follow them."""
    for index, module in enumerate(attentions):
        module.quire_index = torch.tensor(index, device="cpu")
    layers = decoder_layers(model.network, attentions)
    projections.replace_linears(layers)
    norms = last_norms(model.network, layers)
    with recorded_norms(layers, norms) as handed:
        record(model, [0])
    model.compiled_layers = CompiledLayers(layers, norms, handed)
    model.compiled_layers.enable(True)
    model.replacements.append(model.compiled_layers)


def _cache_scales(model: Model, config: EngineConfig) -> Scales | None:
    """The scales of an fp8 cache: of a file, or else of the checkpoint; None for any other cache."""
    if config.kv_cache_dtype == "auto":
        return None
    file = config.kv_cache_scales
    source = model.folder if file is None else Path(file)
    is_dummy = file is None and config.load_format == "dummy"
    scales = None if is_dummy else read_scales(source, len(model.layers))
    if scales is None and file is not None:
        raise ValueError(f"kv_cache_scales = {str(file)!r}: the file has no scales")
    if scales is None and fp8_dtype(config.kv_cache_dtype) == torch.float8_e4m3fn:
        message = (
            f"{source} has no scales for an fp8 cache: keys and values beyond 448 become 448; see `quire calibrate`"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    return scales


def _adapter_pool(model: Model, config: EngineConfig, ranks: Ranks | None) -> AdapterPool | None:
    """The memory for adapters, which is taken before pages of the cache are counted."""
    if not config.max_adapters:
        return None
    rank_pages = config.adapter_rank_pages or config.max_adapters
    num_ranks = 1 if ranks is None else ranks.size
    return AdapterPool(model, config.max_adapters, rank_pages, config.max_adapter_rank, num_ranks)


def _runner_class(runner: type[Runner], config: EngineConfig, ranks: Ranks | None) -> Callable[..., Runner]:
    """The function that makes the runner: this class, or `ContextParallelRunner` if ranks divide the cache."""
    if ranks is None or config.context_parallel_size == 1:
        return runner
    from quire.engine.parallel.context import ContextParallelRunner

    return partial(ContextParallelRunner, ranks=ranks)


def _make_runner(
    runner: Callable[..., Runner],
    model: Model,
    config: EngineConfig,
    scales: Scales | None,
    adapters: AdapterPool | None,
    ranks: Ranks | None,
    num_pages: int,
) -> Runner:
    # Runners of serving backends do not take all options, so these are only passed if they are asked for.
    options: dict[str, Any] = {"kv_cache_dtype": config.kv_cache_dtype, "kv_cache_scales": scales}
    options |= {"batch_invariant": config.batch_invariant}
    asked = {name: value for name, value in options.items() if value not in ("auto", None, False)}
    made = runner(model, num_pages, config.page_size, config.backend, **asked)
    made.adapters, made.ranks = adapters, ranks
    return made


def _num_pages(model: Model, config: EngineConfig, make: partial[Runner], ranks: Ranks | None) -> int:
    """The pages of the cache, by default as many as fit, but not more than max_num_seqs full contexts."""
    if config.num_pages is not None:
        return config.num_pages
    assert config.max_batched_tokens is not None
    page_bytes = Runner.page_bytes(model, config.page_size, config.kv_cache_dtype)
    if model.device.type == "cuda":
        largest = StepShape(min(config.max_num_seqs, config.max_batched_tokens), config.max_batched_tokens)
        utilization = config.gpu_memory_utilization
        pages = profiled_pages(make, config.page_size, page_bytes, largest, utilization, config.cuda_graphs)
    else:
        # Ranks on the CPU share its memory.
        pages = max(1, free_pages(page_bytes) // config.num_ranks)
    if ranks is not None:
        pages = ranks.least(pages) * config.context_parallel_size
    return min(config.max_num_seqs * -(-model.context // config.page_size), pages)


def _progress(shapes: Sequence[Any]) -> Iterable[Any]:
    """The shapes of CUDA graphs with a progress bar on a terminal."""
    from tqdm import tqdm

    return tqdm(shapes, desc="capturing CUDA graphs", unit="graph", leave=False, disable=None)
