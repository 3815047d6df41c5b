# A virtual environment beside the sources, nothing outside it. Every target works from a fresh clone.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 30000
MODEL ?=
ARGS ?=
SLOW_SHARE ?= auto

.PHONY: serve test test-all lint clean

# Installed once per change of pyproject.toml or of the C++ sources; Python sources are used in place.
CPP := CMakeLists.txt $(shell find src/ceiba/kernels/cpu src/ceiba/cache/native -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: make PYTHON=python3 (3.11 or newer)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml $(CPP) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

serve: $(VENV)/installed
	$(BIN)/ceiba serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

# What CI runs: linters, then every fast test and a rotating share of the slow ones.
test: lint
	$(BIN)/python -m pytest --slow-share $(SLOW_SHARE) $(ARGS)

test-all: lint
	$(BIN)/python -m pytest --slow-share 1/1 $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
