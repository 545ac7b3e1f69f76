# `make demo` and `make test` work in a fresh clone; a second run starts where the first ended.
# PYTHON is an interpreter, or for the GPU kit a version.
PYTHON ?= python3
INTERPRETER := $(if $(filter 3.%,$(PYTHON)),python3,$(PYTHON))
BIN := .venv/bin

.PHONY: demo test test-fast check format bench gpu gpu-kit clean
.DELETE_ON_ERROR:

demo: .venv/demo
	$(BIN)/python examples/demo.py

test: .venv/dev
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(PYTEST)

# While working: what starts neither a model process nor a cluster.
FAST := config control launch placement queue schedule schema simulation stores sandbox/protector gateway \
	cluster cli/test_commands.py cli/test_light.py cli/test_every_command.py test_imports.py test_prose.py
SLOW := sandbox/protector/test_generations.py gateway/test_bad_input.py gateway/test_hf_mirror.py \
	cluster/ray stores/objects/test_s3.py

test-fast: .venv/dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(addprefix --ignore=tests/,$(SLOW)) \
		$(addprefix tests/,$(FAST)) $(PYTEST)

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/dev
	$(BIN)/python -m bench

# An unpacked kit has wheels, and makes its environment of them (docs/gpu.md). STAGES: probe tests benchmark
gpu: $(if $(wildcard wheels),,.venv/dev)
	$(INTERPRETER) tests/gpu/start.py $(STAGES)

gpu-kit: .venv/dev
	$(BIN)/python tests/gpu/kit.py $(or $(filter 3.%,$(PYTHON)),3.12)

.venv/made:
	@$(INTERPRETER) -m venv .venv || { echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }
	@touch $@

# The constraints pin what works together; pip's own notices are not ours to pass on.
.venv/demo: .venv/made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,science]'
	@touch $@

.venv/dev: .venv/made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,science,dev]'
	@touch $@ .venv/demo

clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache bench/results build
