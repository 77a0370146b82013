# Every target builds .venv from the lock when it is missing or stale; `make env` does only that.
PYTHON ?= python3
SEED ?= 1
VENV := .venv
STAMP := $(VENV)/.stamp
export OMP_NUM_THREADS ?= 1

.PHONY: env demo test test-long lint clean
env: $(STAMP)

$(STAMP): requirements/cpu.lock pyproject.toml
	@rm -rf $(VENV)
	@echo "building $(VENV) from requirements/cpu.lock (about 2.5 GB, one to three minutes)"
	@$(PYTHON) -c 'import sys; sys.exit("Relax needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install --no-deps --disable-pip-version-check -r requirements/cpu.lock > $(VENV)/install.log 2>&1 \
	  && $(VENV)/bin/pip install --no-deps --no-build-isolation --disable-pip-version-check -e . >> $(VENV)/install.log 2>&1 \
	  || { tail -n 20 $(VENV)/install.log; echo "the whole log: $(VENV)/install.log"; exit 1; }
	@touch $(STAMP)

demo: env
	@$(VENV)/bin/python examples/demo/run.py --seed $(SEED)

test: env
	$(VENV)/bin/python -m pytest

test-long: env
	$(VENV)/bin/python -m pytest -m long

lint: env
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) runs build *.egg-info
