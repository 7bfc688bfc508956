# Every target sets up .venv itself when it needs to; `make` alone lists the targets.
# PYTHON=... names the interpreter that .venv is made with; `make clean` before changing it.

.DEFAULT_GOAL := help
.PHONY: help serve test lint format notebooks clean

MODEL ?=
PORT ?=
ARGS ?=
PYTHON ?=
# Not ?=: some shells export HOST as the machine's name, which is not an address to listen on.
HOST =

# An NVIDIA driver: the file is quick to see; WSL and some containers only have nvidia-smi.
ifneq ($(wildcard /proc/driver/nvidia/version),)
GPU := yes
else
GPU := $(if $(shell nvidia-smi -L 2>/dev/null),yes)
endif
comma := ,
EXTRAS ?= dev$(if $(GPU),$(comma)gpu)

VENV := .venv
BIN := $(VENV)/bin
# Names its extras, so that a driver that appears later brings in the gpu extra.
INSTALLED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

serve: $(INSTALLED) ## serve a model: MODEL=directory-or-hub-id PORT=8000 HOST=0.0.0.0 ARGS="more flags"
	$(BIN)/qwen35 serve $(MODEL) $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(ARGS)

test: $(INSTALLED) ## run the tests: ARGS="tests/test_house.py -x"
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED) ## check style, format and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(INSTALLED) ## format, and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

notebooks: $(INSTALLED) ## execute the notebooks; their files stay as they are
	@if ls notebooks/*.ipynb >/dev/null 2>&1; \
	then $(BIN)/python -m pytest --nbmake notebooks/*.ipynb $(ARGS); \
	else echo "no notebooks in notebooks/"; fi

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@fits() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }; \
	if ! { fits $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1; }; then \
		for python in $(if $(PYTHON),"$(PYTHON)",python3.12 python3) ""; do \
			if [ -n "$$python" ] && fits "$$python"; then break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo "$(if $(PYTHON),PYTHON=$(PYTHON) is not,there is no) Python 3.12 or later$(if $(PYTHON),, here): install one, or name one with PYTHON=" >&2; \
			exit 1; \
		fi; \
		"$$python" -m venv --clear $(VENV) || exit 1; \
	fi
	@echo "Setting up $(VENV) with the extras $(EXTRAS): a few minutes the first time"
	@$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]" --constraint constraints.txt
	@rm -f $(VENV)/.installed-*
	@touch $@
