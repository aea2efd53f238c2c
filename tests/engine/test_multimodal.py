"""Vision-language checkpoints run their language model on text, as Transformers does, and refuse images."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import AutoModelForImageTextToText

from helpers.checkpoints import change_config, change_weights, save_tokenizer, with_chat_template
from helpers.checkpoints import save as save_text
from helpers.multimodal import CLIP, FAMILIES, IMAGE, TEXT, VIDEO, save, save_random
from helpers.server import served
from quire.engine import LLM, SamplingParams
from quire.engine.chat import render_chat
from quire.engine.load import load_model

COUNT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


def prompts(rng):
    """Prompts of several lengths, two of which begin alike."""
    start = [rng.randrange(1, 90) for _ in range(20)]
    return [[*start, 5, 6], [7], [*start, 8], [rng.randrange(1, 90) for _ in range(33)]]


def own_tokens(folder, listed):
    """The tokens that Transformers' `generate` appends to each prompt."""
    network = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    options = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [network.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in listed]


@pytest.mark.parametrize("family", FAMILIES)
def test_llm_with_a_vision_language_checkpoint_has_the_tokens_of_transformers(family, tmp_path, rng, capfd):
    folder, listed = save(family, tmp_path), prompts(rng)
    expected = own_tokens(folder, listed)
    for batched in (7, 2048):
        capfd.readouterr()
        with LLM(folder, num_pages=64, page_size=4, max_batched_tokens=batched) as llm:
            assert [done.token_ids for done in llm.generate(listed, GREEDY)] == expected
        (line,) = (line for line in capfd.readouterr().err.splitlines() if "compiling" not in line)
        what = f"{folder} is a vision-language model ({family}ForConditionalGeneration)"
        assert line == f"quire: {what}: its language model runs, on text alone"


@pytest.mark.parametrize("family", FAMILIES)
def test_model_of_a_vision_language_checkpoint_has_the_language_model_alone(family, tmp_path):
    network = load_model(save(family, tmp_path), torch.device("cpu")).network
    # A vector that stands between rows of an image is no module, and stays.
    names = {name for name, _ in network.named_parameters()} - {"model.image_newline"}
    assert {name.split(".")[0] for name in names} <= {"model", "lm_head"}
    assert {name.split(".")[1] for name in names if name.startswith("model.")} <= {"language_model", "text_model"}


# The beginnings of names of tensors in Transformers' modules, and in checkpoints that were published for older ones.
NAMES = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
NAMES |= {"model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector."}


@pytest.mark.parametrize("names", [NAMES, {old: new for new, old in NAMES.items()}], ids=["old", "new"])
def test_llm_with_old_or_new_names_of_tensors_has_the_same_tokens(names, tmp_path, rng):
    folder, listed = save("Llava", tmp_path), prompts(rng)
    expected = own_tokens(folder, listed)

    def rename(weights):
        for name in list(weights):
            start = next((start for start in names if name.startswith(start)), "")
            weights[names.get(start, "") + name.removeprefix(start)] = weights.pop(name)

    with LLM(change_weights(folder, rename), num_pages=64) as llm:
        assert [done.token_ids for done in llm.generate(listed, GREEDY)] == expected


@pytest.mark.parametrize("family", ["Llava", "Gemma3", "Qwen3VL"])
def test_llm_with_dummy_weights_of_a_vision_language_model_runs(family, tmp_path):
    folder = save(family, tmp_path)
    (folder / "model.safetensors").unlink()
    with LLM(folder, num_pages=64, load_format="dummy") as llm:
        assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == COUNT


@pytest.mark.slow
def test_llm_compiles_the_layers_of_a_vision_language_model(tmp_path, rng):
    folder, listed = save("Qwen3VL", tmp_path), prompts(rng)
    with LLM(folder, num_pages=64, compile=True) as llm:
        assert [done.token_ids for done in llm.generate(listed, GREEDY)] == own_tokens(folder, listed)
        assert llm.model.compiled


@pytest.mark.parametrize(("token", "kind"), [(IMAGE, "image"), (VIDEO, "video")])
def test_llm_with_a_token_of_an_image_or_a_video_names_it(token, kind, tmp_path):
    with LLM(save("Qwen2_5_VL", tmp_path), num_pages=64) as llm:
        with pytest.raises(ValueError, match="which stands for") as raised:
            llm.generate([[1, 2], [3, token, 4]], GREEDY)
        assert str(raised.value) == f"prompt 1 has token {token}, which stands for {kind} data: only text can be run"
        assert llm.stats.generated_tokens == 0


def test_llm_of_text_takes_any_token(tmp_path):
    with LLM(save_text("llama", tmp_path), num_pages=64) as llm:
        assert llm.model.media_tokens == {}
        assert len(llm.generate([[IMAGE, VIDEO]], GREEDY)[0].token_ids) == COUNT


def test_server_of_a_vision_language_model_refuses_images(tmp_path):
    httpx = pytest.importorskip("httpx")
    text = {**TEXT, "model_type": "llama", "vocab_size": save_tokenizer(tmp_path, "<image>")}
    config = transformers.LlavaConfig(text_config=text, vision_config=CLIP, image_token_index=1)
    (save_random(config, tmp_path) / "chat_template.jinja").write_text(IN_PARTS)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with LLM(tmp_path, num_pages=64) as llm, served(llm) as url:

        def answer(path, **body):
            done = httpx.post(f"{url}{path}", json={"max_tokens": 3, "ignore_eos": True, **body})
            assert done.status_code == (400 if "error" in done.json() else 200)
            return done.json().get("error", {}).get("message")

        def chat(content):
            return answer("/v1/chat/completions", messages=[{"role": "user", "content": content}])

        assert answer("/v1/completions", prompt="a b") is None
        assert chat("a b") is None
        for prompt in ([2, 1], "a <image> b"):
            assert "has token 1, which stands for image data: only text" in answer("/v1/completions", prompt=prompt)
        assert "has token 1, which stands for image data: only text" in chat("a <image> b")
        message = chat([{"type": "text", "text": "a"}, part])
        assert message == "messages.0.content has a part of type 'image_url': only 'text' is supported"


IN_PARTS = """{% for m in messages %}<{{ m.role }}>{% for part in m.content | selectattr('type', 'equalto', 'text') %}\
{{ part.text }}{% endfor %};{% endfor %}"""
IN_TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"


@pytest.mark.parametrize("template", [IN_PARTS, IN_TEXT])
def test_render_chat_with_either_kind_of_template_has_the_text(template, tmp_path):
    with LLM(with_chat_template(tmp_path / "model", template), num_pages=64) as llm:
        messages = [{"role": "user", "content": "quire?"}, {"role": "assistant", "content": "Pages."}]
        assert render_chat(llm.model.tokenizer, messages) == "<user>quire?;<assistant>Pages.;"


def test_llm_with_a_chat_template_beside_the_processor_reads_it(tmp_path):
    folder = with_chat_template(tmp_path / "model", IN_TEXT)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": IN_PARTS}))
    with LLM(folder, num_pages=64) as llm:
        assert render_chat(llm.model.tokenizer, [{"role": "user", "content": "a"}]) == "<user>a;"


def test_llm_with_a_classifier_of_images_is_refused(tmp_path):
    folder = change_config(save("Gemma3", tmp_path), architectures=["Gemma3ForSequenceClassification"])
    with pytest.raises(ValueError, match=r"only causal language models of text can be run"):
        LLM(folder, num_pages=64)
