# make setup   venv, pip install with pinned versions, system packages where we may install them
# make check   ruff, mypy, import directions
# make quick   check and the unit tests, in about two minutes
# make test    check, then every test
# make demo    every stage on this machine
# make bench   measure against peers: make bench THEME=train
# make docs    build the documentation, strictly
# make dist    sdist and wheel, checked in an environment of their own
# make size    lines per package
# make clean   remove what the above made, but for demo/ and runs/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
THEME ?= train
STAMP := $(VENV)/.setup
DEMO := $(VENV)/.setup-demo
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1
# Packages are installed without bytecode (scripts/install). Where containers set this variable, every process would
# compile torch again, for 6 to 8 seconds of a core; empty means not set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup setup-demo system system-tests check compiled quick test demo bench docs dist size clean

# Set-up runs again when what it installs from changes. The demo needs less than the tests.
NEEDED := pyproject.toml constraints.txt native/CMakeLists.txt $(wildcard native/src/*.cpp native/include/*.h native/engine/*)

setup: system $(STAMP)

setup-demo: system $(DEMO)

system:
	@scripts/system-packages

system-tests:
	@scripts/system-packages tests

$(STAMP): $(NEEDED)
	@PYTHON=$(PYTHON) scripts/install dev
	@touch $(DEMO) $(STAMP)

$(DEMO): $(NEEDED)
	@PYTHON=$(PYTHON) scripts/install demo
	@touch $(DEMO)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

quick: check
	$(BIN)/python -m pytest -q -n 2 -m 'not slow' tests/unit

# The functions that numba compiles, once for each checkout.
compiled: setup
	@folder=$$(mktemp -d) && $(BIN)/lakh corpus build native src/lakh/cli --out $$folder/corpus >/dev/null && rm -r $$folder

# First `check` and `compiled` side by side, as each uses one core.
# In the order of the folders, the long files of e2e and multiproc come first, so that no worker ends long after the other.
test: system-tests setup
	@$(MAKE) --no-print-directory -j 2 check compiled
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 10 -p tests.skips

demo: setup-demo
	$(BIN)/lakh demo

bench: setup
	$(BIN)/lakh bench $(THEME)

docs: setup
	$(BIN)/python scripts/reference.py
	$(BIN)/mkdocs build --strict --quiet

dist: setup
	rm -rf dist
	LAKH_NATIVE=require $(BIN)/python -m build
	$(BIN)/auditwheel repair --wheel-dir dist dist/*.whl && rm -f dist/*-linux_*.whl
	$(BIN)/python scripts/packaging/check_wheel.py dist/*.whl

size:
	@find src/lakh native -name '*.py' -o -name '*.cpp' -o -name '*.h' | xargs wc -l | awk '{split($$2, part, "/"); package = part[1] == "src" ? part[3] : part[1]; lines[package] += $$2 == "total" ? 0 : $$1} END {for (package in lines) if (lines[package]) printf "%6d %s\n", lines[package], package}' | sort -rn

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info
