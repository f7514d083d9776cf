# Every target works alone on a fresh machine with Python 3.11 (or newer) and make.

SHELL := /bin/bash

# The first Python on the path that is new enough; `make PYTHON=...` overrides it.
PYTHON ?= $(firstword $(foreach candidate,python3 python3.11 python3.12 python3.13,\
	$(shell $(candidate) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $(candidate))))
VENV ?= .venv
# torch is installed first and by itself, so that its build can be chosen. On a machine without a
# GPU whose pip would fetch the CUDA build, pass PyTorch's CPU index in TORCH_PIP_ARGS.
TORCH ?= torch==2.13.0
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=
# Tests wait more than they compute: several files at a time, each in a process of its own. Files
# of unit tests, of which there are most, come last and fill the gaps.
PYTEST_WORKERS ?= 3
DEMO_ARGS ?=
# Which GPUs the demo and the tests see: none, as they are for CPUs. `make demo GPUS=0,1` has two.
GPUS ?=
# What has been run on a GPU; its workers share what there is.
GPU_TESTS ?= tests/gpu $(addprefix tests/integration/test_,$(addsuffix .py,elastic_runs memoryless \
	own_models recovery state_moves stuck_groups take_over))
# Of the test cluster: how many nodes, its name, and more options for `up`.
NODES ?= 4
CLUSTER ?= liver
CLUSTER_ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# What is started below finds the environment's programs first.
export PATH := $(abspath $(BIN)):$(PATH)
export CUDA_VISIBLE_DEVICES = $(GPUS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Else each of hundreds of processes would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo slurm-demo test test-all test-gpu check docs format clean
.PHONY: cluster-up cluster-down cluster-shell

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' \
		| expand -t 20
	@echo
	@echo 'variables: PYTHON VENV TORCH TORCH_PIP_ARGS PYTEST_ARGS PYTEST_WORKERS DEMO_ARGS GPUS' \
		'GPU_TESTS NODES CLUSTER CLUSTER_ARGS'

install: $(INSTALLED) ## the virtual environment with everything in it

$(INSTALLED): pyproject.toml tests/engine/requirements.txt
	@test -n "$(PYTHON)" || { echo 'make: no Python 3.11 or newer on the path;' \
		'name one: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_PIP_ARGS) '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/transformer-engine \
		-r tests/engine/requirements.txt
	@touch $@

demo: $(INSTALLED) ## a GPT on real text whose shape changes live, several times
	$(BIN)/liver submit --config configs/demo.yaml --follow $(DEMO_ARGS)

slurm-demo: $(INSTALLED) ## the same on a test cluster whose nodes come and go; as root
	$(BIN)/python -m slurm.demo $(DEMO_ARGS)

test: $(INSTALLED) ## the whole test suite; more flags for pytest in PYTEST_ARGS
	$(BIN)/python -m pytest -q -rs --durations=15 -n $(PYTEST_WORKERS) --dist loadfile \
		--no-loadscope-reorder $(PYTEST_ARGS)

test-all: ## the test suite with what takes minutes: mistakes made in the core, many more schedules
	$(MAKE) test PYTEST_ARGS="-m 'long or not long' $(PYTEST_ARGS)"

test-gpu: GPUS = 0
test-gpu: $(INSTALLED) ## on a machine with a GPU: what a handoff does on it, and over NCCL
	$(BIN)/python -m pytest -q -rs --durations=15 -n 2 --dist loadfile $(GPU_TESTS) $(PYTEST_ARGS)

# The cluster needs nothing from the environment, and as root only: its jobs may use it.
TESTBED = $(PYTHON) -m slurm.testbed --name $(CLUSTER)

cluster-up: ## a Slurm of NODES=4 nodes on this machine, as root
	@$(TESTBED) up --nodes $(NODES) $(if $(wildcard $(VENV)),--share $(abspath $(VENV))) \
		$(CLUSTER_ARGS)

cluster-down: ## removes it, whatever state it is in
	@$(TESTBED) down

cluster-shell: ## a shell in which sbatch, srun and liver reach it
	@$(TESTBED) shell

check: $(INSTALLED) ## format, lint and types, as CI runs them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(INSTALLED) ## docs/reference anew, from the code
	$(BIN)/python -m docs.generate

format: $(INSTALLED) ## rewrites the sources in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## removes the environment and caches; runs/ and data/ stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
