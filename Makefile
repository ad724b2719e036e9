# Every target creates the virtual environment first.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_LONG := $(VENV)/.ready-long
READY_DOCS := $(VENV)/.ready-docs
ONE := OMP_NUM_THREADS=1  # two processes on two cores: a thread each

.PHONY: demo test test-long test-all test-versions release-check lint format docs report untuned long paper bench-step bench-jax rates clean help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(READY): pyproject.toml benchmark/pyproject.toml constraints.txt hatch_build.py src/stormplus/torch/kernels/native.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "the versions in constraints.txt need Python 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==$(TORCH)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]' -e ./benchmark
	@touch $@

# The trainers and the site generator, for the long tests. fastai and timm require torchvision,
# which does not load with this build of torch and is not needed: no dependencies.
$(READY_LONG): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,trainers,docs]' -e ./benchmark
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps fastai timm
	@touch $@

demo: $(READY)  ## STORM+ and other optimizers on two small workloads: a table and a figure
	$(BIN)/stormplus compare quick --output out/demo

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## the quick tests, on two cores
	$(ONE) $(BIN)/python -m pytest -n 2 --dist worksteal

test-long: $(READY_LONG)  ## the long tests: distributed, trainers, docs, statistics
	$(ONE) $(BIN)/python -m pytest -m long -n 2 --dist loadfile

test-all: test test-long  ## both

# Each environment has its own torch with CUDA libraries, several gigabytes.
VERSIONS ?= oldest between newest next benchmark

test-versions:  ## run the tests on the oldest and the newest versions (20 GB)
	$(PYTHON) tools/environments.py $(VERSIONS)

release-check: $(READY)  ## build the release files and check them with twine
	$(BIN)/python -m pip install -q -c constraints.txt build twine
	rm -rf out/release
	$(BIN)/python -m build --outdir out/release .
	$(BIN)/python -m build --outdir out/release benchmark
	$(BIN)/twine check --strict out/release/*

format: $(READY)  ## format with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ROWS := $(addprefix docs/results/,smooth.jsonl.gz networks.jsonl.gz untuned.jsonl.gz rivals.jsonl.gz)

# The site needs no trainer: mkdocstrings reads sources.
$(READY_DOCS): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]' -e ./benchmark
	@touch $@

out/report/index.html: $(ROWS) | $(READY_DOCS)
	$(BIN)/stormplus report $(ROWS) --output out/report --home ../index.html

docs: $(READY_DOCS) out/report/index.html  ## build the site in ./site, with the benchmark's report
	$(BIN)/mkdocs build --strict

report: $(READY)  ## write the report and the tables in README and docs from the committed rows
	$(BIN)/stormplus report $(ROWS) --output out/report --home ../index.html --readme README.md \
		--readme docs/benchmark.md --step-times docs/results/step_time.json
	cp out/report/gap_at_defaults.png docs/figures/

untuned: $(READY)  ## write the study's tables and figure from the committed rows
	$(BIN)/python research/untuned_study.py

long: $(READY)  ## write the tables of the long runs from the committed rows
	$(BIN)/stormplus report --tuned docs/results/long.jsonl.gz docs/results/long-held-out.jsonl.gz \
		--output out/long --readme docs/benchmark.md

paper: $(READY)  ## the paper's experiment on 10,000 images, 18 CPU hours (needs CIFAR-10)
	$(BIN)/python research/paper_experiment.py --rows out/paper_experiment.jsonl

bench-step: $(READY)  ## time optimizer steps against torch.optim
	$(BIN)/stormplus bench-step

bench-jax: $(READY)  ## time compilation and update of untuned in JAX against optax.adam
	$(BIN)/python benchmark/scripts/bench_jax.py

rates: $(READY)  ## measure the paper's rates: a figure, a table, the rows (5 minutes)
	$(BIN)/python research/rates.py

clean:  ## remove the environment and all outputs
	rm -rf $(VENV) .versions out dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
