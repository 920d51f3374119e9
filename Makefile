# Everything is installed into $(VENV); nothing else on the machine is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The cards where there are any, else two CPU ranks over gloo.
DEVICES ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo auto || echo cpu:2)

.PHONY: install demo check test docs clean

install: $(READY)

# --without-pip: Debian's python3 comes without ensurepip, and the machine's own pip can serve any environment.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --without-pip --clear $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check \
		--constraint constraints.txt pip --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/dormouse-plan --devices $(DEVICES) --fit 16 > plan.json
	$(BIN)/torchrun -m executor plan.json
	$(BIN)/dormouse-plan diff plan.json

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not gpu'

# What is generated from the code; a test keeps it current.
docs: $(READY)
	$(BIN)/python -m planner.refusals.page > docs/refusals.md
	$(BIN)/python tests/make_fits.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
