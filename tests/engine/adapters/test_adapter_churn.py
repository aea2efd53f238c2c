"""Random requests over many adapters while others are loaded and unloaded under the same names: none gets another's
weights, and nothing leaks.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("peft")

from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from helpers.adapters import assert_greedy, with_factors
from helpers.checkpoints import save
from helpers.engines import pages_add_up, until_idle
from quire.engine import LLM, SamplingParams
from quire.engine.adapters.adapter import Adapter
from quire.engine.adapters.peft import read_adapter
from quire.engine.adapters.targets import adapter_targets

LAYERS = ["q_proj", "v_proj", "o_proj", "down_proj"]
NAMES = [f"name {i}" for i in range(8)]


def write_adapter(folder, targets, rank, rng):
    """An adapter of random factors for some layers."""
    folder.mkdir()
    chosen = rng.sample(LAYERS, rng.randint(1, 4))
    tensors = {}
    for path, target in targets.items():
        if path.rpartition(".")[2] in chosen:
            for factor, shape in (("A", (rank, target.in_features)), ("B", (target.out_features, rank))):
                tensors[f"base_model.model.{path}.lora_{factor}.weight"] = 0.1 * torch.randn(shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": chosen}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Sent:
    """A request that has been sent, and what came back."""

    prompt: list[int]
    adapter: int | None
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None

    def add(self, index, part):
        self.tokens += part.token_ids
        self.reason, self.error = part.finish_reason, part.error


class Churn:
    """Loads adapters under a few names, and unloads them, in a thread; a name that is locked is about to change."""

    def __init__(self, llm, folders, rng):
        self.llm, self.folders, self.rng = llm, folders, rng
        self.locks = {name: threading.Lock() for name in NAMES}
        self.of_name = dict.fromkeys(NAMES)
        self.loads, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while not self.ended.is_set():
            name = self.rng.choice(NAMES)
            with self.locks[name]:
                if self.of_name[name] is not None:
                    self.llm.unload_adapter(name)
                index = self.rng.randrange(len(self.folders))
                self.llm.load_adapter(name, self.folders[index])
                self.of_name[name] = index
                self.loads += 1
            time.sleep(0.002)

    def send(self, prompt, params):
        """Begin a request with a random name's adapter, or with none."""
        name = self.rng.choice([None, *NAMES])
        if name is None:
            return self._start(Sent(prompt, None), params, None)
        with self.locks[name]:
            index = self.of_name[name]
            return self._start(Sent(prompt, index), params, None if index is None else name)

    def _start(self, sent, params, name):
        return sent, self.llm.start([sent.prompt], params, sent.add, adapter=name)

    def end(self):
        """Unload everything."""
        self.ended.set()
        self.thread.join()
        for info in self.llm.adapters:
            self.llm.unload_adapter(info.name)


def alive_adapters():
    gc.collect()
    return sum(type(each) is Adapter for each in gc.get_objects())


@pytest.mark.parametrize(("num_requests", "num_adapters"), [(120, 12), pytest.param(1000, 50, marks=pytest.mark.slow)])
def test_llm_random_requests_while_adapters_come_and_go(num_requests, num_adapters, tmp_path, rng):
    save("llama", tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    targets = adapter_targets(base)
    folders = [write_adapter(tmp_path / str(i), targets, rng.randint(1, 40), rng) for i in range(num_adapters)]
    starts = [[rng.randrange(97) for _ in range(14)] for _ in range(3)]
    sent = []
    others = alive_adapters()
    options = {"max_adapters": 4, "adapter_rank_pages": 7, "max_adapter_rank": 48}
    options |= {"num_pages": 60, "page_size": 4, "max_num_seqs": 8, "max_batched_tokens": 24}
    with LLM(tmp_path / "base", **options) as llm:
        churn = Churn(llm, folders, rng)
        while len(sent) < num_requests:
            prompt = rng.choice(starts)[: rng.randint(1, 14)] + [rng.randrange(97) for _ in range(rng.randint(1, 6))]
            params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 8), ignore_eos=True)
            request, cancel = churn.send(prompt, params)
            sent.append(request)
            if rng.random() < 0.05:
                cancel()
            # Adapters change at least once for every five requests.
            while len(llm._engine.scheduler.waiting) > 20 or churn.loads < len(sent) / 5:
                assert churn.thread.is_alive()
                time.sleep(0.002)
        churn.end()
        until_idle(llm, 120)
        scheduler = llm._engine.scheduler
        slots = scheduler.adapters
        assert (len(slots), slots.num_held, slots.num_free_pages) == (0, 0, 7)
        assert len(slots._free_slots) == 4
        assert pages_add_up(llm)
        assert slots.num_loads > 4
        scheduler.tree.clear()
        assert (scheduler.tree.namespaces, scheduler.allocator.num_free) == ([], 60)
        assert alive_adapters() == others
    networks = {None: base}
    for each in sent:
        assert each.reason in ("length", "cancelled"), each.error
        if each.adapter not in networks:
            networks[each.adapter] = with_factors(base, read_adapter(folders[each.adapter], targets))
        if each.tokens:
            assert_greedy(networks[each.adapter], each.prompt, each.tokens)
    assert len(networks) > num_adapters // 2
