# `make run` and `make test` are all that a new machine with Python 3.11 or later needs.
# Every environment is made once and again only when pyproject.toml has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2
QUESTION ?= What is the capital of France?

.PHONY: run test check bench clients fuzz soak launches clean
.DELETE_ON_ERROR:

run: $(VENV)/.run
	$(BIN)/quantd pull $(MODEL)
	$(BIN)/quantd run --verbose $(MODEL) "$(QUESTION)"

# Next to each other on all cores: many tests wait for a process or a clock. None sees a GPU; where there is one,
# those of the GPU backend run on it too.
test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal
	$(if $(wildcard /dev/nvidiactl /dev/dxg),$(BIN)/python -m pytest --gpu)

check: $(VENV)/.test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy -p quantd

# TEXT=FILE: what the perplexity is of. The first run compiles llama.cpp, which takes ten minutes or so.
bench: $(VENV)/.bench
	$(BIN)/python tests/bench/peers.py $(if $(TEXT),--text "$(TEXT)") $(if $(LLAMA_SERVER),--llama-server "$(LLAMA_SERVER)")
	@set -e; for script in $(filter-out %/peers.py,$(wildcard tests/bench/*.py)); do \
	  echo "== $$script"; $(BIN)/python "$$script"; done

# Needs npm. The first run installs 3 GB of clients below build/. CLIENTS: some of them, by name.
clients: $(VENV)/.test
	$(BIN)/python tests/clients/run.py $(CLIENTS)

# SECONDS: for all targets together. TARGETS: some of them, by name (tests/fuzz/fuzz_targets.py).
fuzz: $(VENV)/.fuzz
	$(BIN)/python tests/fuzz/run.py --seconds $(or $(SECONDS),3600) $(TARGETS)

# What the suite does for seconds, for minutes.
soak: $(VENV)/.test
	SOAK_SECONDS=$(or $(SECONDS),120) REST_SECONDS=60 $(BIN)/python -m pytest --timeout 900 tests/e2e/test_soak.py

# Every kind of launch on a GPU, compiled for it; no GPU is needed. KERNELS: some of them, by name.
launches: $(VENV)/.test
	$(BIN)/python tests/kernels/gpu_compile.py $(KERNELS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp comes last, so that an environment whose making was broken off is made again.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "quantd needs Python 3.11 or later: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: pyproject.toml | $(VENV)/.made
	@echo "Installing quantd and what it needs (a minute or two the first time) ..."
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.made
	@echo "Installing quantd and what its tests need (a minute or two the first time) ..."
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[test]'
	@touch $@ $(VENV)/.run

$(VENV)/.fuzz: $(VENV)/.test
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[fuzz]'
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	@echo "Installing what the benchmarks compare with ..."
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[bench]'
	@touch $@
