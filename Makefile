# make train   the main job on this machine (creates .venv, installs, trains; about 10 minutes on 2 cores)
# make test    the fast test suite           (creates .venv, installs, tests; about 3 minutes)
# make check   what CI runs after the tests: lint and types
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test slow check clean

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

train: .venv/.installed
	$(BIN)/minitlt train

test: .venv/.installed
	$(BIN)/python -m pytest

slow: .venv/.installed
	$(BIN)/python -m pytest -m slow

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build *.egg-info
