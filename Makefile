PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs# while it exists what running needs is installed,
READY := $(VENV)/.ready# and what developing needs

.PHONY: run demo test test-fast bench check lock clean

run: $(RUNS)
	$(BIN)/keylane demo

demo: $(RUNS)
	$(BIN)/keylane demo --once

# Tests are handed out one by one, but for those that share a Spark session, which is one process's. Many of
# them wait most of the time: there are more processes than cores.
test: $(READY)
	$(BIN)/python -m pytest -n 4 --durations 30

test-fast: $(READY)
	$(BIN)/python -m pytest -n 4 -m "not slow"

bench: $(READY)
	$(BIN)/python -m loadtest.bench

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The lock names packages and versions only: where they come from is the machine's business.
lock: $(READY)
	CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/pip-compile --quiet --extra dev --extra otel --extra spark --strip-extras \
		--allow-unsafe --no-emit-options --no-emit-index-url --no-emit-find-links \
		--no-emit-trusted-host --output-file requirements.lock pyproject.toml

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# These files exist only while the environment is complete. Without the first an install was interrupted,
# or never begun, and pip cannot tell a half-written package from a whole one: start from nothing.
$(RUNS): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Keylane needs Python 3.11 or newer; say which with make PYTHON=..."; exit 1; }
	test -f $@ || $(PYTHON) -m venv --clear $(VENV)
	rm -f $@
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable .
	touch $@

$(READY): $(RUNS)
	rm -f $@ $(RUNS)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	touch $(RUNS) $@
