# Two commands are enough: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all lint docs clean

demo: .venv/core
	$(BIN)/matrixdp demo --out demo-output

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow"

# also what is slow: processes that are killed, real clusters and servers, whole studies
test-all: lint
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# the site, in build/docs; every warning is an error
docs: .venv/dev
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

.venv/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[plots,sklearn]'
	touch $@

.venv/dev: .venv/core
	$(PIP) --editable '.[dev]' --editable ./papers
	touch $@

clean:
	rm -rf .venv demo-output build docs/gallery docs/reference/generated .mypy_cache .ruff_cache .pytest_cache .hypothesis
