# `make` alone lists the targets. Everything runs in .venv, which the targets make and keep up to date by themselves.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test check fix bench bench-spark docs clean

# Compiled modules are what makes the thousands of processes of the tests start quickly; and what a user has set for other
# projects must not reach this one.
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH QWORKER_URL
# In an empty environment shells know where programs are, and do not tell their children.
export PATH := $(or $(PATH),/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)

bin := .venv/bin
processors := $(shell nproc 2>/dev/null || echo 2)
# Most tests wait for files, servers and processes: two test processes a processor, and eight at most.
jobs := $(shell n=$$((2 * $(processors))); echo $$((n < 8 ? n : 8)))
# Plugins that other installed packages bring, and that no test here needs.
pytest := $(bin)/python -m pytest -q -p no:anyio -p no:doctest -p no:pastebin -p no:junitxml -p no:nose --tb=native
sources := qworker backends examples tests

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Watch tasks run on a durable queue, a minute from a fresh clone
	@.ci/venv.sh
	@$(bin)/qworker demo

test: ## Run every test (ARGS="-k name" narrows it)
	@.ci/venv.sh test
	@tests/install-tools.sh
	$(pytest) -n $(jobs) --dist loadgroup -m "not serial" $(ARGS)
	@# Tests that must not share the machine run one after another, where there are any.
	@if [ -z "$(ARGS)" ] && grep -rqE 'mark\.serial\b' tests --include='*.py'; then set -x; $(pytest) -m serial; fi

check: ## Format, lint, types and the direction of imports, as CI sees them
	@.ci/venv.sh test check docs
	$(bin)/ruff format --check $(sources)
	$(bin)/ruff check $(sources)
	$(bin)/mypy
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/lint-imports

fix: ## Format, and mend what ruff can mend
	@.ci/venv.sh check
	$(bin)/ruff format $(sources)
	$(bin)/ruff check --fix $(sources)

bench: ## Measure what docs/benchmarks.md claims (ARGS="--only latency --quick")
	@.ci/venv.sh test
	@$(bin)/python tests/bench/run.py $(ARGS)

bench-spark: ## Measure what docs/benchmarks.md claims of the pipeline
	@.ci/venv.sh test
	@tests/install-tools.sh
	@$(bin)/python tests/bench/run.py --spark $(ARGS)

docs: ## Build the site into site/, strictly
	@.ci/venv.sh docs
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --quiet

clean: ## Remove what the targets made
	rm -rf .venv site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
