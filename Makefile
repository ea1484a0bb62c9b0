# The lanes of this project. Each sets up what it needs; `make` alone lists them.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

export PYTHON ?= python3
# One thread makes runs comparable, and on the CPU bit-identical.
export OMP_NUM_THREADS ?= 1

DEV := .venv/bin
VLLM := .venv-vllm/bin
DEV_READY := .venv/.ready
VLLM_READY := .venv-vllm/.ready
# Notices that torch and vLLM print as they start, about processors and about their own deprecated names.
QUIET_VLLM := TORCH_CPP_LOG_LEVEL=ERROR
SEED ?= 0
REQUESTS ?= 3000
BENCH ?=

.PHONY: help
help: ## list the targets
	@echo "make TARGET, where TARGET is one of"
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ------------------------------------------------------------------------------------------ environments

$(DEV_READY): requirements/dev.txt pyproject.toml tools/venv.sh
	@tools/venv.sh .venv requirements/dev.txt "everything but vLLM"
	@touch $@

$(VLLM_READY): requirements/vllm.txt pyproject.toml tools/venv.sh
	@tools/venv.sh .venv-vllm requirements/vllm.txt "vLLM on the CPU, about 3.5 GB" --no-deps
	@touch $@

.PHONY: venv venv-vllm lock
venv: $(DEV_READY) ## set up .venv
venv-vllm: $(VLLM_READY) ## set up .venv-vllm (about 3.5 GB)

lock: $(DEV_READY) ## write requirements/dev.txt anew from .venv
	@grep '^#' requirements/dev.txt >.venv/lock.txt
	@$(DEV)/python -m pip freeze --exclude-editable 2>/dev/null | sed -E 's/^(torch==[0-9.]+)\+.*/\1/' >>.venv/lock.txt
	@mv .venv/lock.txt requirements/dev.txt

# ------------------------------------------------------------------------------------------ see it work

.PHONY: demo demo-vllm
demo: $(DEV_READY) ## the worked example, then random requests, cache on against cache off (no vLLM needed)
	@$(DEV)/omni-prefix demo --seed $(SEED) --requests $(REQUESTS)

demo-vllm: $(VLLM_READY) ## the same comparison on a real vLLM engine with a tiny random model
	@$(QUIET_VLLM) PYTHONWARNINGS=ignore $(VLLM)/omni-prefix demo-vllm --seed $(SEED)

.PHONY: bench
bench: $(DEV_READY) ## what the cache costs, beside other implementations (BENCH="--write-docs": and write the page)
	@$(DEV)/omni-prefix bench $(BENCH)

# ------------------------------------------------------------------------------------------ checks

.PHONY: test test-vllm lint format types
test: $(DEV_READY) ## every test that needs no vLLM
	@echo "tests of the packages, the built-in engine and the conformance tools"
	@$(DEV)/python -m pytest -q -m "not vllm"

test-vllm: $(VLLM_READY) ## tests on a real vLLM engine, cache on against cache off
	@echo "tests on a real vLLM engine (CPU, float32, one thread); each workload prints what it did"
	@$(QUIET_VLLM) $(VLLM)/python -m pytest -q -s -m vllm

lint: $(DEV_READY) ## style: ruff check and ruff format
	@$(DEV)/ruff check .
	@$(DEV)/ruff format --check .

format: $(DEV_READY) ## rewrite the sources in the project's format
	@$(DEV)/ruff check --fix .
	@$(DEV)/ruff format .

types: $(DEV_READY) ## strict types
	@$(DEV)/mypy

.PHONY: model-check model-check-deep mutants agree faults
model-check: $(DEV_READY) ## TLC on every model of the everyday lane
	@$(DEV)/omni-prefix model-check

model-check-deep: $(DEV_READY) ## TLC on the larger models too
	@$(DEV)/omni-prefix model-check --deep

mutants: $(DEV_READY) ## every seeded fault is caught by the check that names it
	@$(DEV)/omni-prefix mutants

faults: $(DEV_READY) ## failures of copies, writes, memory and clocks, and interrupts, at every place of some traces
	@$(DEV)/python -m conformance.faults --traces 3

agree: $(DEV_READY) ## reference model and production package agree on random schedules
	@$(DEV)/omni-prefix agree

.PHONY: conform conform-deep conform-example
conform: $(DEV_READY) ## 20,000 random traces on the production cache in both modes, and what they covered
	@$(DEV)/omni-prefix conform --traces 20000 --seed $(SEED) --all-goals

conform-deep: $(DEV_READY) ## a million of them; broken off, it goes on where it was
	@$(DEV)/omni-prefix conform --traces 1000000 --seed $(SEED) --all-goals --resume .scratch/conform-deep-$(SEED).json

conform-example: $(DEV_READY) ## make the failing example of the docs anew (the picture needs chromium)
	@$(DEV)/omni-prefix page seed:44 docs/conformance/example.html --driver fast-async --seed 44 \
		--mutant stale_generation_kept --small --screenshot docs/conformance/example.png

.PHONY: ci clean
ci: ## all that continuous integration runs
	@.ci/run

clean: ## remove the environments and every build product
	@rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis .scratch build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
