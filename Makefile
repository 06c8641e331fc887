# All targets share one environment: the folder .venv, with the extra that fits this machine.
#
#   make train      train, checkpoint, quantize, export and score DLRM on MovieLens
#   make serve      after make train: serve the model by NVIDIA Triton, on loopback
#   make stream     train on a stream of clicks while Triton serves, and measure the freshness
#   make daily      14 days of a model: extend, continue, compare, publish; four ways to learn
#   make test       the test suite; pass arguments with ARGS="-k jagged"
#   make test REST=1  the cases that notice few faults more, which `make test` leaves out
#   make test SLOW=1  the whole test suite with its slow cases
#   make test LONG=1  the cases that CI leaves out: many kills, sanitizers, further slow cases
#   make conformance  every sharding type, compared with the unsharded model and TorchRec; an hour
#   make predictor  build the C++ core for serving packages into build/predictor/
#   make bench      CPU benchmarks against TorchRec
#   make gpu        tests and benchmarks that need a GPU
#   make lint       ruff, codespell, mypy
#   make docs       build the documentation into site/
#   make notebooks  the tutorial and four guides as executed notebooks, in build/notebooks/
#   make clean      remove everything that make creates
#
# Python is python3; another one: make train PYTHON=python3.12
# torch's CPU or CUDA build is chosen by whether nvidia-smi works; otherwise: make train EXTRA=cpu

PYTHON ?= python3
EXTRA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
RANKS ?= 2

# Relative, so that the path to here may hold spaces.
VENV := .venv
BIN := $(VENV)/bin
# Without --no-compile, pip spends a minute on bytecode that is rarely used.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# An empty file per set of packages, renewed when it is older than pyproject.toml. Its name contains
# the extra, so a machine that gets a GPU installs again.
BASE := $(VENV)/.installed-$(EXTRA)
stamp = $(VENV)/.installed-$(EXTRA)-$(1)

.PHONY: train predictor serve stream daily test conformance bench gpu lint docs notebooks peers clean
.DELETE_ON_ERROR:

train: $(BASE)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=$(RANKS) examples/dlrm/train.py $(ARGS)

# The server comes in a wheel that requires an older numpy, so it is unpacked beside the environment.
TRITON := .cache/triton

serve: predictor $(call stamp,serving) $(TRITON)/.unpacked
	$(BIN)/python examples/serving/package.py
	exec $(BIN)/python examples/serving/serve.py $(ARGS)

stream: predictor $(TRITON)/.unpacked
	rm -rf runs/stream
	$(BIN)/python examples/stream/freshness.py $(ARGS)

daily: $(call stamp,plot)
	OMP_NUM_THREADS=1 $(BIN)/python examples/daily/daily.py runs/daily --compare $(ARGS)

$(TRITON)/.unpacked:
	$(PIP) --no-deps --target $(TRITON) nvidia-pytriton==0.7.0
	@touch $@

# Two processes run one file each at a time. One process, with a debugger: ARGS="-n 0 --pdb"
test: $(call stamp,test) $(if $(SLOW)$(LONG),$(call stamp,triton) $(call stamp,onnx) $(call stamp,lake))
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile \
	  $(if $(SLOW),,-m $(if $(LONG),long,$(if $(REST),rest,"not slow and not rest"))) $(ARGS)

# Needs CMake, a C++17 compiler and OpenSSL's headers (libssl-dev).
predictor: $(BASE)
	cmake -S recsys/inference/cpp -B build/predictor -DPython3_EXECUTABLE=$(BIN)/python
	cmake --build build/predictor --parallel

conformance: $(call stamp,test) $(call stamp,peers)
	$(BIN)/python -m tests.conformance $(ARGS)
	$(BIN)/python -W ignore -m tests.parity
	$(BIN)/python -m tests.conformance.report

bench: $(call stamp,peers)
	$(BIN)/python -m benchmarks $(ARGS)

gpu: $(call stamp,test) $(call stamp,peers)
	$(BIN)/python -m pytest tests/kernels/test_*_triton.py
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/python -m benchmarks.gpu $(ARGS)

lint: $(call stamp,dev)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/mypy

docs: $(call stamp,docs)
	$(BIN)/python docs/build.py

notebooks: $(call stamp,notebooks)
	OMP_NUM_THREADS=1 $(BIN)/python docs/notebooks.py $(ARGS)

peers: $(call stamp,peers)

clean:
	rm -rf $(VENV) build dist site docs/reference .cache runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python must be 3.11 or newer; received $$($(PYTHON) -V 2>&1) from '$(PYTHON)'." \
			"Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable ".[$(EXTRA),examples]"
	@touch $@

$(call stamp,test) $(call stamp,dev) $(call stamp,plot) $(call stamp,docs) $(call stamp,notebooks) $(call stamp,triton) $(call stamp,onnx) $(call stamp,lake) $(call stamp,serving): $(VENV)/.installed-$(EXTRA)-%: $(BASE)
	$(PIP) --editable ".[$(EXTRA),$*]"
	@touch $@

# TorchRec requires fbgemm-gpu without a version and would replace the installed pair.
$(call stamp,peers): $(BASE)
	$(PIP) --editable ".[$(EXTRA),peers]"
	$(PIP) --no-deps torchrec==1.8.0
	@touch $@
