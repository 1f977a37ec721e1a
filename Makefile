# make demo    the package in a fresh .venv, trained on real photographs: what data stalls cost
# make test    the tests
# make check   everything CI runs: lint, types, layers, tests
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PYTEST_ARGS ?= -n 2

# Albumentations asks the network for its newest version at import unless this is set.
export NO_ALBUMENTATIONS_UPDATE := 1

.PHONY: demo test check lint format clean

demo: $(VENV)/.ready-demo
	$(PY) -m lightning_fastdata.cli demo

test: $(VENV)/.ready-test
	$(PY) -m pytest $(PYTEST_ARGS)

check: lint test

lint: $(VENV)/.ready-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.ready-test
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# A stamp stands for what pyproject.toml asked for when it was made.
$(VENV)/.ready-demo: pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version + "; run make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade 'pip>=25.1'
	$(PY) -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready-demo
	$(PY) -m pip install --quiet --group test --group lint
	touch $@

clean:
	rm -rf $(VENV) build dist demo_data demo_logs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
