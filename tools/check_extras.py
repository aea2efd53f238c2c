"""Install each extra of the package into a fresh virtual environment, and use what it promises there.

python tools/check_extras.py                    all extras
python tools/check_extras.py server ray         some of them; "none" is the package without extras
python tools/check_extras.py --wheel FILE       a wheel that is built already
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ["--constraint", str(ROOT / "constraints.txt")]

# Engines that pin their own versions of torch and others.
UNCONSTRAINED = {"vllm", "sglang"}

GENERATE = """
from quire.engine import LLM, SamplingParams
with LLM(device="cpu") as llm:
    (done,) = llm.generate(["import os"], SamplingParams(max_tokens=2, ignore_eos=True{params}))
assert len(done.token_ids) {condition}, done
"""
# What a user of an extra runs first. Code runs in the fresh environment, in an empty folder.
PROMISES = {
    "none": """
import torch, quire
keys = torch.randn(9, 2, 64)
assert quire.single_decode_with_kv_cache(torch.randn(4, 64), keys, keys).shape == (4, 64)
""",
    "engine": GENERATE.format(params="", condition="== 2"),
    "quantized": """
from quire.engine.weights.compressed_tensors import read
weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
group = {"targets": ["Linear"], "weights": weights}
assert read({"config_groups": {"group_0": group}, "format": "pack-quantized"}).method == "compressed-tensors"
""",
    "structured": GENERATE.format(params=', regex="[0-9]+"', condition=">= 1"),
    "server": """
from quire.engine import LLM
from quire.server import create_app
with LLM(device="cpu") as llm:
    assert "/v1/completions" in create_app(llm).openapi()["paths"]
""",
    "ray": "from quire.integrations.ray import app",
    # No GPU is needed to load the plug-in.
    "vllm": """
from importlib.metadata import entry_points
from vllm.v1.attention.backends.registry import AttentionBackendEnum
(plugin,) = [x for x in entry_points(group="vllm.general_plugins") if x.name == "quire"]
plugin.load()()
assert AttentionBackendEnum.CUSTOM.get_class().__module__ == "quire.integrations.vllm.backend"
""",
    "sglang": """
from importlib.metadata import entry_points
(plugin,) = [x for x in entry_points(group="sglang.srt.plugins") if x.name == "quire"]
plugin.load()()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES
assert "quire" in ATTENTION_BACKENDS and "quire" in ATTENTION_BACKEND_CHOICES
import quire.integrations.sglang.backend
""",
    "chat": """
import subprocess, sys
command = [sys.executable, "-m", "quire", "chat", "--device", "cpu", "--max-tokens", "2"]
subprocess.run(command, input="import os", text=True, check=True)
import httpx, prompt_toolkit
""",
    "bench": """
import subprocess, sys
from pathlib import Path
command = [sys.executable, "-m", "quire", "bench", "decode", "--device", "cpu", "--rounds", "1"]
subprocess.run([*command, "--cell", "gqa4 p16 1x128", "--plot", "plot.png"], check=True)
assert Path("plot.png").read_bytes().startswith(b"\\x89PNG")
import quire.bench.server_load, quire.bench.client
""",
    "clients": """
import os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import langchain_openai, litellm, lm_eval.models.openai_completions, openai
from quire.server import create_app
""",
    "docs": """
import subprocess, sys
from pathlib import Path
Path("docs").mkdir()
Path("docs/index.md").write_text("::: quire.decode.single_decode_with_kv_cache")
Path("mkdocs.yml").write_text("{site_name: x, theme: {name: material}, plugins: [mkdocstrings]}")
subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict"], check=True)
assert "kv_layout" in Path("site/index.html").read_text()
""",
    "dev": """
import subprocess, sys
for tool in ("pytest", "ruff", "mypy", "hatchling", "mkdocs"):
    subprocess.run([sys.executable, "-m", tool, "--version"], check=True)
import hypothesis, openai, playwright, triton, xdist
""",
}


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:300]}\n{done.stdout}\nended with {done.returncode}")


def build(folder: Path) -> Path:
    """A wheel of the working tree."""
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT), cwd=ROOT)
    return next(folder.glob("*.whl"))


def check(extra: str, wheel: Path) -> None:
    """Install the wheel with an extra, and run what PROMISES has for it."""
    with tempfile.TemporaryDirectory(prefix=f"extra-{extra}-") as name:
        folder = Path(name)
        run(sys.executable, "-m", "venv", str(folder / "venv"), cwd=folder)
        python = str(folder / "venv" / "bin" / "python")
        constraints = [] if extra in UNCONSTRAINED else CONSTRAINTS
        install = (python, "-m", "pip", "install", "--quiet", *constraints)
        if constraints:
            # Torch comes first, as in the Makefile, so that a build for CPUs is preferred where one is offered.
            run(*install, "torch", cwd=folder)
        run(*install, str(wheel) if extra == "none" else f"{wheel}[{extra}]", cwd=folder)
        run(python, "-m", "pip", "check", cwd=folder)
        run(python, "-I", "-c", PROMISES[extra], cwd=folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the named extras, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"default: all of {', '.join(PROMISES)}")
    parser.add_argument("--wheel", type=Path)
    args = parser.parse_args(arguments)
    if unknown := [extra for extra in args.extras if extra not in PROMISES]:
        parser.error(f"no such extra: {', '.join(unknown)}; there are {', '.join(PROMISES)}")
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        wheel = (args.wheel or build(Path(folder))).resolve()
        for extra in args.extras or PROMISES:
            start = time.perf_counter()
            check(extra, wheel)
            print(f"{extra}: installs and works, {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
