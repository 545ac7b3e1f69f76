# `make demo` and `make test` work in a fresh clone; a second run starts where the first ended.
# PYTHON is an interpreter, or for the GPU kit a version.
PYTHON ?= python3
INTERPRETER := $(if $(filter 3.%,$(PYTHON)),python3,$(PYTHON))
BIN := .venv/bin

# Those that pyproject.toml names.
PYTHONS := $(shell sed -n 's/.*Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml)

.PHONY: demo test test-fast fuzz check resolve format docs bench bench-full gpu gpu-kit clean build up down ta
.DELETE_ON_ERROR:

# What is imported is compiled once, and not by each of many processes.
demo test test-fast: export PYTHONDONTWRITEBYTECODE :=

# Of what is installed, a fifth is compiled then; `make test` compiles all.
demo: .venv/demo
	$(BIN)/python examples/demo.py

# Most tests wait for processes, so that twice as many run as there are cores. One that hangs fails after half
# an hour, with the stacks of its processes: all attacks on the sandbox are the set-up of one test.
WORKERS ?= 4
test: .venv/dev
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --timeout 1800 --junitxml build/tests.xml $(PYTEST)

# While working: what starts no process.
test-fast: .venv/dev
	$(BIN)/python -m pytest -m unit --numprocesses 2 $(PYTEST)

# Tests that make up their input, with that many examples each. TEST_SEED repeats a run.
EXAMPLES ?= 1000
FUZZED = $(shell grep -rlE "hypothesis" tests --include "test_*.py")

fuzz: .venv/dev
	TEST_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest --hypothesis-profile fuzz -m hypothesis \
		--numprocesses $(WORKERS) $(FUZZED) $(PYTEST)

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# pip's own dry run reads markers for the Python that runs it; uv reads them for any.
resolve: .venv/dev
	@for python in $(PYTHONS); do \
		echo "constraints.txt on Python $$python"; \
		$(BIN)/uv pip compile --quiet --python-version $$python -c constraints.txt --all-extras \
			pyproject.toml > /dev/null || exit 1; \
	done

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site of the documents, in build/site; `make docs DOCS=serve` shows it as it is written.
DOCS ?= build
docs: .venv/dev
	$(BIN)/python -m mkdocs $(DOCS) --strict

# Each figure beside its limit (docs/performance.md), in ten minutes; bench-full also has what takes longer.
bench: .venv/dev
	$(BIN)/python -m bench

bench-full: .venv/dev
	$(BIN)/python -m bench --full

# An unpacked kit has wheels, and makes its environment of them (docs/gpu.md). STAGES: probe tests benchmark
gpu: $(if $(wildcard wheels),,.venv/dev)
	$(INTERPRETER) tests/gpu/start.py $(STAGES)

gpu-kit: .venv/dev
	$(BIN)/python tests/gpu/kit.py $(or $(filter 3.%,$(PYTHON)),3.12)

.venv/made:
	@$(INTERPRETER) -m venv .venv || { echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }
	@touch $@

# The constraints pin what works together. uv takes seconds where pip takes minutes; where there is no uv,
# installer.py says so, and pip installs.
INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt uv; \
	$(BIN)/python -I src/ndif/host/installer.py -c constraints.txt

.venv/demo: .venv/made pyproject.toml constraints.txt
	$(INSTALL) --no-compile -e '.[demo,science]'
	@touch $@

.venv/dev: .venv/made pyproject.toml constraints.txt
	$(INSTALL) -e '.[demo,science,dev,docs]'
	@touch $@ .venv/demo

# A server in containers (docs/deploy.md). PROFILE: cpu or gpu. TORCH_INDEX names the build of torch.
PROFILE ?= cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/$(if $(filter gpu,$(PROFILE)),cu130,cpu)
NDIF_IMAGE ?= ndif-server:$(if $(filter gpu,$(PROFILE)),cuda,cpu)
COMPOSE = TORCH_INDEX=$(TORCH_INDEX) NDIF_IMAGE=$(NDIF_IMAGE) docker compose -f deploy/docker/docker-compose.yml $(if $(wildcard .env),--env-file .env)

# Both profiles run one image, which one service builds.
build:
	$(COMPOSE) --profile $(PROFILE) build --pull api

up:
	sh deploy/docker/make-secrets.sh
	$(COMPOSE) --profile $(PROFILE) up --detach --wait --no-build

# Volumes stay: accounts, results, models.
down:
	$(COMPOSE) --profile cpu --profile gpu down --remove-orphans

ta: down build up

clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache bench/results build
