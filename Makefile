# Everything a person or a machine does with this checkout. Needs python3.11 and nothing else:
# `setup` makes .venv with all extras and tools, and every other target calls it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# One thread per process: on a few cores, idle OpenMP threads that spin cost more than they give.
# Byte code is kept, whatever the shell says: the tests start hundreds of processes.
ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=

# A virtual environment whose Python is gone is of no use to anybody: it is made anew.
ANEW = $(shell test -f $(1)/pyvenv.cfg && ! $(1)/bin/python -c '' 2> /dev/null && echo --clear)

.PHONY: help setup quickstart test pytest test-docs test-slow lint type bench learn learn-kinds learn-dqn learn-atari learn-sac-td3 learn-quickstart ablation resume-check faults faults-beside-sb3 clean
.DEFAULT_GOAL := help
SEED ?= 1
QUICK := $(if $(wildcard $(STAMP)),$(VENV),.venv-quickstart)

help:  ## show this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## make .venv with all extras and tools (once)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing everything into .venv (a few minutes) ..."
	$(PY) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(call ANEW,$(VENV)) $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	touch $@

# Types are checked beside the tests, which now and then only wait.
test: lint  ## lint, types and all tests of the code, in minutes
	$(MAKE) --no-print-directory -j 2 type pytest

# One worker more than two cores: some tests wait, for a time-out or for another process.
pytest: setup
	$(ENV) $(PY) -m pytest -n 3 --dist worksteal

test-docs: setup  ## every command and example of README and docs, carried out in small (a minute)
	$(ENV) $(PY) -m pytest -n 2 --dist worksteal -m pages

test-slow: setup  ## the tests that wait for torch.compile (minutes)
	$(ENV) $(PY) -m pytest -m slow

lint: setup  ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

type: setup  ## mypy, strict on the package
	$(PY) -m mypy

# An existing .venv has all it needs; without one, only what it needs is installed.
quickstart: $(QUICK)/.installed  ## train, evaluate, draw and film an agent in minutes (SEED=1)
	$(ENV) $(QUICK)/bin/python scripts/quickstart.py --seed $(SEED)

.venv-quickstart/.installed: pyproject.toml constraints.txt
	@echo "Installing the core, dmc, video and report into .venv-quickstart (a few minutes) ..."
	@began=$$(date +%s) && \
	{ .venv-quickstart/bin/python -m pip --version > /dev/null 2>&1 || \
		$(PYTHON) -m venv $(call ANEW,.venv-quickstart) .venv-quickstart; } && \
	.venv-quickstart/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[dmc,video,report]' && \
	touch $@ && echo "Set-up took $$(($$(date +%s) - began)) s."

bench: setup  ## speed against arithmetic limits; prints ratios, writes JSON (half an hour)
	$(PY) benchmarks/tdmpc2_speed.py
	$(PY) benchmarks/pixel_speed.py
	$(PY) benchmarks/replay_speed.py
	$(PY) benchmarks/per_speed.py
	$(PY) benchmarks/offline_speed.py
	$(PY) benchmarks/atari_env_speed.py
	$(PY) benchmarks/categorical_speed.py
	$(PY) benchmarks/dqn_speed.py
	$(PY) benchmarks/sac_td3_speed.py

learn: setup  ## the learning runs behind docs/results (hours)
	$(PY) benchmarks/learning.py

learn-kinds: setup  ## likewise for discrete actions, pixels and recorded data, resumable (hours)
	$(ENV) $(PY) benchmarks/learning_kinds.py

learn-dqn: setup  ## plain, modern and Rainbow DQN on MinAtar, three seeds, resumable (hours)
	$(ENV) $(PY) benchmarks/dqn_learning.py

learn-atari: setup  ## dqn_modern for 200,000 decisions of an Atari game, three seeds, resumable (hours)
	$(ENV) $(PY) benchmarks/atari_learning.py

learn-sac-td3: setup  ## SAC and TD3 beside Stable-Baselines3, three seeds, resumable (hours)
	$(ENV) $(PY) benchmarks/sac_td3_learning.py

ablation: setup  ## do auxiliary discounts help? 30 runs, resumable (hours)
	$(ENV) $(PY) benchmarks/multi_gamma_ablation.py

learn-quickstart: setup  ## the quickstart with seeds 1, 2 and 3, for docs/results (half an hour)
	$(ENV) $(PY) benchmarks/quickstart.py

resume-check: setup  ## kill runs with -9, resume them, compare bit for bit
	$(ENV) $(PY) scripts/faults/exact_resume.py

faults: setup  ## 200 real kills and 200 flipped bits: does every run resume? (minutes)
	$(ENV) $(PY) scripts/faults/kills_and_flips.py

faults-beside-sb3: setup  ## the same faults done to Stable-Baselines3 and to us, in a table
	$(ENV) $(PY) scripts/faults/beside_sb3.py

clean:  ## remove .venv, .venv-quickstart and caches; runs/ stays
	rm -rf $(VENV) .venv-quickstart .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null; true
