"""Transformers' models with attn_implementation="quire": the tokens and logits of "eager" in float32."""

from __future__ import annotations

from inspect import signature

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    BigBirdPegasusConfig,
    BloomConfig,
    ContinuousBatchingConfig,
    Gemma3TextConfig,
    GenerationConfig,
    Llama4TextConfig,
    ModernBertConfig,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import quire.integrations.transformers  # noqa: F401  (which registers "quire")
from helpers.checkpoints import VOCAB, save
from helpers.dense_attention import MODELS, network, padded
from quire.engine import LLM, SamplingParams, shipped_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def prompts(batch, length, device="cpu"):
    return torch.randint(1, VOCAB, (batch, length), device=device)


def with_each(model, compute, other="eager"):
    """What `compute` returns with the attention of `other`, and with Quire's."""
    found = []
    for name in (other, "quire"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found.append(compute())
    return found


def assert_equal_tokens(model, tokens, **options):
    """Assert that both generate equal tokens, or that the first one that differs is as likely as the other's, up to
    rounding errors of float32, which logits have.
    """
    options |= {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    eager, quire = with_each(model, lambda: model.generate(tokens, **options))
    for row, (a, b) in enumerate(zip(eager.sequences.tolist(), quire.sequences.tolist(), strict=True)):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is None:
            assert a == b
        else:
            logits = eager.logits[at - tokens.shape[1]][row]
            assert abs(logits[a[at]] - logits[b[at]]) < 1e-5, f"{b} is not {a}"


def assert_close(eager, quire, rows=...):
    torch.testing.assert_close(quire[rows], eager[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_padded_prompts_gives_the_tokens_of_eager(name, cache, device):
    """On a GPU, Transformers compiles decode steps with a static cache, and captures them in CUDA graphs."""
    model, tokens = network(name, device), prompts(3, 12, device)
    sides = ["", "left", "right"] if device == "cpu" else ["", "left"]  # a GPU gives padding on the right other values
    for side in sides:
        mask = padded(3, 12, side, device)
        options = {} if cache == "dynamic" else {"cache_implementation": cache}
        assert_equal_tokens(model, tokens, attention_mask=mask, max_new_tokens=10, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_generate_beams_and_candidates_give_the_tokens_of_eager(name, device):
    model, assistant, tokens = network(name, device), network("llama", device), prompts(2, 12, device)
    ones = torch.ones_like(tokens)
    assert_equal_tokens(model, tokens, attention_mask=ones, max_new_tokens=8, num_beams=3)
    one = {"attention_mask": ones[:1], "max_new_tokens": 8}
    assert_equal_tokens(model, tokens[:1], prompt_lookup_num_tokens=3, **one)
    assistant.set_attn_implementation("quire")
    assert_equal_tokens(model, tokens[:1], assistant_model=assistant, **one)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_forward_turns_with_padding_give_the_logits_of_eager(name, device):
    """Several tokens after a cache, then one, which may see any part of it."""
    model, tokens = network(name, device), prompts(3, 20, device)
    mask = padded(3, 20, "left", device)
    mask[1, -1] = 0
    mask_of_one = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    mask_of_one[2, 9:12] = 0

    def turns():
        first = model(tokens[:, :11], attention_mask=mask[:, :11])
        second = model(tokens[:, 11:], attention_mask=mask, past_key_values=first.past_key_values)
        third = model(tokens[:, :1], attention_mask=mask_of_one, past_key_values=second.past_key_values)
        return torch.cat([x.logits for x in (first, second, third)], 1)

    assert_close(*with_each(model, turns), mask_of_one.bool())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "deepseek-v3"])
def test_forward_packed_sequences_give_the_logits_of_each(name, device):
    model, lengths = network(name, device), [7, 9, 1, 5]
    tokens = prompts(1, sum(lengths), device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    with torch.no_grad():
        parts = [model(part, use_cache=False).logits for part in tokens.split(lengths, 1)]
        model.set_attn_implementation("quire")
        packed = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
        assert_close(torch.cat(parts, 1), model(**packed).logits)
        by_offsets = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}
        assert_close(torch.cat(parts, 1), model(**packed, **by_offsets).logits)
        two = {"input_ids": tokens.expand(2, -1), "position_ids": positions, "use_cache": False}
        assert_close(torch.cat(parts, 1).expand(2, -1, -1), model(**two).logits)


@pytest.mark.parametrize("name", ["modernbert", "gemma3"])
def test_forward_packed_sequences_by_offsets_see_windows_to_both_sides(name):
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "pad_token_id": 0}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 2, "head_dim": 16}
    config = {
        "modernbert": lambda: ModernBertConfig(**sizes, local_attention=6, global_attn_every_n_layers=2),
        "gemma3": lambda: Gemma3TextConfig(**sizes, **kinds, sliding_window=4, use_bidirectional_attention=True),
    }[name]()
    model = AutoModel.from_config(config).eval()
    for weight in model.parameters():
        if weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=0.2)
    lengths = [11, 9, 1]
    tokens, offsets = prompts(1, sum(lengths)), torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        parts = [model(part, use_cache=False).last_hidden_state for part in tokens.split(lengths, 1)]
        model.set_attn_implementation("quire")
        by_offsets = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 11}
        found = model(tokens, position_ids=positions, use_cache=False, **by_offsets).last_hidden_state
    assert_close(torch.cat(parts, 1), found)


