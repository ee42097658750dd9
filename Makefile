# PYTHON: which Python to use. An active virtual environment, or one that PYTHON lies in, is used as it is; otherwise
# .venv is made here. Everything that is missing is installed and built first.
PYTHON ?= $(or $(if $(VIRTUAL_ENV),$(wildcard $(VIRTUAL_ENV)/bin/python)),$(wildcard .venv/bin/python),python3)
PREPARED := $(PYTHON) scripts/bootstrap.py

# At most 4 test processes, and threads for the cores they leave.
CORES := $(shell env -u OMP_NUM_THREADS nproc)
WORKERS ?= $(shell echo $$(($(CORES) > 4 ? 4 : $(CORES))))
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(shell echo $$(($(CORES) > $(WORKERS) ? $(CORES) / $(WORKERS) : 1)))} \
	$(PREPARED) -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-all bench build sanitize clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: ## a tiny trained model works out a sum, token by token and by speculating on itself
	@$(PREPARED) -m pdkernels generate --model tiny-trimode --method autoregressive --method linear_self_speculation --block-size 16 --check --prompt "482 + 967 = ?"

test: ## the tests: a few minutes
	@$(PYTEST) -m "not slow"

test-all: ## the tests with all long sweeps
	@$(PYTEST)

bench: ## the benchmarks; results in bench/results/local
	@mkdir -p bench/results/local
	@$(PREPARED) -m pytest bench --benchmark-only --benchmark-json=bench/results/local/benchmarks.json

build: ## install what is missing, compile, make the checkout importable
	@$(PREPARED)

sanitize: ## the op tests on a build with address and undefined-behaviour sanitizers
	@$(PREPARED) -m pytest tests/test_sanitizers.py

clean: ## remove what was built (not .venv)
	rm -rf build dist *.egg-info pdkernels/*.so .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
