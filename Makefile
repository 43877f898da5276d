# make train | test | lint | bench | peers | learn; everything goes into .venv
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: setup train test lint bench peers learn clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
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

# against rsl-rl-lib, rl-games, skrl, stable-baselines3 and a LeanRL-style loop, in an environment of their own
peers: setup
	$(BIN)/python -m benchmarks.peers

# the long learning runs
learn: setup
	$(BIN)/python -m benchmarks.learning

clean:
	rm -rf $(VENV) .tr36 .venv-peers
