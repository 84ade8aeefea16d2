# make train   the main job on this machine (creates .venv, installs, trains; 6 to 14 minutes on 2 cores)
# make test    the fast test suite           (creates .venv, installs, tests; 3 to 6 minutes)
# make slow    faults, resume, soak, load, fuzz for real (about 50 minutes on 2 cores)
# make lossless the tests that speculation changes no token
# make native  the tests of csrc/, with the compiler that CC names
# make lessons the lessons that take a minute each, with their solutions (3 minutes)
# make check   what CI runs after the tests: lint, types, bandit
# make audit   known holes in what is installed (pip-audit; needs the network)
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lossless native slow lessons check audit clean

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

train: .venv/.installed
	$(BIN)/minitlt train

test: .venv/.installed
	$(BIN)/python -m pytest

LOSSLESS := spec target native quantized drafters_in_engine properties sampling rejection rl

lossless: .venv/.installed
	$(BIN)/python -m pytest $(LOSSLESS:%=tests/test_%.py)

native: .venv/.installed
	$(BIN)/python -m pytest tests/test_native.py tests/test_native_sampler.py

slow: .venv/.installed
	$(BIN)/python -m pytest -n 0 -m slow  # runs of two ranks: one test at a time

lessons: .venv/.installed
	$(BIN)/python -m pytest -n 0 -m slow tests/test_lessons.py

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/bandit -q -c pyproject.toml -r minitlt

audit: .venv/.installed
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/pip-audit --local --skip-editable

clean:
	rm -rf .venv build *.egg-info
