# Everything here works in .venv, which is made on first use. Needs Python >= 3.10 and a C++20 compiler.
#
#   make quickstart   install, fetch a small model, fine-tune it, show answers before and after
#   make test         install for development, run all tests
#   make lint         ruff, mypy, clang-format
#   make test-gpu     the tests that need a GPU
#   make bench        speed and memory beside PyTorch
#   make clean        remove what was made

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
JOBS   ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 8 ] && n=8; echo $$n)

# What the installed package is made of.
SOURCES := pyproject.toml CMakeLists.txt $(wildcard cmake/*) $(shell find csrc tests/emulator -name '*.h' -o -name '*.cpp' -o -name '*.cu*')

.PHONY: quickstart test test-gpu lint bench clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/installed
	$(BIN)/python examples/quickstart.py

# One BLAS thread a process: the tests run side by side. The engine's own threads are an argument and stay as tests ask.
# -v takes back the -q of pyproject.toml, so that the whole summary is printed.
test: $(VENV)/editable
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -n $(JOBS) --durations=10 $(PYTEST_ARGS)

test-gpu: $(VENV)/editable
	$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

lint: $(VENV)/editable
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p surogate
	find csrc tests/emulator -name '*.h' -o -name '*.cpp' -o -name '*.cu*' | xargs $(BIN)/clang-format --dry-run -Werror

bench: $(VENV)/editable
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build quickstart .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python >= 3.10 is needed; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

# The two ways of installing replace one another.
$(VENV)/installed: $(SOURCES) $(shell find surogate -name '*.py' -o -name '*.jinja') | $(BIN)/python
	$(PIP) install .
	@rm -f $(VENV)/editable && touch $@

# torch comes first and by itself: what depends on it (as an oracle of the tests) must not choose another.
$(VENV)/editable: $(SOURCES) | $(BIN)/python
	$(PIP) install torch==2.13.0
	$(PIP) install -e '.[test,lint]'
	@rm -f $(VENV)/installed && touch $@
