# Every target sets up the virtual environment first; nothing else is needed.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_LONG := $(VENV)/.ready-long
READY_DOCS := $(VENV)/.ready-docs
ONE := OMP_NUM_THREADS=1  # two processes on two cores: a thread each

.PHONY: demo test test-long test-all test-versions release-check lint format docs report untuned long paper course paper-page bench-step bench-jax rates clean help

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(READY): pyproject.toml benchmark/pyproject.toml constraints.txt hatch_build.py src/stormplus/torch/core/native.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "the versions in constraints.txt need Python 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==$(TORCH)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]' -e ./benchmark
	@touch $@

# The trainers and the site's generator: only the long parts need them. fastai and timm ask for
# torchvision, which the parts used here never import and which does not load beside this build
# of torch, so they come without their dependencies.
$(READY_LONG): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,trainers,docs]' -e ./benchmark
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps fastai timm
	@touch $@

demo: $(READY)  ## STORM+ against its rivals on two embedded workloads: a table and a figure
	$(BIN)/stormplus compare quick --output out/demo

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## the suite, on two cores
	$(ONE) $(BIN)/python -m pytest -n 2 --dist worksteal

test-long: $(READY_LONG)  ## the long parts: distributed, trainers, docs, statistics
	$(ONE) $(BIN)/python -m pytest -m long -n 2 --dist loadfile

test-all: test test-long  ## both

# Each environment holds a torch with its CUDA libraries, several gigabytes: never a part of `test`.
VERSIONS ?= oldest between newest next benchmark

test-versions:  ## the optimizers' tests on the oldest and the newest versions (minutes, 20 GB)
	$(PYTHON) tools/environments.py $(VERSIONS)

release-check: $(READY)  ## build what would be uploaded, check it with twine, and list it
	$(BIN)/python -m pip install -q -c constraints.txt hatchling twine
	$(BIN)/python tools/release.py out/release

format: $(READY)  ## let ruff put things right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ROWS := $(addprefix docs/results/,smooth.jsonl.gz networks.jsonl.gz untuned.jsonl.gz)

# The site needs no trainer: their pages are read from the source, not run.
$(READY_DOCS): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]' -e ./benchmark
	@touch $@

out/report/index.html: $(ROWS) | $(READY_DOCS)
	$(BIN)/stormplus report $(ROWS) --output out/report

docs: $(READY_DOCS) out/report/index.html  ## the site, in ./site, with the benchmark's page of curves
	$(BIN)/mkdocs build --strict

report: $(READY)  ## the benchmark's page, README's table and the site's results, from the committed rows
	$(BIN)/stormplus report $(ROWS) --output out/report --readme README.md --readme docs/benchmark.md \
		--step-times docs/results/step_time.json --keep docs/figures

untuned: $(READY)  ## the study's tables and figure, from the committed rows
	$(BIN)/python benchmark/scripts/untuned.py

long: $(READY)  ## the tables of the long runs, from the committed rows
	$(BIN)/python benchmark/scripts/long.py

paper: $(READY)  ## the paper's experiment at the scale of two cores (needs STORMPLUS_DATA)
	$(BIN)/stormplus paper --scale cpu --jobs 2

course: $(READY)  ## the same on 1,000 images to the end: a night on two cores
	$(BIN)/stormplus paper --scale course --jobs 2 --output out/course

paper-page: $(READY)  ## its page's tables and figures, from the committed rows
	$(BIN)/python benchmark/scripts/paper_experiment.py

bench-step: $(READY)  ## time the optimizer's own work against torch.optim
	$(BIN)/stormplus bench-step

bench-jax: $(READY)  ## time the optax transformations against optax.adam
	$(BIN)/python benchmark/scripts/bench_jax.py

rates: $(READY)  ## the paper's rates, measured: a figure, a table, the raw rows (5 minutes)
	$(BIN)/stormplus rates

clean:  ## remove the environment and what commands have left
	rm -rf $(VENV) .versions out dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
