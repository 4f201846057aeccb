# Two commands are enough: `make demo` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all lint docs benchmarks release clean

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
	$(BIN)/codespell

# the site, in build/docs; every warning is an error
docs: .venv/dev
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

# docs/benchmarks.md, from the benchmarks' own output; PEER and PEER_JAX are the interpreters of the other libraries
benchmarks: .venv/dev
	$(BIN)/python benchmarks/page.py docs/benchmarks.md $(if $(PEER),--peer $(PEER)) $(if $(PEER_JAX),--peer-jax $(PEER_JAX))

# both wheels, checked: they install into an empty environment and run the demo there
release: .venv/dev
	rm -rf dist build/release
	$(BIN)/python -m build --outdir dist . && $(BIN)/python -m build --outdir dist papers
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install --quiet --constraint constraints.txt "$$(ls dist/matrixdp-*.whl)[plots,sklearn]"
	cd build/release && bin/matrixdp demo --out demo && bin/matrixdp verify demo/plan.json

.venv/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[plots,sklearn]'
	touch $@

.venv/dev: .venv/core
	$(PIP) --editable '.[dev]' --editable ./papers
	touch $@

clean:
	rm -rf .venv demo-output build dist docs/gallery docs/reference/generated .mypy_cache .ruff_cache .pytest_cache .hypothesis
