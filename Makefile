# Everything a developer does, and what .ci/run does. `make` lists the targets.

PYTHON ?= python3
VENV ?= .venv
# For example an index that has PyTorch's CPU builds, on a machine without a GPU: the CUDA libraries
# that torch brings otherwise are several gigabytes.
PIP_FLAGS ?=
PROTO_OUT ?= .
# Two workers: one soon has the tests that start clusters, the other everything else.
PYTEST_FLAGS ?= -n 2 --no-loadscope-reorder

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
# What the installed native extension is built from.
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -type f)
ENV := $(VENV)/.env-stamp
ENV_TEST := $(VENV)/.env-test-stamp

.DEFAULT_GOAL := help
.PHONY: help env env-test demo test lint types contracts proto demo-model clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1|\2/' | column -t -s '|'

env: $(ENV) ## create .venv with pdserve in it; again only when the build's inputs changed

env-test: $(ENV_TEST) ## the same, with what the tests need

demo: $(ENV) ## start a cluster, ask the demo model something, stop the cluster
	$(BIN)/pdserve demo

test: $(ENV_TEST) ## run every test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: $(ENV_TEST) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(ENV_TEST) ## mypy --strict
	$(BIN)/mypy

contracts: $(ENV_TEST) ## who may import whom
	$(BIN)/lint-imports

proto: $(ENV_TEST) ## generate the gRPC stubs anew
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(PROTO_OUT) --pyi_out=$(PROTO_OUT) \
		--grpc_python_out=$(PROTO_OUT) proto/pdserve/wire/*.proto

demo-model: $(ENV_TEST) ## train the bundled demo model anew
	$(BIN)/python -m pdserve.demo_model.train

clean: ## remove what was built and cached; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdserve needs Python >= 3.11")'
	$(PYTHON) -m venv $(VENV)

$(ENV): $(SOURCES) | $(BIN)/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(ENV_TEST): $(SOURCES) | $(BIN)/python
	$(PIP_INSTALL) --editable '.[test]'
	@touch $(ENV) $@
