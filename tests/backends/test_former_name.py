"""`quire.serving`, the former name of `quire.backends`."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from quire.serving.vllm import FlashInferImpl
    import quire.serving.token_pool.slots as slots
    from quire.serving import lorax, pymllm, sglang
import quire.backends.vllm, quire.backends.token_pool.slots, quire.serving
assert FlashInferImpl is quire.backends.vllm.FlashInferImpl
assert slots is quire.backends.token_pool.slots
assert lorax is quire.backends.lorax and quire.serving.sglang is quire.backends.sglang
assert quire.backends.vllm.__name__ == quire.backends.vllm.__spec__.name == "quire.backends.vllm"
print(*(x.category.__name__ for x in caught if "quire.serving" in str(x.message)))
try:
    import quire.serving.nothing
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_serving_imports_the_modules_of_backends_and_warns_once():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["DeprecationWarning", "quire.serving.nothing"]
