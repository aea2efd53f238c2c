"""One model and two adapters of it complete the same prompts in one batch: three different completions of each.

python examples/adapters.py [PROMPT ...]
"""

import sys
from pathlib import Path

from quire.engine import LLM, SamplingParams

# What tools/train_adapters.py has made: functions with types and docstrings, and classes of tests.
FOLDERS = {name: Path(__file__).parent / "adapters" / name for name in ("typed", "tests")}
PROMPTS = ["class Cache", "def parse_date("]
PARAMS = SamplingParams(temperature=0, max_tokens=48, repetition_penalty=1.1)


def main() -> None:
    prompts = sys.argv[1:] or PROMPTS
    requests = [(prompt, name) for prompt in prompts for name in (None, *FOLDERS)]
    with LLM(adapters=FOLDERS, max_adapters=len(FOLDERS)) as llm:
        # None is the model without an adapter.
        done = llm.generate([prompt for prompt, _ in requests], PARAMS, adapter=[name for _, name in requests])
    for (prompt, name), completion in zip(requests, done, strict=True):
        print(f"--- {name or 'the model alone'}\n{prompt}{completion.text}\n")


if __name__ == "__main__":
    main()
