# Everything here sets itself up: a virtual environment for each Python in .venv/, what is compiled in build/.

# Another Python: make test PYTHON=python3.13
PYTHON ?= python3

# What is built says what it was built from.
COMMIT ?= $(shell git describe --always --dirty 2>/dev/null)

# docker build, podman build, buildah build: all take these options.
BUILDER ?= docker build

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV    := .venv/$(VERSION)
BIN     := $(VENV)/bin

.PHONY: help demo test e2e check conformance conformance-mutants bench binary build-environment image api lock clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo         the main job, where there is neither GPU nor kubelet; about 15 s'
	@echo 'make test         all tests'
	@echo 'make conformance  those with the code of two real kubelets: needs Go; builds for 10 min the first time'
	@echo 'make conformance-mutants  plants faults in nvplug, each of which must turn one of them red; 20 min'
	@echo 'make e2e          a whole kubelet with real pods: needs root, Go and containerd; builds for 10 min the first time'
	@echo 'make check        format, lint, types, unit tests; under a minute'
	@echo 'make bench        how long everything takes; PEER="command" measures another plugin beside it'
	@echo 'make binary       dist/nvplug, one static executable for every Linux with glibc or without'
	@echo 'make image        the same as a container image, nvplug:dev, with BUILDER="docker build" or another'
	@echo 'make api          _nvplug/kubelet/api/ from proto/'
	@echo 'make lock         the lock files from pyproject.toml'

demo: $(VENV)/run
	@$(BIN)/python nvplug.py demo

test: $(VENV)/dev
	$(BIN)/python -m pytest -m 'not e2e and not mutants'

# With CI=true a missing Go is an error and nothing is skipped. Compiling a kubelet is not a test that hangs.
conformance: $(VENV)/dev
	CI=true $(BIN)/python -m pytest tests/kubelet --ignore tests/kubelet/test_mutants.py -o faulthandler_timeout=0

conformance-mutants: $(VENV)/dev
	CI=true $(BIN)/python -m pytest tests/kubelet/test_mutants.py -o faulthandler_timeout=0 -v

e2e: $(VENV)/dev
	$(BIN)/python -m pytest tests/e2e -o faulthandler_timeout=0

check: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m 'not (slow or process or frozen or conformance or e2e)' --hypothesis-profile quick

bench: $(VENV)/dev binary
	@$(BIN)/python -m tests.bench --executable dist/nvplug $(if $(PEER),--peer '$(PEER)')

# Hashes seeded and dates left out, so that the same commit gives the same bytes with the same Python, compiler and libc.
binary: build-environment
	@PYTHONHASHSEED=0 COMMIT='$(COMMIT)' \
	  $(VENV)-build/bin/pyinstaller --noconfirm --log-level WARN --distpath dist --workpath build/binary build.spec

image:
	$(BUILDER) --build-arg COMMIT='$(COMMIT)' --tag nvplug:dev .

api: $(VENV)/dev
	$(BIN)/python -m tests.generate_api _nvplug/kubelet/api

define SUITABLE
@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("nvplug needs Python 3.11 or newer; this is %s: make PYTHON=..." % sys.version.split()[0])'
@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo 'this Python has no venv module; on Debian: apt-get install python3-venv' >&2; exit 1; }
endef

# The environment that nvplug runs in, and the one that it is tested in. Both are installed from lock files, by hash.
$(VENV)/run: requirements.lock
	$(SUITABLE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
	@touch $@

$(VENV)/dev: $(VENV)/run requirements-dev.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements-dev.lock
	@touch $@

# An environment of its own, with nothing in it that PyInstaller could pick up by mistake.
build-environment: $(VENV)-build/complete
$(VENV)-build/complete: requirements.lock requirements-build.lock
	$(SUITABLE)
	@$(PYTHON) -c 'from freeze import bundle; bundle.check_python()'
	$(PYTHON) -m venv $(VENV)-build
	$(VENV)-build/bin/pip install --quiet --disable-pip-version-check --require-hashes \
	  --requirement requirements.lock --requirement requirements-build.lock
	@touch $@

lock: $(VENV)/dev
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --quiet \
	  --output-file requirements.lock pyproject.toml
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --quiet \
	  --constraint requirements.lock --group dev --output-file requirements-dev.lock pyproject.toml
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --quiet \
	  --constraint requirements.lock --group build --output-file requirements-build.lock

clean:
	rm -rf .venv build dist
