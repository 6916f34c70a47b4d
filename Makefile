# make setup   venv, pip install with pinned versions, system packages where we may install them
# make check   ruff, mypy, import directions
# make quick   check and the unit tests, in about two minutes
# make test    check, then every test
# make demo    every stage on this machine
# make bench   measure against peers: make bench THEME=train
# make docs    build the documentation, strictly
# make size    lines per package
# make clean   remove what the above made, but for demo/ and runs/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
THEME ?= train
STAMP := $(VENV)/.setup
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: setup check quick test demo bench docs size clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/system-packages native/CMakeLists.txt native/src/*.cpp native/include/*.h
	@scripts/system-packages
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON): is older than 3.11; set PYTHON=python3.11 or newer" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "error: $(PYTHON) -m venv: failed; install it with: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

quick: check
	$(BIN)/python -m pytest -q -n 2 -m 'not slow' tests/unit

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile

demo: setup
	$(BIN)/lakh demo

bench: setup
	$(BIN)/lakh bench $(THEME)

docs: setup
	$(BIN)/python scripts/reference.py
	$(BIN)/mkdocs build --strict --quiet

size:
	@find src/lakh native -name '*.py' -o -name '*.cpp' -o -name '*.h' | xargs wc -l | awk '{split($$2, part, "/"); package = part[1] == "src" ? part[3] : part[1]; lines[package] += $$2 == "total" ? 0 : $$1} END {for (package in lines) if (lines[package]) printf "%6d %s\n", lines[package], package}' | sort -rn

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info
