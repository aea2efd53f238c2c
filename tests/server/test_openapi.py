"""Requests that schemathesis makes from the OpenAPI document: what is answered is what the document says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")

from helpers.checkpoints import with_chat_template
from helpers.engines import pages_add_up, until_idle
from helpers.paths import ROOT
from helpers.server import served
from quire.engine import LLM


# The coverage phase makes some 1,600 requests in minutes, however few examples the other phase has for an endpoint.
@pytest.mark.parametrize(
    ("phases", "examples", "min_cases"),
    [
        ("fuzzing", 10, 100),
        pytest.param("coverage,fuzzing", 300, 3000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ],
)
def test_openapi_generated_requests_are_answered_as_documented(phases, examples, min_cases, tmp_path, rng):
    folder = with_chat_template(tmp_path / "model", "{% for m in messages %}# {{ m.content }}\n{% endfor %}")
    report = tmp_path / "report.json"
    options = {"num_pages": 300, "max_model_len": 128, "max_adapters": 1}
    with LLM(folder, **options) as llm, served(llm, adapter_root=tmp_path) as url:
        config = ["--config-file", str(ROOT / "tools" / "schemathesis.toml"), "--no-color"]
        given = ["--phases", phases, "--max-examples", str(examples), "--seed", str(rng.randrange(1 << 32))]
        reported = ["--report", "json", "--report-json-path", str(report)]
        command = [sys.executable, "-m", "schemathesis.cli", *config, "run", f"{url}/openapi.json", *given, *reported]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        until_idle(llm)
        assert pages_add_up(llm)
    cases = json.loads(report.read_text())["test_cases"]
    assert cases["generated"] > min_cases
    assert cases["with_failures"] == cases["errored"] == 0
