# `make` alone lists the targets. Everything runs in .venv, which the targets make and keep up to date by themselves.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo demo-ui test test-all test-deep test-soak test-plain test-lowest test-bench test-pythons test-sparks check check-mypy check-pyright check-imports fix bench bench-spark docs docs-versions screenshots release clean

# Compiled modules are what makes the thousands of processes of the tests start quickly; and what a user has set for other
# projects must not reach this one.
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH QWORKER_URL VENV
# In an empty environment shells know where programs are, and do not tell their children. And what makes and mounts a file system
# lives where a user's PATH does not look.
export PATH := $(or $(PATH),/usr/local/bin:/usr/bin:/bin):/usr/local/sbin:/usr/sbin:/sbin

bin := .venv/bin
processors := $(shell nproc 2>/dev/null || echo 2)
# Most tests wait for files, servers and processes: two test processes a processor, and eight at most.
jobs := $(shell n=$$((2 * $(processors))); echo $$((n < 8 ? n : 8)))
# Plugins that other installed packages bring, and that no test here needs.
options := -m pytest -q -p no:anyio -p no:doctest -p no:pastebin -p no:junitxml -p no:nose --tb=native
parallel := -n $(jobs) --dist loadgroup -m "not serial and not deep"
pytest := $(bin)/python $(options)
sources := qworker backends examples tests
# What says whether a Python or a set of dependencies will do: no Spark, no other programs.
core := tests/unit tests/contract tests/property
# What says whether an installed wheel will do, without extras.
plain := tests/e2e/test_help.py tests/e2e/test_demo.py tests/e2e/test_health.py tests/unit/test_docs.py \
    -k '(help or demo or blocks_the_loop or (page_does and (README or quickstart or retries))) and not dashboard'

# These tests write and sync many thousands of small files, which takes a third of the time in memory. TMPDIR=/var/tmp puts the
# files on a disk, where those of the other targets are.
test test-plain test-lowest test-pythons test-sparks release: export TMPDIR := $(or $(TMPDIR),$(shell .ci/scratch.sh))

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Watch tasks run on a durable queue, a minute from a fresh clone
	@.ci/venv.sh
	@$(bin)/qworker demo

demo-ui: ## Look at the dashboard of a store with messages in every state (ARGS="--port 8090")
	@.ci/venv.sh
	@$(bin)/qworker demo --ui $(ARGS)

test: ## Run the tests that a change must pass, in 15 to 30 minutes (ARGS="-k name" narrows it)
	@.ci/venv.sh test
	@tests/install-tools.sh
	$(pytest) $(parallel) $(ARGS)
	@# Tests that must not share the machine run one after another, where there are any.
	@if [ -z "$(ARGS)" ] && files=$$(grep -rlE 'mark\.serial\b' tests --include='*.py'); then \
	    set -x; $(pytest) -m serial $$files; fi

test-all: test release test-lowest test-bench test-deep test-soak test-pythons test-sparks ## Run everything

test-deep: ## The tests with more kills, seeds and examples (DEPTH=4)
	@.ci/venv.sh test
	@tests/install-tools.sh
	QWORKER_TEST_DEPTH=$(or $(DEPTH),4) $(pytest) $(parallel) tests/fault tests/property tests/unit/test_schedule_times.py tests/unit/test_sq_format.py tests/unit/test_fsq_queue.py tests/e2e/test_examples.py
	QWORKER_TEST_DEPTH=$(or $(DEPTH),4) $(pytest) -m serial tests/fault
	QWORKER_TEST_DEPTH=$(or $(DEPTH),4) $(pytest) tests/spark/test_written_by.py
	$(pytest) -m deep tests

test-soak: ## Workers and publishers that are killed all the time, for a while (SECONDS=180 KILLS=500)
	@.ci/venv.sh test
	@tests/install-tools.sh
	QWORKER_TEST_SOAK=$(or $(SECONDS),180) QWORKER_TEST_KILLS=$(or $(KILLS),500) $(pytest) -n 2 -rP \
	    tests/fault/test_soak.py tests/fault/test_results.py

test-plain: ## What a user has: the wheel without extras
	@.ci/venv.sh test
	@VENV=.venv-plain .ci/venv.sh --wheel
	TEST_PYTHON=$(CURDIR)/.venv-plain/bin/python $(pytest) -n $(jobs) $(plain)

