# Targets: all but gpu create the virtual environment if it is missing or out of date; gpu uses $(PYTHON) as it is.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
# Installation compiles these sources, so the environment depends on them.
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py kernels/compiled/*/*.cpp kernels/compiled/*/*.h mucudnn/running/eager/*.cpp mucudnn/running/eager/*.h mucudnn/graph/*.cpp)
# Packages that make gpu needs in $(PYTHON).
IMPORTED := torch numpy pandas psutil pulp click rich pytest

define require_version
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "$(PYTHON) is too old: mucudnn needs Python 3.11 or later; try make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
endef

.PHONY: test test-all test-machines test-pythons fuzz sanitize lint docs gallery wheel wheel-aarch64 gpu help

help:
	@echo "make test   the tests that a change needs (five minutes on two cores)"
	@echo "make test-all  the slow ones too (compilers, kills, Chromium, other runtimes), on four simulated processors too"
	@echo "make test-machines  what depends on the processor, on simulated ones: fewer instruction sets, 1, 2 and 4 threads"
	@echo "make test-pythons  make test with each Python from 3.11 on that is on the path, and with the oldest torch that is"
	@echo "            allowed, each in its own environment (TESTS=tests/core: only these)"
	@echo "make fuzz   random problems, faults and kills against every algorithm, command and file; 5,000 random"
	@echo "            geometries tuned and run in child processes (hours)"
	@echo "make sanitize  the compiled code and its tests under AddressSanitizer and UndefinedBehaviorSanitizer (g++)"
	@echo "make lint   ruff (check and format), mypy and import-linter"
	@echo "make docs   the documentation site, built strictly into build/site"
	@echo "make gallery  a real run on this machine, and every kind of picture drawn of it (10 minutes)"
	@echo "make wheel  build sdist and wheel, for each Python from 3.11 on, into build/wheel, and try it (four minutes)"
	@echo "make wheel-aarch64  cross-compile the wheel for ARM (g++-aarch64-linux-gnu)"
	@echo "make gpu    run the tests of an NVIDIA GPU, then benchmarks of limits, networks and training,"
	@echo "            and the recipes on it; installs nothing (under 10 minutes)"

# One process per core, at most four: a process takes up to 1 GiB. Fixtures expect a file's tests in a single process.
# A test that hangs ends its process (pyproject.toml), and with it the run: pytest-xdist 3.8 hangs if it restarts one.
PARALLEL := -n auto --maxprocesses 4 --max-worker-restart 0 --dist loadfile

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(TESTS)

test-all: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL)
	$(BIN)/python tests/support/machines.py --models-only $(PARALLEL)

test-machines: $(VENV)/.test
	$(BIN)/python tests/support/machines.py $(PARALLEL)

# Other versions warn of other things, so warnings are no errors. Empty, OLDEST_TORCH leaves its environment out.
OLDEST_TORCH ?= 2.9.*
ENVIRONMENTS := $(CURDIR)/build/pythons
test-pythons: export PYTEST_ADDOPTS = -W default
test-pythons:
	mkdir -p $(ENVIRONMENTS)
	sed 's/^torch==.*/torch==$(OLDEST_TORCH)/' constraints.txt > $(ENVIRONMENTS)/oldest-torch.txt
	for python in $(PYTHONS); do \
		$(MAKE) test VENV=$(ENVIRONMENTS)/$$(basename $$python) PYTHON=$$python || exit 1; \
	done
	test -z "$(OLDEST_TORCH)" || $(MAKE) test VENV=$(ENVIRONMENTS)/oldest-torch PYTHON=$(firstword $(PYTHONS)) \
		CONSTRAINTS=$(ENVIRONMENTS)/oldest-torch.txt

fuzz: $(VENV)/.test
	MUCUDNN_FUZZ=full $(BIN)/python -m pytest -m fuzz $(PARALLEL)

# Test a separate build with sanitizers, for every instruction set that this processor has. bin/pytest, unlike python -m
# pytest, does not put this folder first on the path. The sanitizers are preloaded, since Python is not linked with
# them, and do not report leaks, since Python leaks by design. --capture=sys shows reports of workers that a sanitizer
# ends. Algorithms without compiled code are left out, and test_compiled_builds.py, which starts every build itself.
SANITIZED := $(CURDIR)/build/sanitized
SANITIZERS = $(shell $(CXX) -print-file-name=libasan.so):$(shell $(CXX) -print-file-name=libubsan.so)
RUNNABLE_BUILDS := from mucudnn.kernels.compiled.library import BUILDS, loaded_build; \
	print(*BUILDS[BUILDS.index(loaded_build().name):])
