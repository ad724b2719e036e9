# Every target sets up the virtual environment first; nothing else is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-long test-all lint format bench-step bench-jax rates clean help

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "stormplus needs Python 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	@touch $@

demo: $(READY)  ## STORM+ untuned against SGD, Adam and AdaGrad: a table and a figure
	$(BIN)/python examples/demo.py

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## the suite
	$(BIN)/python -m pytest

test-long: $(READY)  ## the long parts
	$(BIN)/python -m pytest -m long

test-all: test test-long  ## both

format: $(READY)  ## let ruff put things right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-step: $(READY)  ## time the optimizer's own work against torch.optim
	$(BIN)/python benchmark/bench_step.py

bench-jax: $(READY)  ## time the optax transformations against optax.adam
	$(BIN)/python benchmark/bench_jax.py

rates: $(READY)  ## the paper's rates, measured: a figure, a table, the raw rows (5 minutes)
	$(BIN)/stormplus rates --output out/rates

clean:  ## remove the environment and what commands have left
	rm -rf $(VENV) out dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
