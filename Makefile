# make train | test | lint | bench | peers | outward | learn; everything goes into .venv; make gpu-check for a machine with a GPU
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: setup train test lint bench mutants peers outward learn gpu-check gpu-check-wheels clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,mujoco]'
	touch $@

# the second triton that kernels are compiled with
.tr36/.installed: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target .tr36 triton==3.6.0
	touch $@

# PPO on 4096 Chasing environments; on a GPU 100 M steps, on a CPU what two minutes allow
train: setup
	$(BIN)/gpurl train ppo chasing --num-envs 4096 --total-steps 100_000_000 --max-seconds 110 --eval-every 4_000_000

test: setup .tr36/.installed lint
	OMP_NUM_THREADS=1 GPURL_TRITON36=.tr36 $(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/gpurl bench

# one small mistake at a time in losses, buffers and kernels' references: do the tests see it? half an hour of one core
mutants: setup
	$(BIN)/python -m benchmarks.mutants

# against rsl-rl-lib, rl-games, skrl, stable-baselines3, torchrl and loops written here, in an environment of their own
peers: setup
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.off_policy

# those trainers on our environments, in the same environment: what they store is what was played
outward: setup
	$(BIN)/python -m benchmarks.peers.installation
	OMP_NUM_THREADS=1 .venv-peers/bin/python -m pytest tests/gpurl/test_outward*.py

# on a machine with a GPU and no network, with the Python there that has torch (PYTHON=...): GPU tests and all measurements, 10 minutes
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check $(ARGS)

# elsewhere, before: what that machine's Python lacks, into wheels/; ARGS="--python-version 3.12 --have FILE" (a pip freeze of it)
gpu-check-wheels:
	$(PYTHON) -m benchmarks.wheels $(ARGS)

# the long learning runs
learn: setup
	$(BIN)/python -m benchmarks.learning

clean:
	rm -rf $(VENV) .tr36 .venv-peers .gpu-check
