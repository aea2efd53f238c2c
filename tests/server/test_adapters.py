"""Adapters over HTTP: what requests that name one as their model get, and how they are loaded and unloaded."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("peft")

import openai
from transformers import AutoModelForCausalLM

from helpers.adapters import change_config, save_adapter
from helpers.checkpoints import with_chat_template
from helpers.server import served
from quire.engine import LLM, EmbeddingParams, EngineConfig, SamplingParams, shipped_model
from quire.server import EngineClient, EngineProcess, ServerLimits, allow_adapters, create_app
from quire.server.engine_client import attached

PROMPT = "def add(a, b):\n"
GREEDY = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with two adapters of the bundled model, "one" and "two", and links; beside it is "outside"."""
    folder = tmp_path_factory.mktemp("adapters")
    inside = folder / "root"
    model = AutoModelForCausalLM.from_pretrained(shipped_model())
    for i, name in enumerate(("root/one", "root/two", "outside")):
        # With a smaller factor, some random adapters change no greedy token.
        save_adapter(model, folder / name, r=4 + i, lora_alpha=32, target_modules=["q_proj", "down_proj"])
    (inside / "inner").symlink_to(inside / "one")
    (inside / "outer").symlink_to(folder / "outside")
    (inside / "around").symlink_to(inside / "around")
    (inside / "half").mkdir()
    (inside / "half" / "adapter_config.json").write_bytes((inside / "one" / "adapter_config.json").read_bytes())
    (inside / "half" / "adapter_model.safetensors").symlink_to(folder / "outside" / "adapter_model.safetensors")
    (inside / "broken").mkdir()
    (inside / "broken" / "adapter_model.safetensors").write_bytes(b"")
    (inside / "broken" / "adapter_config.json").write_bytes((inside / "one" / "adapter_config.json").read_bytes())
    change_config(inside / "broken", use_dora=True)
    return inside


@pytest.fixture(scope="module")
def llm(tmp_path_factory, root):
    folder = tmp_path_factory.mktemp("model") / "model"
    with_chat_template(folder, "{% for m in messages %}# {{ m.content }}\n{% endfor %}")
    options = {"num_pages": 300, "max_batched_tokens": 64, "batch_invariant": True, "max_adapters": 2}
    with LLM(folder, **options, adapters={"one": root / "one"}) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm, root):
    limits = ServerLimits(max_loaded_adapters=3)
    with served(llm, name="base", limits=limits, api_key="key", adapter_root=root) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture
def post(client, url):
    """Sends a body with the key."""

    def send(path, **body):
        return httpx.post(f"{url}/v1/{path}", json=body, headers={"Authorization": "Bearer key"})

    return send


@pytest.fixture
def two(post, llm):
    """The adapter "two", loaded by a request."""
    assert post("load_lora_adapter", lora_name="two", lora_path="two").status_code == 200
    yield "two"
    if any(info.name == "two" for info in llm.adapters):
        llm.unload_adapter("two")


def test_model_that_is_an_adapter_is_that_of_completions(client, llm, two):
    params = SamplingParams(**GREEDY)
    expected = {
        name: llm.generate(PROMPT, params, adapter=adapter)[0].text
        for name, adapter in (("base", None), ("one", "one"), ("two", "two"))
    }
    assert len(set(expected.values())) == 3
    for name, text in expected.items():
        whole = client.completions.create(model=name, prompt=PROMPT, **GREEDY)
        assert (whole.model, whole.choices[0].text) == (name, text)
        parts = list(client.completions.create(model=name, prompt=PROMPT, **GREEDY, stream=True))
        assert {part.model for part in parts} == {name}
        assert "".join(part.choices[0].text for part in parts) == text


def test_model_that_is_an_adapter_is_that_of_chats_and_responses(client, llm):
    messages = [{"role": "user", "content": "sum"}]
    (done,) = llm.generate("# sum\n", SamplingParams(**GREEDY), adapter="one")
    chat = client.chat.completions.create(model="one", messages=messages, **GREEDY)
    assert (chat.model, chat.choices[0].message.content) == ("one", done.text)
    response = client.responses.create(model="one", input="sum", max_output_tokens=12, temperature=0)
    assert (response.model, response.output_text) == ("one", done.text)


