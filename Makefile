# make demo    the package in a fresh .venv, trained on real photographs: what data stalls cost
# make test    the tests, without those of clusters
# make test-remote   the tests of clusters: nodes of Ray on this machine
# make test-long     the tests, with the slow ones, all cases where make test takes a part of them,
#                    and random examples that nobody has seen before
# make test-realtime the few tests that rest on real time: on a machine that does nothing else
# make test-mutants  known faults put into the package one by one, each of which a law must see
# make test-lowest   the front door with the lowest versions that pyproject.toml allows
# make dist-check   sdist and wheel, built, installed in an environment of their own, and used
# make check   everything CI runs: lint, types, layers, tests, mutants
# make docs    the site of the documentation, in docs/_build/html
# make gpu    on a machine with a GPU: all that needs one, into benchmarks/results; SECTION=name: one part
# make measure  how large the package is, and how entangled
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# By files, as several have a fixture that takes long for all of their tests; in the order of
# tests/thoroughness.py, the longest first. A third process for two CPUs gains nothing. What failed
# once fails again: only long runs shuffle the tests. A process that crashes ends the run, as one that
# took its place would wait for ever for the files that the other had done.
ORDER := -p no:randomly
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# Albumentations asks the network for its newest version at import unless this is set.
export NO_ALBUMENTATIONS_UPDATE := 1

LOWEST := .venv-lowest

.PHONY: demo test test-remote test-long test-realtime test-mutants test-lowest dist-check check lint format docs gpu measure clean

demo: $(VENV)/.ready-demo
	PYTHONPATH=examples $(PY) -m demo

# Memory in huge pages halves what a fork takes, of which the tests make thousands.
test: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
# What pytest makes of the asserts is kept for the next run.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.ready-test
	$(PY) -m pytest $(ORDER) $(PYTEST_ARGS) --ignore=tests/ext/ray

# In one process, which has one cluster for nearly all of them.
test-remote: $(VENV)/.ready-test
	$(PY) -m pytest $(ORDER) -n 0 -m remote tests/ext/ray

test-long: export TEST_LONG := 1
test-long: ORDER :=
test-long: test test-remote

test-realtime: export TEST_REALTIME := 1
test-realtime: $(VENV)/.ready-test
	$(PY) -m pytest $(ORDER) -n 0 -m realtime tests

test-mutants: export TEST_MUTANTS := 1
test-mutants: $(VENV)/.ready-test
	$(PY) -m pytest $(ORDER) -n 0 tests/mutants

# Apart from CI, since it installs another torch.
test-lowest: $(LOWEST)/.ready
	$(LOWEST)/bin/python -m pytest -q -p no:randomly -m "not gpu" tests/front_door \
		tests/conformance/test_bad_input.py tests/conformance/test_command_line.py \
		tests/test_import.py tests/test_versions.py

dist-check: $(VENV)/.ready-demo
	$(PY) tools/check_dist.py

check: lint test test-mutants test-remote

lint: $(VENV)/.ready-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

docs: $(VENV)/.ready-docs
	$(PY) -m sphinx -q -E -a -W --keep-going -b html docs docs/_build/html

# It installs nothing from a network: what is missing comes from wheels/, if that is there.
gpu:
	$(or $(wildcard $(PY)),$(PYTHON)) tools/gpu.py $(SECTION)

measure:
	$(PYTHON) benchmarks/code_size.py

format: $(VENV)/.ready-test
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# A stamp stands for what pyproject.toml asked for when it was made.
$(VENV)/.ready-demo: pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version + "; run make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade 'pip>=25.1'
	$(PY) -m pip install --quiet --editable '.[all,jpeg,demo]'
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready-demo
	$(PY) -m pip install --quiet --group test --group lint
	touch $@

$(VENV)/.ready-docs: $(VENV)/.ready-demo
	$(PY) -m pip install --quiet --group docs
	touch $@

$(LOWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(LOWEST)/bin/python tools/lowest_versions.py > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --requirement $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --no-deps --editable .
	$(LOWEST)/bin/python -m pip install --quiet pytest pytest-timeout hypothesis scikit-image
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) build dist docs/_build demo_data demo_logs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