test-bench: ## Every figure of the bench with small numbers: they run, and mean nothing
	@.ci/venv.sh test
	@tests/install-tools.sh
	$(bin)/python tests/bench/run.py --quick --own

test-lowest: ## The lowest versions that pyproject.toml allows (TESTS=tests/contract for a part)
	@.ci/venv.sh
	@VENV=.venv-lowest .ci/venv.sh --lowest --no-spark test
	@tests/install-tools.sh
	.venv-lowest/bin/python $(options) $(parallel) $(or $(TESTS),tests/unit tests/contract)

test-pythons: ## Other Pythons: PYTHONS="python3.12 /opt/python3.14/bin/python3", or those that are found here
	@.ci/venv.sh
	@tests/install-tools.sh
	@for python in $${PYTHONS:-$$(.ci/pythons)}; do \
	    venv=.venv-$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit; \
	    VENV=$$venv PYTHON=$$python .ci/venv.sh --no-spark test || exit; \
	    (set -x; $$venv/bin/python $(options) $(parallel) $(core)) || exit; \
	done

test-sparks: ## Spark 4.0 with the lowest versions of its companions, and Spark 4.1; the newest are those of `make test`
	@.ci/venv.sh
	@VENV=.venv-spark .ci/venv.sh --lowest test
	@VENV=.venv-spark-4.1 .ci/venv.sh '--with=pyspark==4.1.*' test
	@tests/install-tools.sh
	@# These releases leave the sockets of foreachBatch open.
	@for venv in .venv-spark .venv-spark-4.1; do \
	    (set -x; $$venv/bin/python $(options) $(parallel) -W ignore::ResourceWarning \
	        -W ignore::pytest.PytestUnraisableExceptionWarning tests/spark) || exit; \
	done

check: ## Format, lint, types and the direction of imports, as CI sees them
	@.ci/venv.sh test check docs
	$(bin)/ruff format --check $(sources)
	$(bin)/ruff check $(sources)
	@# Each of these uses one processor.
	@$(MAKE) --no-print-directory --output-sync --jobs=$(processors) check-mypy check-pyright check-imports

check-mypy:
	$(bin)/mypy

check-pyright:
	$(bin)/pyright --pythonpath $(bin)/python

check-imports:
	$(bin)/lint-imports

fix: ## Format, and fix what ruff can fix
	@.ci/venv.sh check
	$(bin)/ruff format $(sources)
	$(bin)/ruff check --fix $(sources)

bench: ## Measure what docs/explanation/benchmarks.md claims (ARGS="--only latency --quick")
	@.ci/venv.sh test
	@$(bin)/python tests/bench/run.py $(ARGS)

bench-spark: ## Measure what docs/explanation/benchmarks.md claims of the pipeline
	@.ci/venv.sh test
	@tests/install-tools.sh
	@$(bin)/python tests/bench/run.py --spark $(ARGS)

docs: ## Build the site into site/, strictly
	@.ci/venv.sh docs
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --quiet

docs-versions: ## Build the site of this tree and of the newest release, with a choice of the version
	@.ci/venv.sh docs
	@.ci/site_versions.sh

screenshots: ## Take the pictures of the dashboard in docs/images again (fonts: fonts-inter, fonts-jetbrains-mono)
	@.ci/venv.sh test
	@tests/install-tools.sh
	$(bin)/python -m tests.support.screenshots

release: ## Build a release into dist/, check, install and test it, and publish nothing (TAG=v0.2.0 checks that too)
	@.ci/venv.sh test release
	@rm -rf dist .venv-release
	@# The wheel is built from the sdist.
	$(bin)/python -m build --outdir dist
	$(bin)/python -m twine check --strict dist/*
	$(bin)/python .ci/check_release.py dist $(TAG)
	@VENV=.venv-release .ci/venv.sh --wheel="$$(echo dist/*.whl)"
	.venv-release/bin/qworker --version
	.venv-release/bin/qworker demo
	TEST_PYTHON=$(CURDIR)/.venv-release/bin/python $(pytest) -n $(jobs) $(plain)

clean: ## Remove what the targets made
	rm -rf .venv .venv-* site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
