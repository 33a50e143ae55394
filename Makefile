# Every target sets up what it needs in .venv, and no more; no root rights. Outside this folder: pip's cache, and in the
# user's cache folder the widened demo target and environments of other engines.
.DEFAULT_GOAL := help
.PHONY: help venv protos check style test test-rest test-avx2 test-all up demo bench train chaos load locust docs clients-test k8s-test \
  vllm-test wheel-test sbom clean
SHELL := /bin/bash
# Packages are installed uncompiled, and Python compiles what it imports: without keeping it, in every process anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVE := $(VENV)/serve.stamp
DEV := $(VENV)/dev.stamp
PROTOC := .build/protoc
PROTOC_STAMP := $(PROTOC)/.stamp
PROTOS := $(wildcard protos/paceline/rpc/v1/*.proto)
GENERATED := services/paceline/rpc

help: ## this list
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(DEV) ## set up .venv with everything; make demo and make up set up what serves, and no more

$(VENV)/%.stamp: pyproject.toml constraints.txt k8s/requirements.txt services/paceline/__init__.py
	@$(PYTHON) tools/set_up.py $* --venv $(VENV)

$(PROTOC_STAMP): Makefile
	test -x $(PROTOC)/bin/python || $(PYTHON) -m venv $(PROTOC)
	$(PROTOC)/bin/python -m pip install --quiet --disable-pip-version-check \
	  grpcio-tools==1.71.2 mypy-protobuf==3.7.0 'setuptools<81'
	@touch $@

# The oldest grpcio-tools we support: generated code may not be newer than the runtime.
protos: $(PROTOC_STAMP) $(DEV) ## regenerate services/paceline/rpc from protos/
	PATH="$(PROTOC)/bin:$$PATH" $(PROTOC)/bin/python -m grpc_tools.protoc -I protos --python_out=services \
	  --grpc_python_out=services --mypy_out=services --mypy_grpc_out=services $(PROTOS)

style: $(DEV) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(DEV) protos ## lint, types, import law, generated code up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@test -z "$$(git status --porcelain -- $(GENERATED))" || \
	  { git status --short -- $(GENERATED); echo "generated code is not up to date: commit what make protos made"; exit 1; }

# Files side by side, in order: whole fleets come early, and what is short fills up the rest.
WORKERS ?= 2
PYTEST = $(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder
test: $(DEV) ## what a change usually breaks, in some 5 minutes; WORKERS=4 for more than 2, ARGS='tests/unit -x' for some
	$(PYTEST) -m 'not full and not podman and not vllm and not wheel' $(ARGS)

test-rest: $(DEV) ## what make test leaves out: Ray, chaos, TLS, laws of all rules, generated requests, browsers
	$(PYTEST) -m 'full and not podman and not vllm and not wheel' $(ARGS)

# numba, oneDNN and ATen by their own variables.
AVX2 = NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
test-avx2: $(DEV) ## what depends on the CPU, as a machine without AVX-512 runs it
	$(AVX2) $(PYTEST) -m 'not full and not podman and not vllm and not wheel' $(ARGS) tests/unit/engine \
	  tests/unit/forest tests/unit/drafting tests/unit/test_kernel_cache.py tests/integration/test_rules_in_engines.py

test-all: test test-rest ## all tests

up: $(SERVE) ## serve the demo pair until Ctrl-C; ARGS='--model smollm2' for a model that talks, or --model PATH --draft-model PATH
	$(BIN)/paceline up $(ARGS)

demo: $(SERVE) ## stream completions with and without speculation and compare them
	$(BIN)/paceline demo $(ARGS)

bench: $(DEV) ## run a bench: make bench NAME=concurrency; without NAME lists them
	$(BIN)/python -m loadtest $(NAME) $(ARGS)

# A machine with a GPU brings a torch of its own: nothing is installed.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
.PHONY: gpu-contact
gpu-contact: ## all that a machine with a GPU can tell in 8 minutes, into reports/; without a GPU it exits 3
	PYTHONPATH=services:. $(GPU_PYTHON) -m loadtest.gpu $(ARGS)

OUT ?= runs/demo
train: $(DEV) ## make the demo models anew, into OUT=runs/demo; some hours on two cores
	$(BIN)/python -m training demo --out $(OUT) $(ARGS)

chaos: $(DEV) ## break a whole fleet while streams run, and compare every token; ARGS='--seconds 60 --streams 200'
	$(BIN)/python -m loadtest chaos $(ARGS)

# A trace is replayed at length and in all modes, a generated load briefly and as it is served.
MINUTES ?= $(if $(TRACE),10,2)
RATE ?= 1
SPECULATION ?= $(if $(TRACE),all,adaptive)
load: $(DEV) ## replay arrivals, open loop: TRACE=file MINUTES=10 RATE=1 SPECULATION=all; without TRACE 2 minutes made up
	$(BIN)/python -m loadtest load $(if $(TRACE),--trace '$(TRACE)') --minutes $(MINUTES) --rate $(RATE) \
	  --speculation $(SPECULATION) $(ARGS)

locust: $(DEV) ## users of both doors in ramps and spikes; ARGS='--shape ramp --users 16 --seconds 120'
	$(BIN)/python -m loadtest locust $(ARGS)

.PHONY: references modules count
references: $(DEV) ## write the reference pages of docs/ from the code, after a change of flags, fields or metrics
	$(BIN)/python -m tests.support.references

modules: ## list every module with the first sentence of its docstring
	@$(PYTHON) tools/modules.py

count: ## lines, classes, functions and modules by feature
	@$(PYTHON) tools/count.py $(ARGS)

docs: $(DEV) ## the site of the docs, into reports/site, by a tool in an environment of its own
	$(BIN)/python -m tests.support.site

clients-test: $(DEV) ## tests of real clients (OpenAI's, Anthropic's, LangChain and others), in an environment of their own
	$(BIN)/python -m tests.support.client_suite $(ARGS)

k8s-test: $(DEV) ## build the images and start the chart's cpu-demo with podman; ARGS=--keep-images for another run soon
	$(BIN)/pytest tests/k8s -m podman $(ARGS)

vllm-test: $(DEV) ## the drafter tier under a real vLLM, in an environment of its own in the user's cache
	$(BIN)/python -m tests.vllm $(ARGS)

wheel-test: $(DEV) ## build the wheel, install it into an empty environment and run it there
	$(BIN)/pytest tests/wheel -m wheel $(ARGS)

# Of what is installed in .venv; SBOM_OF=/opt/paceline/bin/python for another environment.
SBOM_OF ?= $(BIN)/python
sbom: $(SERVE) ## write sbom.json, the software bill of materials (CycloneDX) of what .venv holds
	test -x .build/sbom/bin/python || $(PYTHON) -m venv .build/sbom
	.build/sbom/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0
	.build/sbom/bin/cyclonedx-py environment --output-reproducible -o sbom.json $(SBOM_OF)

clean: ## remove environments and caches
	rm -rf $(VENV) .build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
