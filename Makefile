# `make lab` opens the lessons; `make check` takes 45 seconds; `make test` checks everything before a change is merged.
#
# Each target installs what it needs into .venv. PYTHON chooses the interpreter, 3.10 or newer; LAB holds options for
# JupyterLab, such as --port=9999; PYTEST holds options for pytest, such as -x or --durations=20.
PYTHON ?= python3
BIN := .venv/bin
LESSONS := $(wildcard notebooks/*.ipynb)
PYTHONS := 3.10 3.11 3.12 3.13

# tests/conftest.py sets these markers. Tests without them need one core each. The others use several cores and wait much
# of the time, so three files run at a time.
PROCESSES := ranks or kernel or browser or programs
UNIT := not slow and not ($(PROCESSES))
# Loading nbval takes each process two seconds; only `make test-lessons` needs it.
EACH_CORE := OMP_NUM_THREADS=1 $(BIN)/pytest -p no:nbval -n auto --dist worksteal
BY_FILE := -n 3 --dist loadfile --no-loadscope-reorder
FILES := $(BIN)/pytest -p no:nbval $(BY_FILE)
# Where this is set, as in many containers, each of hundreds of processes compiles ppedu again.
export PYTHONDONTWRITEBYTECODE :=

LINTERS := lint-types lint-widgets lint-workflows lint-python

.PHONY: atlas lab check test test-quick test-unit test-widgets test-ranks test-browser test-lessons test-all test-pythons test-torches \
  gpu lint $(LINTERS) bench lessons pictures hooks dist chromium clean recordings published site site-serve

lab: .venv/.lab
	@$(BIN)/python -m ppedu lessons notebooks --lab="$(LAB)"

# The linters, and the fast tests of schedules: checked, timed, run and drawn.
check: .venv/.test
	@$(MAKE) --no-print-directory --jobs=$(words $(LINTERS) test-quick) --keep-going --output-sync=target \
	  $(LINTERS) test-quick

# One call for all tests, because those that compute fill the time in which those with processes wait.
test: chromium .venv/.test test-widgets
	OMP_NUM_THREADS=1 $(FILES) -m "not slow" tests $(PYTEST)
	$(MAKE) --no-print-directory test-lessons

# Also the slow tests, all examples of the properties, the other Pythons and the other releases of PyTorch.
test-all: chromium .venv/.test
	$(EACH_CORE) --hypothesis-profile=full -m "$(UNIT)" tests $(PYTEST)
	$(FILES) --hypothesis-profile=full -m "slow or $(PROCESSES)" tests $(PYTEST)
	$(MAKE) test-lessons test-pythons test-torches

test-unit: .venv/.test test-widgets
	$(EACH_CORE) -m "$(UNIT)" --ignore=tests/browser tests $(PYTEST)

QUICK := core sim zoo engine view papers test_imports.py test_prose.py test_wrong_calls.py
test-quick: .venv/.test
	$(EACH_CORE) -m "$(UNIT)" $(addprefix tests/,$(QUICK)) $(PYTEST)

# Test the parts of the widgets' script that need no browser.
test-widgets:
	@if command -v node >/dev/null; then node --test tests/view/*.test.mjs; \
	  else echo "Not tested: tests/view/*.test.mjs. Testing them needs Node: apt-get install nodejs"; fi

test-ranks: .venv/.test
	$(FILES) -m "not slow and not browser and ($(PROCESSES))" tests $(PYTEST)

test-browser: chromium .venv/.test
	$(FILES) -m "not slow and browser" tests/browser $(PYTEST)

# The lessons must print what is saved in them. With PPEDU_STILL=1, widgets are pictures.
test-lessons: .venv/.test
	rm -f notebooks/my_pipeline.py
	PPEDU_STILL=1 $(BIN)/pytest $(BY_FILE) --nbval --nbval-current-env --nbval-cell-timeout=300 notebooks $(PYTEST)

# Test the packages that need the standard library only with every Python that is installed.
test-pythons: .venv/.test
	@ran=; for version in $(PYTHONS); do \
	  python=; for each in python$$version ~/.pyenv/versions/$$version.*/bin/python; do \
	    $$each -c '' 2>/dev/null && python=$$each && break; \
	  done; \
	  if [ -z "$$python" ]; then echo "Python $$version: not installed, skipped"; continue; fi; \
	  echo "Python $$version: $$python"; \
	  $$python -m venv .venv/python-$$version && \
	  .venv/python-$$version/bin/pip install --quiet --constraint constraints.txt pytest pytest-timeout hypothesis && \
	  PYTHONPATH=. .venv/python-$$version/bin/pytest tests/core tests/sim tests/zoo tests/papers tests/test_imports.py $(PYTEST) \
	    || exit 1; \
	  ran="$$ran $$version"; \
	done; \
	echo "Python versions that ran:$${ran:- none}"

# Test the engine and a lesson with the oldest, the newest and a middle release of PyTorch.
test-torches: .venv/.test
	PYTHONPATH=. $(BIN)/python tools/torches.py $(PYTEST)

# Search for better schedules, and proofs, where the atlas has gaps. SECONDS is for each entry and formulation.
SECONDS ?= 60
atlas: .venv/.test
	PYTHONPATH=. $(BIN)/python tools/atlas.py --seconds $(SECONDS)

# The page that needs no installation: static files in build/site.
site: .venv/.test node_modules/.package-lock.json
	PYTHONPATH=.:tests/papers $(BIN)/python site/make_site.py

site-serve: site
	$(BIN)/python site/serve.py

# What the ranks of the lessons give back, for the site's pages, which have no ranks.
recordings: .venv/.test
	PYTHONPATH=. $(BIN)/python site/record.py

# What a GPU shows, as a table; without one, what the CPU shows of it. PYTHON needs torch, numpy, pytest and hypothesis,
# which this does not install. INT lets pytest print the table if the whole takes too long.
gpu: SHELL := bash
gpu:
	@$(PYTHON) -c 'import sys; from importlib.util import find_spec as found; \
	  lacks = [name for name in ("torch", "numpy", "pytest", "hypothesis") if not found(name)]; \
	  lacks and sys.exit("make gpu needs torch, numpy, pytest and hypothesis; $(PYTHON) lacks " + ", ".join(lacks) + \
	    ". Install them, or name another Python: make gpu PYTHON=.venv/bin/python")'
	@mkdir -p artifacts
	set -o pipefail; timeout --foreground --signal=INT --kill-after=60 1200 \
	  $(PYTHON) -m pytest -m gpu -vv -rN -W ignore::pytest.PytestConfigWarning tests/engine/test_cuda.py $(PYTEST) 2>&1 \
	  | tee artifacts/gpu.txt

# The linters run side by side. The output of each is printed when it has ended.
lint: .venv/.test
	@$(MAKE) --no-print-directory --jobs=$(words $(LINTERS)) --keep-going --output-sync=target $(LINTERS)

lint-python: .venv/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/prose.py
	$(BIN)/lint-imports --no-logo

lint-types: .venv/.test
	$(BIN)/mypy

# TypeScript reads the types of the widgets' script in its JSDoc comments.
lint-widgets: .venv/.test $(if $(shell command -v npm),node_modules/.package-lock.json)
	$(BIN)/oxlint --deny-warnings ppedu/view site
	@if command -v npm >/dev/null; then echo node_modules/.bin/tsc && node_modules/.bin/tsc; \
	  else echo "Not checked: the types in ppedu/view/js. Checking them needs npm: apt-get install npm"; fi

lint-workflows: .venv/.test
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-actions action.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*_*.yml
	$(BIN)/pre-commit validate-config
	$(BIN)/pre-commit validate-manifest

node_modules/.package-lock.json: package-lock.json
	npm ci --no-audit --no-fund
	@touch $@

# Run lint and the formatter before every commit.
hooks: .venv/.test
	$(BIN)/pre-commit install

bench: .venv/.bench
	$(BIN)/python tests/bench.py
	$(BIN)/python tests/bench_engine.py
	$(BIN)/python tests/bench_trace.py
	$(BIN)/python tests/bench_plan.py
	$(BIN)/python tests/bench_ranks.py
	PYTHONPATH=.:tests/hosts $(BIN)/python tests/bench_hosts.py
	PYTHONPATH=tests/browser $(BIN)/python tests/bench_view.py
	PYTHONPATH=.:tests/browser:tests/papers $(BIN)/python tests/bench_site.py
	$(BIN)/python tests/bench_lessons.py
	$(BIN)/python tests/published/compare.py

# Run the lessons and save their outputs, with pictures instead of widgets. The second pass joins output that was printed
# in several pieces, the third makes the pictures smaller.
lessons: .venv/.test
	rm -f notebooks/my_pipeline.py
	PPEDU_STILL=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False $(LESSONS)
	$(BIN)/jupyter nbconvert --to notebook --inplace --CoalesceStreamsPreprocessor.enabled=True $(LESSONS)
	$(BIN)/python tools/palette.py $(LESSONS)

pictures: chromium .venv/.test
	PYTHONPATH=tests/published $(BIN)/python docs/pictures.py

# Runs that others measured and published, beside what ppedu says of them.
published: .venv/.test
	$(BIN)/python tests/published/compare.py

# Build what a release uploads. TAG, if given, must be v and the version.
dist: .venv/.test
	@[ -z "$(TAG)" ] || grep -qx 'version = "$(TAG:v%=%)"' pyproject.toml \
	  || { echo "The tag $(TAG) is not v and the version in pyproject.toml; correct one of them."; exit 1; }
	rm -rf dist
	$(BIN)/python -m build

# Comes before the installation, which takes long.
chromium:
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null \
	  || echo "The tests in a browser need Chromium and are skipped without it: apt-get install chromium libatomic1"

clean:
	rm -rf .venv node_modules artifacts dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

.venv/.%: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	  || { echo "ppedu needs Python 3.10 or newer; $(PYTHON) is missing or older. Name another: make PYTHON=python3.12 $*"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
	  || { echo "ppedu's Makefile needs $(notdir $(PYTHON))-venv: apt-get install $(notdir $(PYTHON))-venv"; exit 1; }
	@echo "Installing into .venv; PyTorch and JupyterLab are large, this takes some minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[$*]'
	@touch $@
