# Two commands matter: `make lab` opens the lessons, `make test` checks everything.
# Each target creates .venv and installs what it needs. PYTHON chooses the interpreter, 3.10 or newer; LAB holds
# options for JupyterLab, such as --port=9999.
PYTHON ?= python3
BIN := .venv/bin
LESSONS := $(wildcard notebooks/*.ipynb)
OTHER_PYTHONS := 3.10 3.12 3.13

.PHONY: lab test test-all test-floor lint bench lessons pictures clean chromium

lab: .venv/.lab
	@$(BIN)/python -m ppedu lessons notebooks --lab="$(LAB)"

test: chromium .venv/.test
	$(BIN)/pytest tests
	PPEDU_STILL=1 $(BIN)/pytest --nbval --nbval-current-env --nbval-cell-timeout=300 notebooks

test-all: test test-floor
	$(BIN)/pytest tests -m slow

# The ground floor needs the standard library alone: its tests run on every Python that is at hand.
test-floor: .venv/.test
	@for version in $(OTHER_PYTHONS); do \
	  python=; for each in python$$version ~/.pyenv/versions/$$version.*/bin/python; do \
	    $$each -c '' 2>/dev/null && python=$$each && break; \
	  done; \
	  if [ -z "$$python" ]; then echo "no Python $$version here: skipped"; continue; fi; \
	  echo "Python $$version"; \
	  $$python -m venv .venv/floor-$$version && \
	  .venv/floor-$$version/bin/pip install --quiet --constraint constraints.txt pytest pytest-timeout hypothesis && \
	  PYTHONPATH=. .venv/floor-$$version/bin/pytest tests/core tests/zoo tests/papers || exit 1; \
	done

lint: .venv/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/oxlint --deny-warnings ppedu/view

bench: .venv/.bench
	$(BIN)/python tests/bench.py
	$(BIN)/python tests/bench_engine.py
	$(BIN)/python tests/bench_ranks.py
	PYTHONPATH=tests/browser $(BIN)/python tests/bench_view.py
	$(BIN)/python tests/bench_lessons.py

# Run the lessons and keep what they show, pictures in place of widgets; the second pass joins what was printed in several
# pieces.
lessons: .venv/.test
	PPEDU_STILL=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False $(LESSONS)
	$(BIN)/jupyter nbconvert --to notebook --inplace --CoalesceStreamsPreprocessor.enabled=True $(LESSONS)

pictures: .venv/.test
	$(BIN)/python docs/pictures.py

# Asked before the long installation.
chromium:
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
	  || echo "The tests in a browser need Chromium and are skipped without it: apt-get install chromium libatomic1"

clean:
	rm -rf .venv artifacts .mypy_cache .pytest_cache .ruff_cache

.venv/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	  || { echo "ppedu needs Python 3.10 or newer; $(PYTHON) is missing or older. Name another: make PYTHON=python3.12 $*"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
	  || { echo "ppedu's Makefile needs $(notdir $(PYTHON))-venv: apt-get install $(notdir $(PYTHON))-venv"; exit 1; }
	@echo "Installing into .venv; PyTorch and JupyterLab are large, this takes some minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@
