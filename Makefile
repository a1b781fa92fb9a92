# Two commands for a fresh machine with Python >= 3.11 and pip: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Three processes for two cores, because some tests wait: 213 s instead of 249. They take over each other's tests at the end.
WORKERS ?= 3
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal
# With bytecode that is kept, a process of pytest takes 5 s of CPU to collect the tests, without 13 s.
unexport PYTHONDONTWRITEBYTECODE
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test check types layers fast slow mutants docs site proto constraints bench coverage release clean

help:            ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: dfca needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V); name another: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x /tests/ $(VENV)/lib || true  # as pip would, but on every core
	@touch $@

demo: $(VENV)/.ready    ## set up .venv and run the quickstart: the paper's algorithms and dfca-auto on rotated digits
	$(BIN)/dfca run quickstart
	@echo "for the command dfca in this shell: . $(VENV)/bin/activate"

# Tests take twice as long while their coverage is measured: these suffice.
COVERING := tests/core tests/codecs tests/sim/test_simulate.py tests/sim/test_directed.py

test: check      ## set up .venv, run every check and every test but the slow ones
	$(PYTEST) $(COVERING:%=--ignore=%)
	$(PYTEST) $(COVERING) \
	  --cov=dfca.core --cov=dfca.algorithms --cov-report=term-missing:skip-covered --cov-fail-under=95

check: $(VENV)/.ready   ## ruff, mypy, import-linter
	$(BIN)/ruff check src benchmarks tests docs
	$(BIN)/ruff format --check src benchmarks tests docs
	@$(MAKE) --no-print-directory -j 2 types layers

types:
	$(BIN)/mypy

layers:
	$(BIN)/lint-imports --no-cache

coverage: $(VENV)/.ready       ## run the tests and report the coverage of the whole package; a page in build/coverage
	$(PYTEST) --cov=dfca --cov-report=term --cov-report=html:build/coverage

fast: $(VENV)/.ready    ## the tests alone, stopping at the first failure
	$(PYTEST) -x

slow: $(VENV)/.ready    ## the long tests
	$(BIN)/pytest -m slow

mutants: $(VENV)/.ready ## small wrong changes of the source, each of which must fail a test; ONLY=election for some
	$(BIN)/python tests/mutants/run.py $(ONLY)

bench: $(VENV)/.ready   ## measure the speed side by side, into runs/bench; PARTS=floor for one part
	$(BIN)/python -m benchmarks $(PARTS)

docs: $(VENV)/.ready    ## rewrite the measured tables and pictures from results/
	PYTHONPATH=. $(BIN)/python docs/make_docs.py

$(VENV)/.site: $(VENV)/.ready
	$(BIN)/pip install -q -e '.[site]'
	@touch $@

site: $(VENV)/.site     ## build the docs site into build/site; nothing in it is loaded from elsewhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html; search works from the files"

$(VENV)/.release: $(VENV)/.ready
	$(BIN)/pip install -q -e '.[release]'
	@touch $@

release: $(VENV)/.release      ## build and check what a release uploads, into dist; EXTRAS="node onnx" installs only these
	$(BIN)/python tests/release/run.py $(EXTRAS)

proto: $(VENV)/.ready   ## rewrite what is generated from wire.proto
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src src/dfca/node/wire/wire.proto

constraints: $(VENV)/.site $(VENV)/.release   ## rewrite constraints.txt from the present .venv
	@{ echo "# The exact versions that CI, \`make demo\`, \`make test\`, \`make site\` and \`make release\` use; made by \`make constraints\`."; \
	   $(BIN)/pip freeze --exclude-editable | sed 's/^\(torch==[0-9.]*\)+cpu/\1/'; grep '^hatchling' constraints.txt; } > constraints.new
	@mv constraints.new constraints.txt

clean:           ## remove .venv and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .coverage build dist
