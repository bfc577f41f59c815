# The one command surface. `make help` lists the targets.
#
#   PYTHON   the interpreter that makes .venv, and that runs test-gpu and bench on a GPU machine
#   TORCH    what pip installs as torch, for example TORCH=torch==2.13.0
#   VENV     where it goes
#   WORKLOAD of benchmarks/live.py, for bench: gpt, resnet50, llama-generate, vit, llama-lora
#   PART     of test-gpu and test-gpu-long (tests/gpu_parts.py): only these parts
#   JOBS     processes of test-py
#   *_ARGS   more arguments for what a target runs

PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
WORKLOAD ?=
PART ?=
REPLAY_ARGS ?=
MECHANISMS ?=
JUDGE_ARGS ?=

CLANG_FORMAT_VERSION = 20.1.8
PTX_ARCHS = sm_75 sm_80 sm_90
BUILD_TOOLS = "setuptools>=68" wheel numpy nvidia-ml-py
TEST_TOOLS = pytest pytest-timeout pytest-xdist hypothesis coverage rich matplotlib accelerate \
             lightning expecttest transformers
LINT_TOOLS = ruff mypy clang-format==$(CLANG_FORMAT_VERSION)

PY = $(VENV)/bin/python
# .venv's, or on a GPU machine its own.
ANY_PY = $(if $(wildcard $(PY)),$(PY),$(PYTHON))
STAMP = $(VENV)/.ready
C_FILES = $(shell find csrc tests/c -name '*.[ch]' -o -name '*.cpp')
PY_FILES = python tests benchmarks examples docs setup.py
IN_PLACE = PYTHONPATH=$(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help venv build demo test test-c test-py test-gpu test-gpu-long test-gpu-product test-gpu-memcheck \
        test-gpu-ops test-gpu-programs bench bench-plot replay \
        judge judge-tenth fault stress asan tsan mechanisms lint format types cover docs ptx check \
        clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(STAMP) ## make .venv with torch and every tool

$(STAMP): Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "torchpager needs Python 3.10 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet $(TORCH) $(BUILD_TOOLS)
	$(PY) -m pip install --quiet $(TEST_TOOLS) $(LINT_TOOLS)
	echo "$(CURDIR)/python" > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torchpager.pth"
	touch $@

build: $(STAMP) ## build the extensions in place, against the torch in .venv
	$(PY) setup.py --quiet build_ext --inplace

demo: build ## train plain and inside half the memory, compare, draw build/demo.png
	$(PY) -m torchpager demo $(DEMO_ARGS)

test: test-c test-py ## the C tests and the Python tests; needs no GPU

test-c: ## the C tests on the simulated device
	$(MAKE) -C tests/c test

test-py: build ## the Python tests, and the named scenarios on the simulated device
	$(PY) -m pytest -n $(JOBS) --dist loadfile tests/py tests/scenarios $(PYTEST_ARGS)

test-gpu: ## on a GPU machine, with its own python and torch: C contract on CUDA, tests/gpu, scenarios
	$(IN_PLACE) $(PYTHON) tests/gpu_parts.py $(PART) -- $(PYTEST_ARGS)

test-gpu-long: ## there too, what takes minutes; PART="live gpt_bits" (or recompute models overhead regions)
	$(IN_PLACE) $(PYTHON) tests/gpu_parts.py --long $(PART) -- $(PYTEST_ARGS)

test-gpu-product: ## there too: the demo, the GPT in part of its memory, overhead, doors, in 8 to 10 minutes
	$(IN_PLACE) $(PYTHON) tests/gpu_parts.py --product $(PART) -- $(PYTEST_ARGS)

test-gpu-memcheck: ## there too: the contract and the core of tests/gpu under compute-sanitizer, 2 minutes
	$(IN_PLACE) $(PYTHON) tests/gpu_parts.py --memcheck $(PART) -- $(PYTEST_ARGS)

test-gpu-ops: ## there too: PyTorch's operator samples, 7 minutes of them; run it again for the rest
	$(PYTHON) setup.py --quiet build_ext --inplace
	$(IN_PLACE) timeout --kill-after=5 470 $(PYTHON) tests/judge/operators.py --device cuda --jobs 6 \
	    --seconds 400 $(JUDGE_ARGS) || [ $$? -eq 3 ]

test-gpu-programs: ## there too: programs of several libraries inside half their memory, 5 minutes
	$(PYTHON) setup.py --quiet build_ext --inplace
	$(IN_PLACE) timeout --kill-after=5 470 $(PYTHON) tests/judge/programs.py --device cuda --jobs 3 \
	    $(JUDGE_ARGS)

judge: build ## PyTorch's operator samples, gpytorch's tests and programs of libraries under paging; half an hour
	$(PY) tests/judge/operators.py $(JUDGE_ARGS)
	$(PY) tests/judge/foreign_suite.py --strict $(JUDGE_ARGS)
	$(PY) tests/judge/programs.py

judge-tenth: build ## a tenth of both, chosen by a seed, and the programs
	$(PY) tests/judge/operators.py --share 10 --results build/judge/operators-tenth.jsonl $(JUDGE_ARGS)
	$(PY) tests/judge/foreign_suite.py --share 10 $(JUDGE_ARGS)
	$(PY) tests/judge/programs.py

bench: ## overhead without pressure; WORKLOAD=gpt (live.py --help): native, ours and other tools, live
	$(ANY_PY) setup.py --quiet build_ext --inplace
	$(IN_PLACE) timeout --kill-after=5 475 $(ANY_PY) \
	    $(if $(WORKLOAD),benchmarks/live.py --workload $(WORKLOAD),benchmarks/overhead.py) $(BENCH_ARGS)

bench-plot: ## what they have measured, as build/live.png; needs matplotlib
	$(ANY_PY) benchmarks/plot_live.py $(BENCH_ARGS)

replay: build ## recorded traces under a virtual clock: what plans make of them; build/replay.json
	$(PY) benchmarks/replay.py --check benchmarks/results/replay.json $(REPLAY_ARGS)

mechanisms: build ## each mechanism taken away in turn: which test misses it
	+@$(MAKE) -C tests/c all
	$(PY) tests/mechanisms.py $(MECHANISMS)

fault: ## every public C call, with the 1st, 2nd, 3rd ... device call failing
	$(MAKE) -C tests/c fault

stress: ## the seeded schedules and the random model test, long
	$(MAKE) -C tests/c stress

asan: ## the C tests under AddressSanitizer and UBSan
	$(MAKE) -C tests/c asan

tsan: ## the C tests under ThreadSanitizer
	$(MAKE) -C tests/c tsan

lint: $(STAMP) ## ruff and clang-format, checking only
	$(VENV)/bin/ruff check $(PY_FILES)
	$(VENV)/bin/ruff format --check $(PY_FILES)
	$(VENV)/bin/clang-format --dry-run --Werror $(C_FILES)

format: $(STAMP) ## apply ruff and clang-format
	$(VENV)/bin/ruff check --fix $(PY_FILES)
	$(VENV)/bin/ruff format $(PY_FILES)
	$(VENV)/bin/clang-format -i $(C_FILES)

types: $(STAMP) ## mypy --strict
	$(VENV)/bin/mypy

cover: build ## line coverage of the Python package
	$(PY) -m coverage run --source=python/torchpager -m pytest -q tests/py tests/scenarios $(PYTEST_ARGS)
	$(PY) -m coverage report --skip-covered

docs: $(STAMP) ## links and code blocks of the Markdown files
	$(PY) docs/check.py

ptx: ## after a change of csrc/device/fingerprint.cu, on a machine with nvcc: its text anew
	@mkdir -p build
	nvcc -ptx -O3 -std=c++17 -arch=compute_75 -o build/fingerprint.ptx csrc/device/fingerprint.cu
	sed -i -e '/^\/\//d; /^$$/d; s/^\.version .*/.version 6.3/; s/^\.target .*/.target sm_70/' \
	    -e 's/[[:space:]]*\/\/.*$$//' build/fingerprint.ptx
	for arch in $(PTX_ARCHS); do ptxas -arch=$$arch -o /dev/null build/fingerprint.ptx || exit 1; done
	{ echo '/* Made by `make ptx` from device/fingerprint.cu; do not edit. sm_70: any later device can run it. */'; \
	  echo '/* clang-format off */'; \
	  echo '#ifndef TP_DEVICE_FINGERPRINT_PTX_H'; \
	  echo '#define TP_DEVICE_FINGERPRINT_PTX_H'; \
	  echo 'static const char fingerprint_ptx[] ='; \
	  sed -e 's/\\/\\\\/g; s/"/\\"/g; s/\t/ /g; s/^/    "/; s/$$/\\n"/' build/fingerprint.ptx; \
	  echo '    ;'; \
	  echo '#endif'; } >csrc/device/fingerprint_ptx.h

check: lint types docs test asan tsan fault ## everything that must pass before a commit

clean: ## remove builds, not .venv
	rm -rf build python/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find python/torchpager -name '*.so' -delete
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
	$(MAKE) -C tests/c clean
