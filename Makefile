# Two commands: `make run` trains the quickstart, `make test` checks everything. Both make .venv where it is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test lint types contracts pytest controls faults smollm2 clean

run: $(STAMP)
	$(BIN)/asyncflow run examples/quickstart.yaml --fresh

test: lint types contracts pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports
	$(BIN)/asyncflow crds --check

pytest: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

# A virtual environment is whole or absent: it is made again whenever what it is made from has changed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools" "wheel"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[torch,gym,math,import,plot,dev]"
	touch $@
