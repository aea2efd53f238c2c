# make demo: set up, and complete the prompts of examples/prompts.txt
# make demo-adapters: set up, and complete prompts by the bundled model and by two adapters of it, in one batch
# make test: set up, and run the tests but those marked slow, in WORKERS processes
# make test-all: the same with those marked slow
# make test-random: the same from new random seeds, where others take that of the commit (QUIRE_TEST_SEED wins)
# make test-clients: install programs of others that use the server, and run the tests of them
# make test-gpu: run the tests that need a GPU, in two halves that can also run alone: test-gpu-kernels and test-gpu-callers
# make docs: build the site of the documents into site/, and fail on a broken link
# make lint: set up, and check style and types

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# A test that hangs fails after ten minutes, with the stacks of its threads.
PYTEST := $(BIN)/python -m pytest --dist worksteal --timeout 600

# Where it is set, each process compiles all that it imports, and tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-adapters test test-all test-random test-clients test-gpu test-gpu-kernels test-gpu-callers docs lint format clean

demo: $(VENV)/ready
	$(BIN)/quire generate --file examples/prompts.txt --max-tokens 80 --temperature 0.5 --repetition-penalty 1.1 --seed 3

demo-adapters: $(VENV)/ready
	$(BIN)/python examples/adapters.py

test: $(VENV)/ready
	$(PYTEST) -n $(WORKERS) -m "not slow"
	TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS)

test-all: $(VENV)/ready
	$(PYTEST) -n $(WORKERS)
	TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS)

test-random: export QUIRE_TEST_SEED ?= random
test-random: test-all

# Programs of others that use the server, which `make test-all` skips where they are not installed.
test-clients: $(VENV)/clients
	$(PYTEST) tests/clients

KERNEL_TESTS := tests/definition tests/kernels

test-gpu: test-gpu-kernels test-gpu-callers

test-gpu-kernels: $(VENV)/ready
	$(PYTEST) -n 15 -m gpu $(KERNEL_TESTS)

test-gpu-callers: $(VENV)/ready
	$(PYTEST) -n 15 -m gpu $(KERNEL_TESTS:%=--ignore=%) tests

# The variable silences a banner about later versions of MkDocs; constraints.txt pins this one.
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/clients: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,clients]'
	touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
