"""The configuration of an engine: what `LLM`, the command line and the server take, with one default each.

This module does not import torch, since the command line derives its flags from it before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
LOAD_FORMATS = ("auto", "dummy")
POOLINGS = ("auto", "last", "mean")
MAX_ADAPTER_RANK = 256
_RANKS = ("tensor_parallel_size", "context_parallel_size")


def _option(default: Any, help: str, **flag: Any) -> Any:
    """A field with the help of its flag, and the arguments of `add_argument` that its default does not imply."""
    return field(default=default, metadata={"help": help, **flag})


def _switch(text: str) -> bool | Literal["auto"]:
    """The value of a flag that takes "true", "false" or "auto"."""
    values: dict[str, bool | Literal["auto"]] = {"true": True, "false": False, "auto": "auto"}
    if text not in values:
        raise ValueError(text)
    return values[text]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine loads its model, sizes its cache and forms its steps.

    Attributes:
        revision: of a model that is a name of the Hugging Face hub: a branch, a tag or a commit; by default its main
            branch.
        device: "cpu", "cuda", "cuda:1", ...; "auto" is "cuda" where there is a GPU, and else "cpu".
        dtype: of weights and cache, or its name; "auto" is float32 on the CPU and the checkpoint's dtype on other
            devices.
        backend: "auto" or a kernel family.
        max_model_len: the largest number of tokens of a request, prompt and output; by default the model's context.
        page_size: tokens in a page.
        num_pages: pages in the cache; by default enough for max_num_seqs full contexts, or fewer to fit in what
            gpu_memory_utilization leaves, on the CPU in a quarter of the free memory.
        max_num_seqs: the largest number of requests that run at once.
        max_batched_tokens: the largest number of tokens of a step; longer prompts are computed in chunks. By default
            2,048 on the CPU and 8,192 on a GPU; with batch_invariant, 64 on the CPU, and on a GPU max_num_seqs, but at
            least 256.
        speculative_tokens: guess up to so many next tokens of a request from its own tokens, and verify them in one
            step; 0: none. The outputs are the same; see docs/ideas/drafts.md for what it costs and brings.
        batch_invariant: give a request the same bits whatever runs beside it, by padding all steps to
            max_batched_tokens; see docs/ideas/batch-invariance.md for what it costs.
        trust_remote_code: whether to run Python code that comes with the checkpoint, which may do anything. Without it,
            a checkpoint that needs such code is refused.
        compile: whether torch.compile compiles the model's decoder layers; "auto": on a GPU. A model that it cannot
            compile runs as Transformers has it, and a RuntimeWarning says why.
        load_format: "dummy" makes random weights instead of reading them, so that the folder needs only a config.json.
        dequantize: whether quantized weights are dequantized to dtype when they are loaded; "auto": on the CPU, where
            products with weights that stay quantized are slow.
        cuda_graphs: on a GPU, capture CUDA graphs of steps before the first request. A model that cannot be captured
            runs without them, after a warning that says why.
        gpu_memory_utilization: the part of a GPU's memory, above 0 and at most 1, that weights, cache and everything
            else on the GPU may take, measured in a step of the largest size; without effect if num_pages is given.
        kv_cache_dtype: "auto" for the model's dtype; "fp8" or "fp8_e4m3", or "fp8_e5m2", to store keys and values in
            half the memory of 16-bit elements.
        kv_cache_scales: for an fp8 cache, a safetensors file with a scale for each layer's keys and one for its values
            (`quire.engine.calibrate` writes one); by default those of the checkpoint, or else 1. A RuntimeWarning says
            so if that is 1 for a cache of e4m3, whose largest number is 448.
        max_adapters: the most adapters that are on the device at once, and so in one step; 0: requests have none.
        adapter_rank_pages: the memory for adapters on the device, in pages of 16 ranks: an adapter of rank 40 takes
            three. By default max_adapters, enough for as many of rank 16.
        max_adapter_rank: the largest rank of an adapter, at most 256.
        tensor_parallel_size: the number of processes, the ranks, that compute the model together, each a part of every
            layer (docs/parallel.md). They are started on this machine, and have the GPUs from `device` on, or share the
            CPU.
        context_parallel_size: the number of processes, the ranks, that divide the pages of the cache among them
            (docs/parallel.md). Each has the whole model; num_pages is that of all.
        tensor_parallel_timeout: seconds in which every rank must answer the others. Otherwise, or if one ends, all
            requests end with an error that names it, and so does the engine.
        pooling: what "auto" means in `EmbeddingParams`: "last" or "mean", or "auto" for what the checkpoint's files for
            sentence-transformers say.

    Raises:
        FileNotFoundError: there is no file kv_cache_scales.
        ValueError: a value is invalid; the message has its name.
    """

    revision: str | None = _option(None, "of a name of the hub: a branch, tag or commit", type=str)
    device: str | torch.device = _option("auto", "cpu, cuda, cuda:1, ...; auto: a GPU if there is one, else the CPU")
    dtype: str | torch.dtype = _option("auto", "of weights and cache; auto is float32 on the CPU")
    backend: str = _option("auto", "kernel family (see quire env)")
    max_model_len: int | None = _option(None, "tokens of a prompt and its output; default: the context", type=int)
    page_size: int = _option(16, "tokens in a page")
    num_pages: int | None = _option(None, "pages in the cache", type=int)
    max_num_seqs: int = _option(64, "requests that run at once")
    max_batched_tokens: int | None = _option(None, "tokens that a step computes (8192 on a GPU, else 2048)", type=int)
    speculative_tokens: int = _option(
        0, "next tokens that are guessed from a request's own and verified in one step", metavar="N"
    )
    batch_invariant: bool = _option(
        False, "give a request the same tokens whatever runs beside it; steps cost as much as full ones then"
    )
    trust_remote_code: bool = _option(False, "run Python code that comes with the checkpoint, if it needs that")
    compile: bool | Literal["auto"] = _option(
        "auto", "compile the decoder layers; auto: on a GPU", type=_switch, metavar="{auto,true,false}"
    )
    load_format: Literal["auto", "dummy"] = _option(
        "auto", "dummy: random weights, for a folder with nothing but a config.json", choices=LOAD_FORMATS
    )
    dequantize: bool | Literal["auto"] = _option(
        "auto",
        "turn quantized weights into weights of dtype when they are loaded; auto: on the CPU",
        type=_switch,
        metavar="{auto,true,false}",
    )
    cuda_graphs: bool = _option(True, "do not capture CUDA graphs of steps on a GPU")
    gpu_memory_utilization: float = _option(0.9, "the part of a GPU's memory that may be taken", metavar="PART")
    kv_cache_dtype: str = _option("auto", "fp8 or fp8_e5m2: a cache of 8 bits", choices=KV_CACHE_DTYPES)
    kv_cache_scales: str | Path | None = _option(
        None, "scales of an fp8 cache; default: the checkpoint's, or 1", type=Path, metavar="FILE"
    )
    max_adapters: int = _option(0, "adapters (LoRA) that are on the device at once; 0: none")
    adapter_rank_pages: int | None = _option(
        None, "memory for adapters, in pages of 16 ranks; default: --max-adapters", type=int
    )
    max_adapter_rank: int = _option(MAX_ADAPTER_RANK, "the largest rank of an adapter")
    tensor_parallel_size: int = _option(
        1, "processes that compute the model together, each on a GPU of its own", metavar="N"
    )
    context_parallel_size: int = _option(1, "processes that divide the cache among them", metavar="N")
    tensor_parallel_timeout: float = _option(300.0, "in which each of these must answer the others", metavar="SECONDS")
    pooling: Literal["auto", "last", "mean"] = _option("auto", "of states to embeddings", choices=POOLINGS)

    def __post_init__(self) -> None:
        positive = ("page_size", "max_num_seqs", "num_pages", "max_model_len", "max_batched_tokens")
        for name in (*positive, "adapter_rank_pages", "max_adapter_rank", *_RANKS):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 1):
                raise ValueError(f"{name} = {value!r}: it must be a positive integer")
        for name in ("speculative_tokens", "max_adapters"):
            value = getattr(self, name)
            if not _is_int(value) or value < 0:
                raise ValueError(f"{name} = {value!r}: it must be an integer, 0 or larger")
        if not 0 < self.gpu_memory_utilization <= 1:
            value = self.gpu_memory_utilization
            raise ValueError(f"gpu_memory_utilization = {value!r}: it must be above 0, and 1 at most")
        for name in ("compile", "dequantize"):
            value = getattr(self, name)
            if value not in (True, False, "auto"):
                raise ValueError(f"{name} = {value!r}: it must be True, False or 'auto'")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format = {self.load_format!r}: it must be 'auto' or 'dummy'")
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling = {self.pooling!r}: it must be one of {', '.join(POOLINGS)}")
        if self.max_adapter_rank > MAX_ADAPTER_RANK:
            raise ValueError(f"max_adapter_rank = {self.max_adapter_rank}: {MAX_ADAPTER_RANK} is the largest")
        if not self.tensor_parallel_timeout > 0:
            raise ValueError(f"tensor_parallel_timeout = {self.tensor_parallel_timeout!r}: it must be above 0")
        self._check_context_parallel()
        self._check_cache()

    def _check_context_parallel(self) -> None:
        if self.context_parallel_size == 1:
            return
        for name, default in (("tensor_parallel_size", 1), ("kv_cache_dtype", "auto"), ("batch_invariant", False)):
            value = getattr(self, name)
            if value != default:
                what = f"context_parallel_size = {self.context_parallel_size} is not supported"
                raise ValueError(f"{what} with {name} = {value!r}")

    @property
    def num_ranks(self) -> int:
        """The processes that compute the model together."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def ranks_option(self) -> str:
        """The option that asks for several of them, for messages."""
        name = _RANKS[0] if self.tensor_parallel_size > 1 else _RANKS[1]
        return f"{name} = {self.num_ranks}"

    def _check_cache(self) -> None:
        dtype, scales = self.kv_cache_dtype, self.kv_cache_scales
        if dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype = {dtype!r} is not known: {', '.join(KV_CACHE_DTYPES)} are")
        if scales is not None and dtype == "auto":
            raise ValueError(f"kv_cache_scales = {str(scales)!r}: only an fp8 cache (kv_cache_dtype) has scales")
        if scales is not None and not Path(scales).is_file():
            raise FileNotFoundError(f"kv_cache_scales = {str(scales)!r}: there is no such file")

    def on(self, device: torch.device) -> EngineConfig:
        """The configuration on a device, with the backend and the size of steps that depend on it.

        Raises:
            ValueError: the backend's bits depend on how a prompt is cut into chunks, which depends on the other
                requests, and batch_invariant is wanted.
        """
        gpu, backend = device.type == "cuda", self.backend
        tokens = self.max_batched_tokens
        if tokens is None:
            # Large steps compute prompts faster, and make decoding requests wait longer. Those of a batch-invariant
            # engine all cost as much as the largest.
            tokens = 8192 if gpu else 2048
            if self.batch_invariant:
                tokens = max(self.max_num_seqs, 256) if gpu else 64
        if self.batch_invariant and backend == "hopper":
            what = "its bits depend on the chunks of a prompt, and these on the other requests; use triton"
            raise ValueError(f"backend = 'hopper' is not supported with batch_invariant: {what}")
        if self.batch_invariant and backend == "auto" and gpu:
            backend = "triton"
        return replace(self, device=device, max_batched_tokens=tokens, backend=backend)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