sanitize: $(VENV)/.test
	MUCUDNN_SANITIZE=1 MUCUDNN_BUILDS=all $(BIN)/python setup.py -q build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	builds=$$($(BIN)/python -c "$(RUNNABLE_BUILDS)") || exit 1; \
	for build in $$builds; do \
		LD_PRELOAD=$(SANITIZERS) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		MUCUDNN_BUILD=$$build MUCUDNN_SANITIZE=1 PYTHONPATH=$(SANITIZED)/lib $(BIN)/pytest -p no:cacheprovider \
		$(PARALLEL) --capture=sys -k "not [native and not [gemm] and not [direct] and not [fft and not [frames-native and not [patches" \
		tests/kernels/test_sanitizers.py tests/kernels/test_algorithm_contract.py tests/kernels/test_fuzz_problems.py \
		tests/kernels/test_compiled_checks.py tests/kernels/test_compiled_edges.py \
		tests/kernels/test_bound_stages.py tests/kernels/test_normalization.py tests/kernels/winograd/test_winograd.py tests/graph/test_programs.py || exit 1; \
	done

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir $(CURDIR)/build/site

# Results and pictures are in build/gallery; an interrupted run continues there.
GALLERY := $(CURDIR)/build/gallery
BENCH = $(BIN)/python -m mucudnn bench
gallery: $(VENV)/.test
	mkdir -p $(GALLERY)
	$(BENCH) convolutions deepbench-train --batch 16 --memory-format contiguous --filter 3x3,5x5 --workspace-limit 2MiB,16MiB \
		--rounds 7 --run-time-limit 8m --database $(GALLERY)/measurements.sqlite --out $(GALLERY)/deepbench
	$(BIN)/python -m mucudnn report $(GALLERY)/deepbench --pictures $(GALLERY)/pictures

# The wheel is built from the sdist, with the extensions for each Python that is there, and tested in its own environment,
# in a folder that cannot import the checkout. auditwheel names it after the glibc that it needs.
WHEEL := $(CURDIR)/build/wheel
PYTHONS = $(shell for minor in 11 12 13 14; do python3.$$minor -c 'import sys; print(sys.executable)' 2>/dev/null; done; true)
BUILD_WHEEL = MUCUDNN_BUILDS=all MUCUDNN_PYTHONS=$(subst $() ,:,$(PYTHONS)) $(BIN)/python -m build
TRIED := cd $(WHEEL) && PYTHONPATH= MUCUDNN_DATABASE=$(WHEEL)/measurements.sqlite $(WHEEL)/venv/bin
wheel: $(VENV)/.dev
	rm -rf $(WHEEL)
	$(BUILD_WHEEL) --outdir $(WHEEL)/unnamed .
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --wheel-dir $(WHEEL) $(WHEEL)/unnamed/*.whl
	mv $(WHEEL)/unnamed/*.tar.gz $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt $(WHEEL)/*.whl
	$(TRIED)/mucudnn doctor
	$(TRIED)/mucudnn layers alexnet
	$(TRIED)/mucudnn tune alexnet --batch 1 --operations forward --time-limit 1s
	$(TRIED)/python $(CURDIR)/examples/first_steps.py

wheel-aarch64: $(VENV)/.dev
	CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 \
		$(BUILD_WHEEL) --wheel --outdir $(WHEEL)/aarch64 .

# Uses the CUDA build of torch in $(PYTHON); for example make gpu ONLY=limits MINUTES=5 OUT=results.
gpu:
	$(require_version)
	@$(PYTHON) -c 'import sys; from importlib.util import find_spec; \
		lacking = ", ".join(name for name in sys.argv[1:] if find_spec(name) is None); \
		sys.exit("$(PYTHON) lacks " + lacking + ": install it, or name another, as PYTHON=$(BIN)/python" if lacking else 0)' \
		$(IMPORTED)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" PYTHON="$(PYTHON)" \
		ONLY="$(ONLY)" MINUTES="$(MINUTES)" OUT="$(OUT)" tests/gpu/run.sh

$(VENV)/.installed: $(SOURCES)
	$(require_version)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -e .
	@touch $@

# Install the requirements of an extra of pyproject.toml; mucudnn itself is not compiled again.
EXTRA = import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"], sep="\n")
$(VENV)/.test $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/.installed
	$(BIN)/python -c '$(EXTRA)' \
		| $(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS) -r /dev/stdin
	@touch $@
