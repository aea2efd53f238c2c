"""The page at /, in a browser: it shows what the interface answers and what the engine has."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from helpers.browser import Tab, chromium
from helpers.chats import chatting, saying
from helpers.engines import pages_add_up, until_idle
from helpers.server import served
from quire.engine import LLM, SamplingParams, shipped_model

PROMPT = "class Stack:\n    def push(self, item):\n"
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# answer:"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=400, page_size=8, max_num_seqs=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm):
    with served(llm) as url:
        yield url


@pytest.fixture
def tab(browser, url):
    tab = Tab(browser, url)
    tab.wait("#connection", "live")
    yield tab
    tab.close()


def fill(tab, prompt, **fields):
    tab.page.get_by_label("Prompt", exact=True).fill(prompt)
    for label, value in fields.items():
        tab.page.get_by_label(label.replace("_", " ")).fill(str(value))


def ended(tab):
    tab.page.wait_for_function("() => document.getElementById('stop').disabled")
    return tab.text("#finish")


def test_page_streams_the_text_of_the_interface(url, tab):
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0.9, "top_p": 0.95, "seed": 12345}
    expected = httpx.post(f"{url}/v1/completions", json=body).json()
    fill(tab, PROMPT, Max_tokens=60, Temperature=0.9, Top_p=0.95, Seed=12345)
    tab.page.get_by_role("button", name="Generate").click()
    choice, usage = expected["choices"][0], expected["usage"]
    assert ended(tab) == choice["finish_reason"]
    assert tab.generated() == choice["text"]
    assert tab.page.locator(".given").text_content() == PROMPT
    assert tab.page.locator(".part").count() > usage["completion_tokens"] / 4
    assert tab.text("#tokens") == str(usage["completion_tokens"])
    assert tab.text("#prompt-tokens").startswith(f"{usage['prompt_tokens']} (")
    assert tab.text("#first").endswith(" ms")
    assert tab.text("#rate").endswith("/s")
    assert tab.text("#said") == f"Done: {usage['completion_tokens']} tokens."


def test_page_stop_and_escape_cancel_and_release_pages(llm, tab):
    for stop in (
        lambda: tab.page.get_by_role("button", name="Stop").click(),
        lambda: tab.page.keyboard.press("Escape"),
    ):
        fill(tab, PROMPT, Max_tokens=1500, Temperature=3, Seed=1)
        tab.page.get_by_label("Prompt", exact=True).press("Control+Enter")
        tab.page.wait_for_function("() => document.querySelectorAll('.part').length > 3")
        assert llm.stats.running == 1
        stop()
        assert ended(tab) == "stopped"
        until_idle(llm)
        assert llm.stats.held_pages == 0
        assert pages_add_up(llm)
    assert tab.text("#failure") == ""
    assert tab.page.get_by_role("button", name="Generate").is_enabled()


@pytest.fixture
def held(llm):
    """An engine that stands still with two running and three waiting requests."""
    llm.generate([[3] * 50], SamplingParams(max_tokens=4))  # whose pages the prefix tree keeps
    go, stands = threading.Event(), threading.Event()

    def sink(index, part):
        if len(part.token_ids) and index == 1:
            stands.set()
            go.wait(30)

    prompts = [[100 + i] * 40 for i in range(5)]
    cancel = llm.start(prompts, SamplingParams(max_tokens=50, ignore_eos=True), sink)
    assert stands.wait(30)
    yield llm.stats
    cancel()
    go.set()
    until_idle(llm)


def test_page_panel_shows_the_numbers_of_the_engine(llm, tab, held):
    stats = held
    assert (stats.running, stats.waiting) == (2, 3)
    cached = stats.pages - stats.free_pages - stats.held_pages
    assert stats.held_pages > 0 < cached
    tab.wait("#waiting", "3")
    shown = {name: tab.text(f"#{name}") for name in ("running", "held", "cached", "free", "preemptions", "hits")}
    assert shown == {
        "running": "2",
        "held": str(stats.held_pages),
        "cached": str(cached),
        "free": str(stats.free_pages),
        "preemptions": str(stats.preemptions),
        "hits": f"{stats.hit_rate * 100:.1f} %",
    }
    assert tab.text("#page-count") == f"400 in all, {stats.peak_pages} used at most"
    widths = tab.page.eval_on_selector_all("#pages i", "bars => bars.map(bar => parseFloat(bar.style.width))")
    assert widths == pytest.approx([stats.held_pages / 4, cached / 4], rel=1e-4)


def test_page_rates_are_the_mean_of_the_last_seconds(tab):
    """From its next state on the engine generates 100 tokens per second, and computes 50 of prompts."""
    asked = []

    def answer(route):
        state = route.fetch().json()
        asked.append(route)
        state["time"] = 1000 + len(asked)
        state["stats"] |= {"generated_tokens": 100 * len(asked), "admitted_tokens": 50 * len(asked), "running": 1}
        route.fulfill(json=state)

    tab.page.route("**/engine_state*", answer)
    tab.page.reload()
    tab.wait("#generated", "100/s")
    tab.wait("#prompts", "50/s")
    while len(asked) < 5:
        tab.page.wait_for_timeout(50)
    assert tab.text("#generated") == "100/s"
    tab.page.unroute_all(behavior="wait")


def test_page_chart_shows_the_steps_of_the_engine(llm, tab):
    llm.generate([[7] * 50, [9] * 60], SamplingParams(max_tokens=12, ignore_eos=True))
    until_idle(llm)
    tab.wait("#step-count", f"{llm.stats.steps:,} since the start")
    steps = llm.step_log.steps()
    chart = tab.page.get_by_role("img", name="The last")
    chart.focus()
    tab.page.keyboard.press("End")
    caption, last = tab.text("#step"), steps[-1]
    assert caption.startswith(f"Step {last.number}: ")
    assert caption.endswith(f" ms, {last.decode_tokens} decode tokens of {last.requests} requests")
    assert float(caption.split(": ")[1].split(" ms")[0].replace(",", "")) == pytest.approx(
        last.duration * 1000, rel=0.01
    )
    prompt = next(step for step in reversed(steps) if step.prompt_tokens)
    for _ in range(last.number - prompt.number):
        tab.page.keyboard.press("ArrowLeft")
    assert tab.text("#step").startswith(f"Step {prompt.number}: ")
    assert f"{prompt.prompt_tokens} prompt tokens" in tab.text("#step")
    colors = """canvas => { const d = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const seen = new Set(); for (let i = 0; i < d.length; i += 4) seen.add(`${d[i]},${d[i+1]},${d[i+2]}`);
        return seen.size }"""
    assert chart.evaluate(colors) > 4


def test_page_chat_with_a_template_answers_in_turns(browser, tmp_path):
    for file in shipped_model().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(tmp_path, num_pages=200) as llm, served(llm) as url:
        tab = Tab(browser, url)
        tab.wait("#generate", "Send")
        messages = []
        for question in ("Why?", "And <b>then</b>?"):
            fill(tab, question, Max_tokens=15, Temperature=0)
            tab.page.get_by_role("button", name="Send").click()
            ended(tab)
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "max_tokens": 15, "temperature": 0}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            assert tab.generated() == answer
            messages.append({"role": "assistant", "content": answer})
        assert tab.page.locator(".turn[data-role=user]").all_text_contents() == ["Why?", "And <b>then</b>?"]
        tab.page.get_by_role("button", name="New chat").click()
        assert tab.page.locator(".turn").count() == 0
        tab.page.get_by_label("Completion").check()
        assert tab.text("#generate") == "Generate"
        tab.close()


def test_page_chat_shows_reasoning_and_leaves_it_out_of_the_next_turn(browser, tmp_path):
    with LLM(chatting(tmp_path / "model", "hermes"), num_pages=200) as llm, served(llm) as url:
        tab = Tab(browser, url)
        tab.wait("#generate", "Send")
        bodies = []
        tab.page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
        with saying(llm, "<think>\nHm, well.\n</think>\n\nYes."):
            for _ in range(2):
                fill(tab, "Why?")
                tab.page.get_by_role("button", name="Send").click()
                ended(tab)
        turn = tab.page.locator(".turn[data-role=assistant]").last
        assert "".join(turn.locator(".reasoning").all_text_contents()) == "Hm, well."
        assert "".join(turn.locator(".part").all_text_contents()) == "Yes."
        assert bodies[-1]["messages"][1] == {"role": "assistant", "content": "Yes."}
        tab.close()


def test_page_requests_a_key_and_keeps_it_in_memory_alone(browser, llm):
    with served(llm, api_key="secret") as url:
        for path in ("engine_state", "server_info", "metrics"):
            assert httpx.get(f"{url}/{path}").status_code == 401
        tab = Tab(browser, url)
        tab.wait("#key-note", "This server demands a key.")
        tab.page.get_by_label("API key").fill("wrong")
        tab.page.get_by_role("button", name="Use key").click()
        tab.wait("#key-note", "This key is wrong.")
        tab.page.get_by_label("API key").fill("secret")
        tab.page.keyboard.press("Enter")
        tab.wait("#connection", "live")
        assert tab.page.get_by_label("API key").is_hidden()
        fill(tab, PROMPT, Max_tokens=5)
        tab.page.get_by_role("button", name="Generate").click()
        assert ended(tab) == "length"
        assert not any("secret" in asked for asked in tab.requests)
        stored = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        assert json.loads(tab.page.evaluate(stored)) == [{}, {}, ""]
        tab.page.reload()
        tab.wait("#key-note", "This server demands a key.")
        assert all("401" in error for error in tab.errors)
        tab.errors.clear()
        tab.close()


@pytest.mark.slow
def test_page_without_a_server_is_stale_until_it_returns(browser, llm):
    llm.generate([[4] * 9], SamplingParams(max_tokens=3))
    with served(llm) as url:
        tab = Tab(browser, url)
        tab.page.get_by_role("img", name="The last").wait_for()
    tab.wait("#connection", "disconnected, trying again")
    assert "stale" in tab.page.locator("#engine").get_attribute("class")
    tab.page.get_by_role("button", name="Generate").click()
    ended(tab)
    assert tab.text("#finish") == "error"
    assert tab.text("#failure")
    with LLM(num_pages=77) as other, served(other, port=int(url.rpartition(":")[2])):
        tab.wait("#connection", "live")
        assert tab.text("#page-count").startswith("77 in all")
        assert tab.text("#step-count") == "0 since the start"
        tab.page.get_by_role("img", name="No steps yet").wait_for()
        other.generate([[4] * 9], SamplingParams(max_tokens=3, ignore_eos=True))
        tab.page.get_by_role("img", name="The last 3 steps").wait_for()
        assert "stale" not in (tab.page.locator("#engine").get_attribute("class") or "")
        assert all("ERR_" in error for error in tab.errors)
        tab.errors.clear()
        tab.close()


def test_page_hidden_sends_no_requests(tab):
    hide = (
        "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true }); "
        "document.dispatchEvent(new Event('visibilitychange')) }"
    )
    tab.page.evaluate(hide, True)
    tab.page.wait_for_timeout(200)  # for the question that may be on its way
    count = len(tab.requests)
    tab.page.wait_for_timeout(1300)
    assert len(tab.requests) == count
    with tab.page.expect_request("**/engine_state*"):
        tab.page.evaluate(hide, False)


def test_page_shows_errors_of_the_interface(tab):
    fill(tab, "word " * 3000, Max_tokens=5)
    tab.page.get_by_role("button", name="Generate").click()
    assert ended(tab) == "error"
    assert "maximum context length is 2048" in tab.page.get_by_role("alert").filter(has_text="tokens").inner_text()
    assert all("400" in error for error in tab.errors)
    tab.errors.clear()


def test_page_inline_scripts_are_blocked(tab):
    inline = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)"
    tab.page.evaluate(inline)
    assert tab.page.evaluate("window.ran") is None
    assert any("policy: script-src" in error for error in tab.errors)
    tab.errors.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page_of_each_width_and_scheme_fits(browser, url, scheme, width):
    tab = Tab(browser, url, viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab.wait("#connection", "live")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    red, *_ = tab.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (red > 200) == (scheme == "light")
    tab.close()


def test_page_without_a_key_is_served_with_a_content_policy(llm):
    with served(llm, api_key="secret") as url:
        page = httpx.get(url)
        assert page.headers["content-type"].startswith("text/html")
        policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert httpx.head(url).status_code == 200
        for name in ("static/page.css", "static/chart.js", "static/icon.svg"):
            assert httpx.get(f"{url}/{name}").status_code == 200
        assert httpx.get(f"{url}/static/../app.py").status_code != 200
        assert "/static/page.css" not in httpx.get(f"{url}/openapi.json").json()["paths"]


def test_engine_state_after_a_number_has_the_later_steps(llm, url):
    llm.generate([[5] * 9], SamplingParams(max_tokens=6, ignore_eos=True))
    until_idle(llm)
    everything = httpx.get(f"{url}/engine_state").json()
    steps = everything["steps"]
    assert steps[-1]["number"] == everything["stats"]["steps"] == llm.stats.steps
    assert steps[-1]["start"] + steps[-1]["duration"] <= everything["time"]
    later = httpx.get(f"{url}/engine_state", params={"after": steps[-3]["number"]}).json()
    assert later["steps"] == steps[-2:]
    assert later["started"] == everything["started"]
    assert everything["accepts_requests"] is True
    for wrong in ("x", -1, 1 << 63):
        refused = httpx.get(f"{url}/engine_state", params={"after": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
