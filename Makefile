# Every target sets up what it needs: `make demo` works in a fresh clone.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
UV_VERSION := 0.13.9
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hoofprint
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.hoofprint-ready
AGENTS := $(CACHE)/agents
# services import twice as fast from compiled bytecode
export UV_COMPILE_BYTECODE := 1
unexport PYTHONDONTWRITEBYTECODE

MODEL ?= dial
ENGINE ?= cpu
PYTEST_ARGS ?=

.PHONY: help
help: ## This list
	@grep -hE '^[a-zA-Z_%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

.PHONY: setup
setup: $(READY) ## Virtual environment, dependencies (hash-checked), Kafka's jars

$(CACHE)/uv-$(UV_VERSION)/bin/uv:
	@echo "setup: uv $(UV_VERSION) into the per-user cache"
	@$(PYTHON) -m venv $(CACHE)/uv-$(UV_VERSION)
	@$(CACHE)/uv-$(UV_VERSION)/bin/python -m pip install --quiet uv==$(UV_VERSION)

$(READY): requirements.lock pyproject.toml $(CACHE)/uv-$(UV_VERSION)/bin/uv
	@echo "setup: dependencies into $(VENV)"
	@test -x $(BIN)/python || $(CACHE)/uv-$(UV_VERSION)/bin/uv venv --quiet --python $(PYTHON) $(VENV)
	@VIRTUAL_ENV=$(VENV) $(CACHE)/uv-$(UV_VERSION)/bin/uv pip sync --quiet --require-hashes requirements.lock
	@VIRTUAL_ENV=$(VENV) $(CACHE)/uv-$(UV_VERSION)/bin/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@ln -sf $(CACHE)/uv-$(UV_VERSION)/bin/uv $(BIN)/uv
	@$(BIN)/python -m stack.broker.jars
	@touch $(READY)

node_modules/.package-lock.json: package.json package-lock.json
	@if command -v npm > /dev/null; then npm ci --silent --no-audit --no-fund; \
	  else echo "setup: no npm here: docker-compose.yml is not validated"; fi

.PHONY: agents
agents: $(AGENTS)/.ready ## Unmodified agents from npm (OpenCode, Codex, Claude Code) for the tests: 1 GB in the per-user cache

# not npm ci: a registry may lack an agent's packages for other platforms, which the lock then cannot name
$(AGENTS)/.ready: tests/agents/package.json tests/agents/package-lock.json
	@echo "setup: unmodified agents into the per-user cache"
	@mkdir -p $(AGENTS)
	@cp tests/agents/package.json tests/agents/package-lock.json tests/agents/.npmrc $(AGENTS)/
	@if command -v npm > /dev/null; then cd $(AGENTS) && npm install --silent --no-save --no-audit --no-fund && touch $@; \
	  else echo "setup: no npm here: the tests that need the agents are skipped"; fi

.PHONY: demo
demo: $(READY) ## Train a policy end to end: MODEL=dial (default) or smollm2, ENGINE=cpu (default) or sglang
	$(BIN)/hoofprint demo --task $(MODEL) --engine $(ENGINE)

.PHONY: test
test: $(READY) node_modules/.package-lock.json $(AGENTS)/.ready ## All tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: sglang-setup
sglang-setup: $(READY) ## Real SGLang on CPU: its own virtual environment in the per-user cache (6 GB)
	@$(BIN)/python -m stack.sglang.environment

.PHONY: test-sglang
test-sglang: sglang-setup ## The contract suite of engines, and grammars, on real SGLang
	$(BIN)/python -m pytest -m sglang tests/engine_contract tests/proxy/test_grammars_on_sglang.py $(PYTEST_ARGS)

.PHONY: lint
lint: $(READY) ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(READY) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench-%
bench-%: $(READY) ## A benchmark by name, e.g. bench-data_plane
	$(BIN)/python -m benchmarks.$*

.PHONY: lock
lock: $(CACHE)/uv-$(UV_VERSION)/bin/uv ## Resolve the dependencies again: versions and hashes, no addresses
	$< pip compile --quiet --group dev pyproject.toml --generate-hashes --no-emit-index-url --python-version 3.11 -o requirements.lock

.PHONY: sglang-lock
sglang-lock: $(CACHE)/uv-$(UV_VERSION)/bin/uv ## Resolve SGLang's environment again
	cd stack/sglang && $< pip compile --quiet pyproject.toml --generate-hashes --no-emit-index-url --no-header --python-version 3.11 -o requirements.lock

.PHONY: clean
clean: ## Remove the virtual environment and caches of this clone (runs stay)
	rm -rf $(VENV) node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis
