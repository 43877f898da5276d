# make help lists the targets; everything goes into .venv
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
.DEFAULT_GOAL := setup

.PHONY: help setup train test ray lint audit bench compare mutants peers outward soak learn gpu-check gpu-check-wheels clean

# the targets: each with the comment above it
help:
	@awk '/^# /{text=text substr($$0, 2) " "; next} /^[a-z-]+:( |$$)/{sub(":.*", ""); printf "%-18s%s\n", $$0, text} {text=""}' Makefile

# .venv with all that a developer needs
setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch, gpurl and what a developer needs into $(VENV): two to five minutes, mostly of downloads"
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,mujoco]'
	touch $@

# the other versions of triton that kernels are compiled and launched with
.tritons/.installed: $(VENV)/.installed tests/tritons.py
	GPURL_TRITONS=.tritons $(BIN)/python -m tests.tritons
	touch $@

# PPO on 4096 Chasing environments; on a GPU 100 M steps, on a CPU what two minutes allow
train: setup
	$(BIN)/gpurl train ppo chasing --num-envs 4096 --total-steps 100_000_000 --max-seconds 110 --eval-every 4_000_000

# bytecode is written whatever the caller's shell says: tests start hundreds of processes
FOR_TESTS = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1

# ruff, mypy, all tests: about 25 minutes on two cores
test: setup .tritons/.installed lint
	$(FOR_TESTS) GPURL_TRITONS=.tritons $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not ray'

# populations on Ray, 3 minutes on two cores; skipped where Ray is not installed
ray: setup
	@if $(BIN)/python -c 'import ray' 2>/dev/null; \
	then OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray tests/cluster; \
	else echo "skipped: Ray is not installed: pip install -e '.[ray]' -c constraints.txt"; fi

# ruff and mypy
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# known vulnerabilities of the tested set, asked of a service on the network: not part of test, which needs none
audit:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet pip-audit
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

# throughput and kernels of this machine, into benchmarks/results
bench: setup
	$(BIN)/gpurl bench --out benchmarks/results

BASE ?= HEAD~1
# this tree against another commit (BASE), in turns: the ratio of their times with its interval
compare: setup
	$(BIN)/python -m tests.tools.against $(BASE)

# one small mistake at a time in losses, buffers and kernels' references: do the tests see it? one core
mutants: setup
	$(BIN)/python -m tests.tools.mutants

# against rsl-rl-lib, rl-games, skrl, stable-baselines3, torchrl and loops written here, in an environment of their own
peers: setup
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.peers --case pursuit --num-envs 1024 --iterations 3 --warm-up 2
	$(BIN)/python -m benchmarks.off_policy

# those trainers on our environments, in the same environment: what they store is what was played
outward: setup
	$(BIN)/python -m benchmarks.peers.installation
	OMP_NUM_THREADS=1 .venv-peers/bin/python -m pytest tests/adapters tests/cli/test_foreign_policies.py

# on a machine with a GPU and no network, with the Python there that has torch (PYTHON=...): measurements, then tests, 9 minutes each;
# ARGS="--half measure" or "--half tests" runs one of them
gpu-check:
	$(PYTHON) -m tests.tools.gpu_check $(ARGS)

# elsewhere, before: what that machine's Python lacks, into wheels/; ARGS="--python-version 3.12 --have FILE" (a pip freeze of it)
gpu-check-wheels:
	$(PYTHON) -m tests.tools.wheels $(ARGS)

MINUTES ?= 60
# kills, random cases by the thousand, then MINUTES of trainings whose memory, handles, threads and processes must not grow
soak: setup
	$(BIN)/python -m tests.tools.soak --minutes $(MINUTES)

SUITE ?= short
# trainings that have no results yet, one a core; SUITE=full for all, which takes days; Ctrl-C stops, the same command continues;
# LEARN="--only 'ppo-*' --hours 2" for some, LEARN=--list for what is finished
learn: setup
	$(BIN)/python -m benchmarks.learning $(SUITE) $(LEARN)

# removes the environments and what tools and tests leave, not runs/ and wheels/
clean:
	rm -rf $(VENV) .tritons .venv-peers .venv-audit .gpu-check
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site *.egg-info MUJOCO_LOG.TXT
	find gpurl envs kernels tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