def test_forward_packed_sequences_of_a_model_with_chunks_take_position_ids_alone():
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Llama4TextConfig(**sizes, **heads, attention_chunk_size=5, num_local_experts=2, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="quire").eval()
    offsets = torch.tensor([0, 11, 20], dtype=torch.int32)
    with torch.no_grad(), pytest.raises(ValueError, match=r"not supported with chunked attention.*position_ids alone"):
        model(prompts(1, 20), cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=11)


def decoded(model, forward, tokens, mask, steps=5):
    """Logits of a prefill and of greedy steps with a static cache, for which masks and positions have fixed shapes."""
    length, room = tokens.shape[1], tokens.shape[1] + steps
    cache, found = StaticCache(config=model.config, max_cache_len=room), []
    mask = torch.nn.functional.pad(mask, (0, steps))
    logits = model(tokens, attention_mask=mask[:, :length], past_key_values=cache).logits
    for step in range(steps):
        found.append(logits[:, -1])
        mask[:, length + step] = 1
        positions = mask.cumsum(1)[:, length + step, None] - 1
        chosen = found[-1].argmax(-1, keepdim=True)
        logits = forward(chosen, attention_mask=mask, position_ids=positions, past_key_values=cache).logits.clone()
    return torch.stack(found, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device", "options"),
    [
        *((name, "cpu", {"backend": "aot_eager"}) for name in ("llama", "gemma2", "gpt-oss")),
        *(
            pytest.param(name, "cuda", options, marks=pytest.mark.gpu)
            for name in ("llama", "gemma2")
            for options in ({}, {"mode": "reduce-overhead"})
        ),
    ],
)
def test_compile_decode_steps_are_one_graph_with_the_logits_of_eager(name, device, options):
    torch.compiler.reset()
    model, tokens = network(name, device), prompts(2, 9, device)
    mask = padded(2, 9, "left", device)
    with torch.no_grad():
        eager = decoded(model, model, tokens, mask)
        model.set_attn_implementation("quire")
        assert_close(eager, decoded(model, model, tokens, mask))
        assert_close(eager, decoded(model, torch.compile(model, fullgraph=True, **options), tokens, mask))
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("given", ["mask", "positions"])
def test_compile_a_prefill_is_one_graph_with_the_logits_of_eager(given):
    torch.compiler.reset()
    model, tokens = network("mistral"), prompts(2, 13)
    mask = padded(2, 13, "left")
    kwargs = {"attention_mask": mask} if given == "mask" else {"position_ids": torch.arange(13)[None] % 8}
    with torch.no_grad():
        eager = model(tokens, use_cache=False, **kwargs).logits
        model.set_attn_implementation("quire")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
        assert_close(eager, compiled(tokens, use_cache=False, **kwargs).logits, mask.bool() if given == "mask" else ...)
    torch.compiler.reset()