def test_model_that_is_an_adapter_is_that_of_embeddings(client, llm):
    found = client.embeddings.create(model="one", input=PROMPT)
    (expected,), (base,) = llm.embed(PROMPT, adapter="one"), llm.embed(PROMPT)
    assert found.model == "one"
    assert found.data[0].embedding == pytest.approx(expected.values.tolist(), abs=1e-6)
    assert abs(expected.values - base.values).max() > 1e-3


def test_models_has_adapters_with_their_parent(client, root, two):
    listed = {model.id: model for model in client.models.list()}
    assert list(listed) == ["base", "one", "two"]
    assert [(m.root, m.parent) for m in listed.values()] == [
        ("base", None),
        (str(root / "one"), "base"),
        (str(root / "two"), "base"),
    ]
    assert client.models.retrieve("two") == listed["two"]


@pytest.mark.slow
def test_unload_of_an_adapter_ends_its_name_and_not_its_requests(client, post, llm, two):
    body = {"prompt": PROMPT, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    stream = iter(client.completions.create(model="two", **body, stream=True))
    next(stream)
    assert post("unload_lora_adapter", lora_name="two").text == "Success: LoRA adapter 'two' removed successfully.\n"
    assert [part.choices[0].finish_reason for part in stream][-1] == "length"
    for call in (
        lambda: client.completions.create(model="two", prompt="x"),
        lambda: client.embeddings.create(model="two", input="x"),
        lambda: client.models.retrieve("two"),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no model 'two': this is 'base'"):
            call()
    answer = post("unload_lora_adapter", lora_name="two")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_name")
    assert [info.name for info in llm.adapters] == ["one"]


def test_adapters_of_the_program_are_known_at_once(client, llm, root):
    llm.load_adapter("mine", root / "two")
    assert client.completions.create(model="mine", prompt="x", max_tokens=1).model == "mine"
    llm.unload_adapter("mine")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="mine", prompt="x", max_tokens=1)


def test_load_of_an_equal_adapter_changes_nothing_and_of_another_is_refused(post, llm):
    assert post("load_lora_adapter", lora_name="one", lora_path="inner").status_code == 200
    answer = post("load_lora_adapter", lora_name="one", lora_path="two")
    assert answer.status_code == 400
    assert "unload it first" in answer.json()["error"]["message"]
    assert [info.name for info in llm.adapters] == ["one"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *((path, "must be a folder within") for path in ("../outside", "outer", "half", "/", "around", "a\0b")),
        ("x" * 5000, "at most 4096 characters"),
        ("x" * 300, "File name too long"),
        ("", "has no adapter_config.json"),
        ("nothing", "has no adapter_config.json"),
        ("broken", "use_dora = True"),
    ],
)
def test_load_of_a_wrong_folder_is_refused(post, llm, root, path, message):
    answer = post("load_lora_adapter", lora_name="new", lora_path=path)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "lora_path")
    assert message in error["message"]
    assert [info.name for info in llm.adapters] == ["one"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"lora_name": ""}, "lora_name", "a name of 1 to 128 letters"),
        ({"lora_name": "a" * 129}, "lora_name", "a name of 1 to 128 letters"),
        ({"lora_name": "a\nb"}, "lora_name", "a name of 1 to 128 letters"),
        ({"lora_name": ".a"}, "lora_name", "a name of 1 to 128 letters"),
        ({"lora_name": "base"}, "lora_name", "this is the model itself"),
        ({"lora_name": None}, "lora_name", "string"),
        ({"lora_path": 3}, "lora_path", "string"),
        ({"load_inplace": True}, "load_inplace", "not supported"),
    ],
)
def test_load_of_wrong_fields_names_the_field(post, llm, body, param, message):
    answer = post("load_lora_adapter", **{"lora_name": "new", "lora_path": "two", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert message in answer.json()["error"]["message"]
    assert [info.name for info in llm.adapters] == ["one"]


def test_load_beyond_the_most_adapters_is_refused(post, llm, two):
    assert post("load_lora_adapter", lora_name="three", lora_path=str(llm.adapters[0].folder)).status_code == 200
    answer = post("load_lora_adapter", lora_name="four", lora_path="two")
    assert answer.status_code == 400
    assert "3 adapters are loaded, and 3 are the most" in answer.json()["error"]["message"]
    assert post("load_lora_adapter", lora_name="three", lora_path="one").status_code == 200
    assert post("unload_lora_adapter", lora_name="three").status_code == 200


def test_unload_of_the_model_is_refused(post):
    answer = post("unload_lora_adapter", lora_name="base")
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "lora_name = 'base': this is the model itself",
    )


def test_fields_of_other_servers_for_adapters_are_refused_with_ours(post):
    answer = post("completions", prompt="x", adapter_id="one")
    assert answer.json()["error"]["message"] == "adapter_id is not supported by this server: use model"


def test_loading_needs_the_key_and_a_root(url, llm, root):
    for path in ("load_lora_adapter", "unload_lora_adapter"):
        assert httpx.post(f"{url}/v1/{path}", json={"lora_name": "two", "lora_path": "two"}).status_code == 401
    with served(llm) as without:
        for path in ("load_lora_adapter", "unload_lora_adapter"):
            answer = httpx.post(f"{without}/v1/{path}", json={"lora_name": "one", "lora_path": "two"})
            assert answer.status_code == 404
    assert [info.name for info in llm.adapters] == ["one"]
    with pytest.raises(ValueError, match="there is no such folder"):
        allow_adapters(create_app(llm), root / "nothing")
    with pytest.raises(ValueError, match="adapter 'one' has a name of the model"):
        create_app(llm, name=["base", "one"])


def test_root_of_an_engine_without_adapters_is_refused(root):
    with LLM(num_pages=50) as llm, pytest.raises(ValueError, match="needs an engine with max_adapters of 1 or more"):
        allow_adapters(create_app(llm), root)


def test_loading_by_a_server_that_ends_is_answered_503(llm, root):
    async def run():
        app = create_app(llm)
        allow_adapters(app, root)
        service = app.state.service
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:

            async def answer(path, **body):
                answer = await client.post(f"/v1/{path}", json=body)
                return answer.status_code, answer.json()["error"]["message"]

            service.engine.attach()
            service.engine.leave()
            assert await answer("load_lora_adapter", lora_name="new", lora_path="two") == (503, "the engine has ended")
            assert await answer("unload_lora_adapter", lora_name="one") == (503, "the engine has ended")
            service.drain()
            status, message = await answer("load_lora_adapter", lora_name="new", lora_path="two")
            assert (status, message) == (503, "the server is being shut down")

    asyncio.run(run())
    assert [info.name for info in llm.adapters] == ["one"]


@pytest.mark.slow
def test_engine_process_whose_adapters_are_refused_raises_that():
    config = EngineConfig(device="cpu", num_pages=50, max_adapters=1)
    wanted = pytest.raises(FileNotFoundError, match=r"/nowhere has no adapter_config\.json")
    with EngineProcess(config=config, adapters={"a": "/nowhere"}) as process, wanted:
        process.connect()


def test_registry_names_keep_their_numbers(llm, root):
    before = {each.name: each.number for each in llm.adapters}
    numbers = [llm.load_adapter(name, root / "two").number for name in ("x", "y")]
    llm.unload_adapter("x")
    assert llm.load_adapter("x", root / "two").number == numbers[0]
    assert len({*numbers, *before.values()}) == 3
    for name in ("x", "y"):
        llm.unload_adapter(name)


async def parts_of(start):
    """The parts of what `start` begins with a sink."""
    parts, done = [], asyncio.Event()

    def sink(index, part):
        parts.append(part)
        if part.finish_reason is not None:
            done.set()

    start(sink)
    await asyncio.wait_for(done.wait(), 60)
    return parts


async def ended(start):
    """The last of them."""
    return (await parts_of(start))[-1]


async def all_tokens(start):
    """The tokens of all of them."""
    return [token for part in await parts_of(start) for token in part.token_ids]


def test_requests_whose_adapter_was_unloaded_meanwhile_end_with_an_error(llm, root):
    """The client has not read yet that the adapter has gone."""

    async def run():
        engine = attached(llm)
        llm.load_adapter("gone", root / "two")
        await engine.state()
        llm.unload_adapter("gone")
        tokens, params = [[5, 6]], [SamplingParams(max_tokens=2)]
        parts = await asyncio.gather(
            ended(lambda sink: engine.start(tokens, params, sink, "gone")),
            ended(lambda sink: engine.start_embedding(tokens, EmbeddingParams("last"), sink, "gone")),
        )
        with pytest.raises(ValueError, match="adapter = 'gone' is not known: 'one' are"):
            engine.start(tokens, params, lambda i, part: None, "gone")
        with pytest.raises(ValueError, match="adapter = 'gone' is not known: 'one' are"):
            engine.start_embedding(tokens, EmbeddingParams("last"), lambda i, part: None, "gone")
        engine.leave()
        return parts

    for part in asyncio.run(run()):
        assert (part.finish_reason, part.error) == ("error", "adapter 'gone' was unloaded before the request began")


def test_load_of_an_adapter_holds_up_no_requests(llm, root, monkeypatch):
    begun, goes_on, load = threading.Event(), threading.Event(), LLM.load_adapter

    def slow(self, name, folder):
        begun.set()
        assert goes_on.wait(60)
        return load(self, name, folder)

    monkeypatch.setattr(LLM, "load_adapter", slow)

    async def run():
        engine = attached(llm)
        loading = asyncio.ensure_future(engine.load_adapter("slow", root / "two"))
        await asyncio.to_thread(begun.wait, 60)
        params = [SamplingParams(max_tokens=3, ignore_eos=True)]
        part = await ended(lambda sink: engine.start([[5, 6]], params, sink, "one"))
        assert part.finish_reason == "length"
        assert not loading.done()
        goes_on.set()
        assert await loading == engine.adapters[-1] == llm.adapters[-1]
        await engine.unload_adapter("slow")
        assert [each.name for each in engine.adapters] == ["one"]
        engine.leave()

    asyncio.run(run())


async def wait_for_adapters(client, names):
    """Wait until a client has read of these adapters; others in its event loop may do so before."""
    for _ in range(10_000):
        if [each.name for each in client.adapters] == names:
            return
        await asyncio.sleep(1e-3)
    pytest.fail(f"the adapters of the client are {client.adapters}")


@pytest.mark.slow
def test_engine_process_adapters_of_one_client_are_those_of_all(root):
    config = EngineConfig(device="cpu", num_pages=200, max_adapters=2)
    with EngineProcess(config=config, clients=2, adapters={"one": root / "one"}) as process:
        first = process.connect()
        second = EngineClient(process.further_sockets[0], first.name, first.info, first.tokenizer)
        assert [(each.name, each.rank) for each in first.adapters] == [("one", 4)]

        async def run():
            first.attach()
            loaded = await second.load_adapter("two", root / "two")
            await wait_for_adapters(first, ["one", "two"])
            assert first.adapters[1] == second.adapters[1] == loaded
            params, tokens = [SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)], []
            for client, name in ((first, None), (first, "two"), (second, "two")):
                tokens.append(await all_tokens(partial(client.start, [[5, 6]], params, adapter=name)))
            assert tokens[0] != tokens[1] == tokens[2]
            with pytest.raises(FileNotFoundError, match=r"nothing has no adapter_config.json"):
                await first.load_adapter("new", root / "nothing")
            with pytest.raises(ValueError, match="unload it first"):
                await first.load_adapter("one", root / "two")
            await first.unload_adapter("one")
            await wait_for_adapters(second, ["two"])
            with pytest.raises(ValueError, match="adapter = 'one' is not known: 'two' are"):
                await second.unload_adapter("one")
            process.process.kill()
            for work in (first.load_adapter("one", root / "one"), second.unload_adapter("two")):
                with pytest.raises(ConnectionError, match="the engine has ended"):
                    await work

        asyncio.run(run())
