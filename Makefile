# Two commands do everything; each makes its own .venv and keeps it up to date:
#
#   make demo    a local cluster answers three questions and shuts down
#   make test    every test
#
# Variables: PYTHON=python3.12 (3.11 or later), TORCH=cpu|cuda (default: cuda where a GPU is found),
# ARGS="..." passed on to the demo or to pytest, as in  make test ARGS="tests/kvstore -x".

OLDEST := sys.version_info < (3, 11)
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit($(OLDEST))' 2>/dev/null && echo $$p && break; done)
TORCH ?= auto
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
BOOTSTRAP := $(PYTHON) -I ops/bootstrap.py --venv $(VENV) --torch $(TORCH)

.PHONY: help demo test python install install-test lint types stubs docs fresh check lock clean

help:
	@echo "make demo    a local cluster answers three questions and shuts down"
	@echo "make test    every test; ARGS=\"tests/kvstore -x\" is passed on to pytest"
	@echo "make check   lint, types, stub staleness and tests, as CI runs them"
	@echo "also: lint, types, stubs and docs (regenerate), lock (pin what is installed), clean"

demo: install
	@$(BIN)/cedar demo $(ARGS)

test: install-test
	@$(BIN)/pytest $(ARGS)

install: python
	@$(BOOTSTRAP)

install-test: python
	@$(BOOTSTRAP) --extra test

python:
	@$(PYTHON) -c 'import sys; sys.exit($(OLDEST))' || \
	  { echo "Cedar needs Python 3.11 or later: make PYTHON=/path/to/python3.11" >&2; exit 1; }

lint: install-test
	@$(BIN)/ruff check --output-format concise .
	@$(BIN)/ruff format --check .

types: install-test
	@MYPYPATH=$$(echo build/__editable__.*) $(BIN)/mypy -p cedar

stubs: install-test
	@$(BIN)/python -m cedar.ops.stubs

docs: install-test
	@$(BIN)/python -m cedar.ops.operations_page

# Are the committed stubs and the table of settings what their sources give now?
fresh: install-test
	@$(BIN)/python -m cedar.ops.stubs --check
	@$(BIN)/python -m cedar.ops.operations_page --check

check:
	@bash .ci/run

# Pins what is installed now, so that tomorrow's clone installs what was tested today.
lock: install-test
	@{ echo "# The versions that were tested, written by 'make lock'. Torch is chosen apart: see constraints-cpu.txt."; \
	  $(BIN)/python -m pip freeze --exclude-editable | grep -Ev '^(torch|triton|nvidia-|cuda-)'; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