def batching(**options):
    """A small cache for continuous batching; `page_size` was called block_size."""
    size = "page_size" if "page_size" in signature(ContinuousBatchingConfig).parameters else "block_size"
    return ContinuousBatchingConfig(**{size: 8}, num_blocks=64, max_batch_tokens=16, **options)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt-oss"])
def test_generate_batch_gives_the_tokens_of_paged_eager(name, device, tmp_path):
    """Prompts that are longer than a step, and requests that begin while others go on."""
    if "page_size" not in signature(ContinuousBatchingConfig).parameters:
        pytest.importorskip("psutil", reason="this version of Transformers asks psutil for the memory")
    folder = save(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    inputs = [prompts(1, length)[0].tolist() for length in (5, 23, 1, 9, 12)]
    config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def generated():
        found = model.generate_batch(inputs, generation_config=config, continuous_batching_config=batching())
        assert not any(output.error for output in found.values())
        return [found[key].generated_tokens for key in sorted(found)]

    eager, quire = with_each(model, generated, "paged|eager")
    assert eager == quire
    assert len(quire) == len(inputs)
    assert model.config._attn_implementation == "quire"


def test_generate_batch_with_heads_that_the_cache_does_not_have_says_so():
    model = network("deepseek-v3")
    model.set_attn_implementation("quire")
    config = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch([[1, 2, 3]], generation_config=config, continuous_batching_config=batching())
    assert all("the paged cache has heads of" in output.error for output in found.values())


def test_forward_encoders_give_what_eager_gives():
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = BertModel(BertConfig(**sizes, num_attention_heads=4)).eval()
    tokens, mask = prompts(3, 12), padded(3, 12, "right")
    states = with_each(model, lambda: model(input_ids=tokens, attention_mask=mask).last_hidden_state)
    assert_close(*states, mask.bool())
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(vocab_size=VOCAB, d_model=32, **layers, **heads, forced_eos_token_id=None)
    model = BartForConditionalGeneration(config).eval()
    assert_equal_tokens(model, tokens, attention_mask=mask, max_new_tokens=8, num_beams=2)


def test_forward_models_that_quire_cannot_compute_raise():
    bloom = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4), attn_implementation="quire"
    )
    with pytest.raises(ValueError, match=r"Bloom computes attention by itself.*'eager'"):
        bloom(prompts(2, 5))
    shape = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    pegasus = AutoModel.from_config(BigBirdPegasusConfig(vocab_size=VOCAB, **shape), attn_implementation="quire")
    with torch.no_grad(), pytest.raises(ValueError, match=r"BigBirdPegasus uses masks by itself.*'eager'"):
        pegasus(input_ids=prompts(2, 5), attention_mask=padded(2, 5, "right"), decoder_input_ids=prompts(2, 5))
    config = T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    config._attn_implementation = "quire"
    t5 = T5ForConditionalGeneration(config).eval()
    with torch.no_grad(), pytest.raises(ValueError, match=r"position_bias|T5 computes attention by itself"):
        t5(input_ids=prompts(2, 5), decoder_input_ids=prompts(2, 5))


def test_forward_with_gradients_raises_and_training_goes_on_with_sdpa():
    model, tokens = network("llama").train(), prompts(2, 5)
    model.set_attn_implementation("quire")
    with pytest.raises(ValueError, match="not for training"):
        model(tokens, labels=tokens)
    with torch.inference_mode():
        model(tokens, labels=tokens)
    model.set_attn_implementation("sdpa")
    model(tokens, labels=tokens).loss.backward()


def test_engine_and_transformers_use_quire_in_one_process():
    model = AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.float32, attn_implementation="quire")
    with LLM() as llm:
        prompt = "def read_lines(path):\n"
        (done,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16))
        tokens = torch.tensor([AutoTokenizer.from_pretrained(shipped_model())(prompt).input_ids])
        own = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=16)
        (again,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16))
    assert own[0, tokens.shape[1] :].tolist() == list(done.token_ids) == list(again.token_ids)
