"""tools/adapter_loads.py on the bundled model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from helpers.paths import ROOT


@pytest.mark.slow
def test_adapter_loads_on_the_cpu_reports_times_of_loads_and_of_streams(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "adapter_loads.py"), "--device", "cpu", "--loads", "2"]
    file = tmp_path / "result.json"
    done = subprocess.run([*command, "--streams", "2", "--json", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(file.read_text())["cells"]
    assert (row["streams"], row["loads"], row["rank"]) == (2, 2, 16)
    for name in ("load_ms", "first_token_ms", "base_first_token_ms", "gap_ms", "gap_otherwise_ms"):
        assert 0 < row[name]["p50"] <= row[name]["max"]
