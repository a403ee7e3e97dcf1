# Everything runs in $(VENV), which the first target makes. Stamp files inside it record what is installed, so a second run
# starts at once.
#
#   make demo          the main job: on the GPU where there is one, else on the host
#   make test          the test suite             (PYTEST_ARGS="-k pool" narrows it)
#   make sanitize      compute-sanitizer over a short selection of the CUDA tests, under 100 s; needs a GPU and the toolkit
#   make lint types    ruff, mypy
#   make docs          the pages in build/docs      (a warning is an error)
#   make wheel         sdist and wheel in dist/
#   make bench-check   asv loads every benchmark and runs none
#   make clean         remove all of the above
#
# CUDA=12 or CUDA=13 overrides the driver's answer; CUDA=none installs no CuPy, and everything runs on the host backend.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
# The targets share one environment: two pips in it at once would break it.
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

# The driver's CUDA major, as `nvidia-smi` heads its table ("CUDA Version: 13.0", "CUDA UMD Version: 13.1"). Drivers run
# binaries of older majors, so everything above 13 takes 13. Without a driver it is 13 as well: CuPy imports without one,
# and the same code is then exercised up to the question which devices there are. (`|| true`, because make drops what a
# shell printed when it ends with 127, command not found.)
ifeq ($(origin CUDA),undefined)
CUDA := $(shell (nvidia-smi || true) 2>/dev/null | sed -nE 's/.*CUDA( [A-Z]+)? Version: *([0-9]+).*/\2/p' | \
  awk 'NR == 1 { major = $$1 } END { if (major == "" || major > 13) major = 13; print major }')
endif
ifeq ($(filter 12 13 none,$(CUDA)),)
$(error CUDA is "$(CUDA)": cupy_staged needs a driver for CUDA 12 or 13. CUDA=none runs it on the host alone)
endif

ifeq ($(CUDA),none)
EXTRA :=
else
EXTRA := [cuda$(CUDA)]
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# One stamp for the bare environment and one for each thing installed into it.
MADE := $(VENV)/.made-cuda-$(CUDA)
RUN := $(VENV)/.installed-run
TEST := $(VENV)/.installed-test
DEV := $(VENV)/.installed-dev

INSTALL_FAILED = { echo "make: could not install cupy-staged$(EXTRA) into $(VENV); pip's reason is above." \
  "CUDA=none leaves CuPy out and runs on the host." >&2; exit 1; }

.PHONY: demo test sanitize lint types docs wheel bench-check clean

demo: $(RUN)
	$(BIN)/cupy-staged demo

# `python -m pytest` and not `pytest`: it tests this checkout.
test: $(TEST)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# A kernel that reads or writes a byte outside an allocation fails it. `timeout` ends a run that hangs.
SANITIZER ?= compute-sanitizer
sanitize: $(TEST)
	@command -v $(SANITIZER) >/dev/null || { echo "make: $(SANITIZER) is not on the path: it comes with the CUDA toolkit, and needs a GPU" >&2; exit 1; }
	timeout 100 $(SANITIZER) --tool memcheck --report-api-errors no --error-exitcode 9 $(BIN)/python tests/sanitize.py

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

docs: $(DEV)
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs build/docs

# The wheel is built from the sdist, so a file that the sdist forgets is missed here and not by a user.
wheel: $(DEV)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

bench-check: $(DEV)
	cd asv_bench && "$(abspath $(BIN))/asv" check --environment "existing:$(abspath $(BIN))/python"

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis asv_bench/.asv
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --clear, because an environment that was left half made, or that has the CuPy of another CUDA major, is not repaired by
# installing over it. Dependency groups need pip 25.1, and Python 3.11 brings an older one.
$(MADE):
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("make: cupy_staged needs Python 3.11 or newer; $(PYTHON) is %d.%d. PYTHON=python3.12 chooses another." % v[:2])'
	@echo "making $(VENV) (CUDA: $(CUDA))"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install "pip>=25.1" || $(INSTALL_FAILED)
	@touch $@

# An editable install: an edit needs no new one, but new dependencies in pyproject.toml do.
$(RUN): $(MADE) pyproject.toml
	@echo "installing cupy-staged$(EXTRA): a minute or two the first time"
	@$(PIP) install --editable ".$(EXTRA)" || $(INSTALL_FAILED)
	@touch $@

$(TEST): $(RUN)
	@$(PIP) install --group test || $(INSTALL_FAILED)
	@touch $@

$(DEV): $(RUN)
	@$(PIP) install --group dev || $(INSTALL_FAILED)
	@touch $@
