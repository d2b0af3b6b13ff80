# The targets for developers and CI. `make` lists them.

PYTHON ?= python3
VENV ?= .venv
# For example the index of PyTorch's CPU builds, on a machine without a GPU: by default torch brings
# several gigabytes of CUDA libraries.
PIP_FLAGS ?=
PROTO_OUT ?= .
# Three workers for two cores: tests that start clusters all run on one of them (tests/conftest.py),
# and mostly wait. The slowest tests are listed, so that nobody has to look for what takes the time.
PYTEST_FLAGS ?= -n 3 --no-loadscope-reorder --durations=20

BIN := $(VENV)/bin
INSTALL := $(BIN)/python tools/install.py
# The inputs of the installed native extension.
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -type f)
ENV := $(VENV)/.env-stamp
ENV_TEST := $(VENV)/.env-test-stamp

.DEFAULT_GOAL := help
.PHONY: help env env-test demo check test test-long test-upgrade test-ramp test-ray lint types contracts house gpu-check real wheel lock kustomize proto demo-model clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1|\2/' | column -t -s '|'

env: $(ENV) ## create .venv and install pdserve; repeated only if the build's inputs changed

env-test: $(ENV_TEST) ## the same, with the dependencies of the tests

demo: $(ENV) ## start a cluster, ask the demo model some questions, stop it again
	$(BIN)/pdserve demo

check: lint types contracts test ## everything that has to hold before a change goes in

test: $(ENV_TEST) ## run the tests: one case of each feature
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not long" $(PYTEST_FLAGS) # a hundred processes import us

test-long: $(ENV_TEST) ## run the matrices too: families x formats x modes x kills
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(PYTEST_FLAGS)

test-ray: $(ENV_TEST) ## install Ray, and run a cluster on three of its machines, all of them here
	$(INSTALL) '.[test,ray]' $(PIP_FLAGS)
	$(BIN)/python -m pytest tests/cluster/commands/test_ray*.py tests/deploy/test_ray_machines.py

lint: $(ENV_TEST) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@! git log -20 --no-merges --format='subject over 72 characters: %s' 2>/dev/null | grep -E '.{101}'

types: $(ENV_TEST) ## mypy --strict
	$(BIN)/mypy

contracts: $(ENV_TEST) ## import-linter: which packages may import which
	$(BIN)/lint-imports

house: $(ENV) ## what is long, big or there twice in this source tree, and what a chat enters
	$(BIN)/python -m tools.house --chat

gpu-check: $(ENV_TEST) ## on a machine with a GPU: tests, steps, transfers, serving; results in gpu-check/
	$(BIN)/python -m tools.gpu_check

test-upgrade: $(ENV_TEST) ## build an earlier commit, and roll this tree out over it under load, and back
	$(BIN)/python -m tools.earlier_build $(PIP_FLAGS)
	$(BIN)/python -m pytest tests/faults/test_upgraded.py tests/faults/test_protocols.py

test-ramp: $(ENV_TEST) ## real processes that follow a public ramp, for MINUTES=60 (at least 12)
	PDSERVE_RAMP_MINUTES=$(or $(MINUTES),60) $(BIN)/python -m pytest -s tests/cluster/commands/test_ramp.py

real: $(ENV_TEST) ## fetch Gemma 3 270M (or GEMMA=FILE), hold it to transformers, time it beside llama.cpp
	$(BIN)/python -m tools.real_model $(if $(GEMMA),--gemma "$(GEMMA)")

wheel: $(ENV) ## dist/: one wheel for machines of this kind, which needs no compiler there
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

lock: $(ENV_TEST) ## resolve the packages of the image anew: deploy/requirements.lock
	$(BIN)/python tools/lock.py

kustomize: $(ENV_TEST) ## deploy/kustomize: what the chart makes of its defaults
	$(BIN)/python -m tools.kustomize

proto: $(ENV_TEST) ## regenerate the gRPC stubs
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(PROTO_OUT) --pyi_out=$(PROTO_OUT) \
		--grpc_python_out=$(PROTO_OUT) proto/pdserve/wire/*.proto

demo-model: $(ENV_TEST) ## retrain the bundled demo model, and its draft model
	$(BIN)/python -m tools.demo_model.train
	$(BIN)/python -m tools.demo_model.train --draft

clean: ## remove build outputs and caches, but not .venv
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdserve needs Python >= 3.11")'
	$(PYTHON) -m venv $(VENV)

$(ENV): $(SOURCES) | $(BIN)/python
	$(INSTALL) . $(PIP_FLAGS)
	@touch $@

$(ENV_TEST): $(SOURCES) | $(BIN)/python
	$(INSTALL) '.[test]' $(PIP_FLAGS)
	-$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --no-deps --ignore-requires-python helm-sdkpy==0.1.32 # says 3.12, runs on 3.11
	@touch $(ENV) $@
