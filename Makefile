# Every target stands alone: it makes .venv, installs what it needs there, and runs.
# PYTHON=python3.12 chooses the interpreter; LAPWING_DATA=folder the data sets (without it, what needs them is skipped by name).
# WORKERS=0 runs the tests in one process, to debug them.
PYTHON ?= python3
WORKERS ?= auto
BIN := .venv/bin

# a folder of data sets beside the checkout is found by itself; an empty LAPWING_DATA turns that off
ifeq ($(origin LAPWING_DATA),undefined)
ifneq ($(wildcard ../shared/data/.),)
export LAPWING_DATA := $(abspath ../shared/data)
endif
endif

# bytecode is kept, also where the environment says no: without it every process of the tests rewrites and compiles all files
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-gpu test-integrations test-oldest test-newest lint bench papers verify docs pictures release-check

demo: .venv/installed
	$(BIN)/python examples/demo.py

test: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow"

test-slow: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) -m slow

# every feature on a GPU beside the CPU, and every method on every network against its oracle there;
# skipped where torch finds none. LAPWING_DEVICE=pretended runs the latter on a pretended GPU
test-gpu: .venv/installed
	LAPWING_DEVICE=cuda $(BIN)/python -m pytest -n $(WORKERS) tests/network/test_devices.py tests/network/test_features_on_gpu.py tests/methods/test_methods.py

test-integrations: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[sklearn,huggingface,botorch,lightning,mapie,ase]" crepes pandas peft bitsandbytes
	$(BIN)/python -m pytest -n $(WORKERS) tests/integrations

# tests of some rooms with the oldest versions that pyproject.toml declares, in an environment of their own: PYTHON=python3.11
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install -q -c constraints-oldest.txt -e ".[eval]" pytest pytest-xdist scipy transformers
	.venv-oldest/bin/python -m pytest -n $(WORKERS) -m "not slow" tests/data tests/linalg tests/covariance tests/fitting tests/running tests/likelihoods tests/posterior tests/prediction tests/evaluation

# all tests but the slow ones with the newest torch, in an environment of their own; other packages as in constraints.txt
test-newest:
	$(PYTHON) -m venv .venv-newest
	grep -v "^torch==" constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/python -m pip install -q -c .venv-newest/constraints.txt pip
	.venv-newest/bin/python -m pip install -q --upgrade -c .venv-newest/constraints.txt torch -e ".[eval,cli,export]" --group test
	.venv-newest/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow"

# runs the cost benchmarks; `.venv/bin/python -m benchmarks` lists all, and `... -m benchmarks answers` runs one
bench: .venv/installed
	$(BIN)/python -m benchmarks bench

# lists the experiments; `.venv/bin/python -m papers ella table5` runs one
papers: .venv/installed
	$(BIN)/python -m papers

# computes what is fast of the papers anew, and compares it with the ledger
verify: .venv/installed
	$(BIN)/python -m papers verify

# builds the site into docs/_build/html; a warning is an error
docs: .venv/installed-docs
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build/html

# runs the scripts of examples/tasks that changed, for the pictures that the site shows
pictures: .venv/installed-docs
	$(BIN)/python tools/gallery.py

# builds the release, and runs it where nothing but the wheel and what it declares is installed
release-check: | $(BIN)/pip
	$(BIN)/python tools/release_check.py

lint: .venv/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_types.py

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lapwing needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing torch into .venv. Without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves gigabytes."
	$(BIN)/python -m pip install -q -c constraints.txt pip torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[eval,cli,export]" --group test
	@touch $@

.venv/installed-lint: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt --group lint
	@touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[eval,mapie]" --group docs
	@touch $@
