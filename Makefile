# DOLL's development commands. `make` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV   := .venv
BIN    := $(VENV)/bin
UV     := $(BIN)/uv
UV_PIN := 0.13.8
# Empty: torch from the package index (on Linux with CUDA). cpu: torch's CPU build, 2 GB smaller.
TORCH ?=
STAMP := $(VENV)/.doll-setup$(if $(TORCH),-$(TORCH))
JOB   ?= examples/digits/job.yaml
SEED  ?= 0
# Tests mostly wait for processes and timeouts. Each test process has its own Kafka broker and Redis.
TESTERS ?= 3
# Whole modules in the order of their folders: the long end-to-end tests begin, and short modules fill the rest.
DISTRIBUTE := -n $(TESTERS) --dist loadscope --no-loadscope-reorder
SECONDS ?= 3600
PYTEST  ?=

.PHONY: help setup demo demo-spot test test-all test-fast test-slow test-worlds check lint type fmt bench bench-docs bench-where bench-engine bench-control bench-overhead bench-soak bench-cluster bench-clicks bench-faults bench-fleets bench-hosts compose-check bench-large bench-links bench-stages bench-accuracy paper paper-live paper-check build release lock wheels clean tf-check tf-apply-local

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  JOB=file.yaml   the job that \`make demo\` runs (default $(JOB))"
	@echo "  TESTERS=3       number of test processes of \`make test\`; PYTEST=\"-k word\": more arguments for pytest"
	@echo "  TORCH=cpu       install torch's CPU build from torch's own index (2 GB less to download)"
	@echo "  DOLL_CACHE_DIR=dir  cache of Kafka's jars (default ~/.cache/doll); DOLL_MAVEN_REPOSITORY=url: a mirror of Maven Central"

setup: $(STAMP) ## install everything into .venv (needs Python >= 3.11 and nothing else)

# The stamp is newer than its prerequisites, so a second run does nothing.
$(STAMP): requirements.lock pyproject.toml lab/pyproject.toml doll/local/kafka-jars.txt
	@echo "[1/4] Python environment in $(VENV)"
	@if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
	  for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then echo "expected Python >= 3.11 on PATH, found none: install it" >&2; exit 1; fi; \
	  $$found -m venv --clear $(VENV) || { echo "the venv module is missing (Debian: apt-get install python3-venv)" >&2; exit 1; }; \
	fi
	@rm -f $(VENV)/.doll-setup*
	@if [ "$$($(UV) --version 2> /dev/null | cut -d ' ' -f 2)" != $(UV_PIN) ]; then \
	  $(BIN)/python -m ensurepip --default-pip > /dev/null; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_PIN); \
	fi
	@echo "[2/4] packages of requirements.lock"
ifeq ($(TORCH),)
	@$(UV) pip sync --compile-bytecode --python $(BIN)/python --require-hashes requirements.lock
else
	@# The lock has the hashes of the index's torch; the other build comes from another index and needs no CUDA packages.
	@awk '/^[a-z]/ {skip = /^(torch|triton|nvidia-|cuda-)/} !skip' requirements.lock > $(VENV)/requirements.$(TORCH).txt
	@$(UV) pip sync --compile-bytecode --python $(BIN)/python --require-hashes $(VENV)/requirements.$(TORCH).txt
	@$(UV) pip install --python $(BIN)/python --torch-backend $(TORCH) "$$(awk '/^torch==/ {print $$1}' requirements.lock)"
endif
	@echo "[3/4] doll and doll-lab, editable"
	@$(UV) pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation --editable . --editable ./lab
	@echo "[4/4] jars of the local Kafka broker"
	@$(BIN)/python -m doll.local.kafka_jars
	@touch $@
	@echo "done: \`make demo\` runs a job, \`make test\` the tests, $(BIN)/doll --help shows the commands"

demo: setup ## run JOB on this machine, with live progress
	@$(BIN)/doll up $(JOB)

demo-spot: setup ## run a job on a replayed spot market on this machine (SEED=n: another market)
	@$(BIN)/doll spot market --seed $(SEED)

test: setup ## run all tests but those of adapters' worlds (Ray, Kubernetes, ...): about 25 minutes on two cores
	@$(BIN)/python -m pytest $(DISTRIBUTE) --worlds=none $(PYTEST)

test-slow: setup ## run the tests of `make test` that `make test-fast` leaves out
	@$(BIN)/python -m pytest $(DISTRIBUTE) -m slow --worlds=none $(PYTEST)

test-worlds: setup ## run the tests of the worlds (tests/worlds.toml) whose sources have changed since they last passed
	@worlds="$$($(BIN)/python tests/support/worlds.py changed)"; \
	if [ -z "$$worlds" ]; then echo "no world has changed since its tests last passed"; exit 0; fi; \
	echo "changed: $$worlds"; \
	$(BIN)/python -m pytest $(DISTRIBUTE) --worlds="$$worlds" $(PYTEST); \
	$(BIN)/python tests/support/worlds.py record $${worlds//,/ }

test-all: setup ## run every test with all of its random examples: above an hour
	@DOLL_EXAMPLES=all $(BIN)/python -m pytest $(DISTRIBUTE) $(PYTEST)
	@$(BIN)/python tests/support/worlds.py record

test-fast: setup ## run the tests without servers, torch and long runs: about a minute
	@$(BIN)/python -m pytest $(DISTRIBUTE) -m "not slow" --durations=5 --durations-min=0.5 $(PYTEST)

lint: setup ## check style, formatting, which package imports which, replaced words, and logic that stands twice
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q --worlds=prose

type: setup ## check types
	@$(BIN)/mypy

tf-check: setup ## check deploy/terraform: fmt, validate, terraform test, checkov (needs terraform and its AWS provider)
	@$(BIN)/python deploy/terraform/local.py check

tf-apply-local: setup ## apply and destroy deploy/terraform against a mock of AWS (moto, on loopback)
	@$(BIN)/python deploy/terraform/local.py apply

check: lint type test tf-check ## everything that CI checks

fmt: setup ## format the code and apply automatic fixes
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench: setup ## compare DOLL with reference programs (BENCH=--quick: 8 minutes); results in benchmarks/results
	@$(BIN)/python -m benchmarks.pipeline $(BENCH)

bench-docs: setup ## put the tables of the last `make bench` into docs/benchmarks.md
	@$(BIN)/python -m benchmarks.report --docs $(BENCH)

bench-where: setup ## where the time goes: CPU time by process, thread and Python function (2 minutes)
	@$(BIN)/python -m benchmarks.where $(BENCH)

bench-engine: setup ## what one event costs the engine, with 10 to 10,000 workers (2 minutes)
	@$(BIN)/python -m benchmarks.engine $(BENCH)

bench-control: setup ## time and CPU of a grant and its push over Kafka, Redis and a local socket (2 minutes)
	@$(BIN)/python -m benchmarks.control_channel $(BENCH)

bench-overhead: setup ## measure the cost of durability without faults (10 minutes)
	@$(BIN)/python -m benchmarks.overhead $(BENCH)

bench-soak: setup ## measure memory growth: an hour at full speed with preemptions (SECONDS=300: a trial)
	@$(BIN)/python -m benchmarks.soak --seconds $(SECONDS)

bench-cluster: setup ## measure pauses with three brokers, one killed every 20 s (6 minutes)
	@$(BIN)/python -m benchmarks.cluster $(BENCH)

bench-faults: setup ## samples learned with a fault every 29 s by those without (20 minutes; BENCH=--asap: a saturated job)
	@$(BIN)/python -m benchmarks.faults $(BENCH)

bench-hosts: setup ## rates of policies on hosts far from each other, and faults between them (root, Linux; BENCH="--faults 60 ...")
	@$(BIN)/python -m benchmarks.hosts $(BENCH)

compose-check: setup ## docker-compose.yml on this machine's docker engine: build, a job with kills, a refusal, a standby (needs the engine)
	@$(BIN)/python deploy/compose_check.py

bench-large: setup ## measure one update of models of 0.1 to 400 MB, in shared memory and Redis (5 minutes, 10 GB of memory)
	@$(BIN)/python -m benchmarks.large_models $(BENCH)

bench-stages: setup ## pipelines of virtual workers against their simulator, and their memory (6 minutes)
	@$(BIN)/python -m benchmarks.virtual_workers $(BENCH)

bench-accuracy: setup ## virtual workers against undivided ones: accuracy after the same samples (12 minutes)
	@$(BIN)/python -m benchmarks.pipeline_accuracy $(BENCH)

bench-links: setup ## time and CPU of messages between two stages: sockets, shared memory, gloo (3 minutes)
	@$(BIN)/python -m benchmarks.stage_links $(BENCH)

bench-clicks: setup ## sparse logistic regression against River and Vowpal Wabbit (10 minutes; needs pip install .[bench])
	@$(BIN)/python -m benchmarks.clicks $(BENCH)

bench-fleets: setup ## measure one server with 8, 64 and 256 stub workers (6 minutes)
	@$(BIN)/python -m benchmarks.fleets $(BENCH)

paper: setup ## reproduce the papers' figures and tables from committed code, write docs/results.md (PAPER=--quick: a look, no docs)
	@$(BIN)/python -m benchmarks.paper $(PAPER)

paper-live: setup ## the papers' experiments on real jobs and the papers' data (ONLY=name,name; WRITE=1: docs/live.md; LIVE=--list)
	@$(BIN)/python -m benchmarks.live $(if $(ONLY),--only $(ONLY)) $(if $(WRITE),--write) $(LIVE)

paper-check: setup ## list figures of the documents whose code has changed since their commit, and commits that do not exist
	@$(BIN)/python -m benchmarks.provenance

build: setup ## build the wheel and the source archive, and doll-lab's wheel, into dist/
	@$(BIN)/python -m build --no-isolation
	@$(BIN)/python -m build --no-isolation --wheel --outdir dist lab

release: setup ## make and check all files of a release in dist/, without publishing (VERSION=x.y.z)
	@TORCH=$(TORCH) $(BIN)/python deploy/release.py $(VERSION)

lock: setup ## resolve the versions of all packages and write requirements.lock
	@$(UV) pip compile --quiet --upgrade --generate-hashes --no-emit-index-url --no-emit-find-links --universal \
	  --python-version 3.11 --extra dev --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml
	@$(UV) pip compile --quiet --upgrade --generate-hashes --no-emit-index-url --no-emit-find-links --universal \
	  --python-version 3.11 --custom-compile-command "make lock" --output-file deploy/terraform/checkov.lock \
	  deploy/terraform/checkov.in
	@if grep -nE 'https?:|--(find-links|index-url|extra-index-url)' requirements.lock deploy/terraform/checkov.lock; then \
	  echo "a lock contains an address: expected names and hashes only" >&2; exit 1; fi
	@$(BIN)/python deploy/wheels.py

wheels: setup ## query the registry for arm64 wheels (Linux, macOS) of requirements.lock; writes deploy/wheels.txt
	@$(BIN)/python deploy/wheels.py

clean: ## remove build results and caches, except .venv and runs/
	@rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
