# `make` shows what there is. Needs GNU make (3.81 or later), Python 3.11 or later and Java 17 or 21.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
LOCK := requirements/lock.txt
# Packages that are built while they are installed (PySpark, this project) are built with the lock's versions, too: older
# releases of pip read the first variable in their build environments, newer ones the second.
PIP_INSTALL = PIP_CONSTRAINT=$(LOCK) PIP_BUILD_CONSTRAINT=$(LOCK) $(BIN)/python -m pip install --quiet \
	--disable-pip-version-check -c $(LOCK)
PYTEST_ARGS ?=
# Processes that the tests are shared out to, a file to each at a time: every one has a Spark of its own.
TEST_WORKERS ?= 2

# The first of these that runs and is new enough; `make setup PYTHON=...` chooses another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done || true)
ifeq ($(strip $(PYTHON)),)
PYTHON := python3
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-kafka cluster test test-all test-slow test-slow-share test-browser soak mutants bench bench-quick bench-filters bench-journeys docs lint format airflow lock sbom audit clean

help: ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Check Python and Java, build .venv, fetch Spark's jars (once)

# A change of the pins, and nothing else, installs again. Jars that are there already are kept.
$(STAMP): pyproject.toml $(LOCK) jobs/spark/jars.sha256
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "error: Python 3.11 or later is needed, and there is no $(PYTHON): install it (Debian, Ubuntu: apt install python3.11 python3.11-venv; macOS: brew install python@3.11)" >&2; exit 1; }
	@$(PYTHON) jobs/spark/doctor.py
	@echo "Setting up $(VENV) with $$($(PYTHON) --version): a few minutes the first time, most of it PySpark (400 MB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[demo,dev]'
	@$(BIN)/python -m pip check
	$(BIN)/python -m jobs.spark.jars
	$(BIN)/python -m jobs.warm_up
	@touch $@

# MASTER=spark://... SPARK_CONF_DIR=... runs its DAGs' jobs on a cluster, as `make cluster` prints it;
# WAREHOUSE=s3a://bucket/folder keeps its tables there (docs/deploy.md).
demo: setup ## Run the whole pipeline on a year of flights, kill it on the way, check it
	$(if $(MASTER),KALMAN_MASTER=$(MASTER)) $(BIN)/python -m demo.run $(if $(WAREHOUSE),--warehouse $(WAREHOUSE))

# ENCRYPT=1 encrypts what Spark's processes send each other.
cluster: setup ## Run a Spark master and two workers here until Ctrl-C, and print how to use it
	$(BIN)/python -m demo.cluster $(if $(ENCRYPT),--encrypt)

demo-kafka: setup ## Feed a topic, stream it, kill the broker on the way, check it (a real broker)
	$(BIN)/python -m demo.kafka_run

PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# Of the tests that start Spark or Airflow, those with the mark core: each promise once, from files to a DAG's run.
CORE := (core or not spark and not airflow) and not slow and not soak

test: setup ## Run the tests without Spark, and the core of those with it: ten minutes on two cores
	$(PYTEST) -m "$(CORE)" $(PYTEST_ARGS)

test-all: setup ## Run all tests but slow and soak: what a change has to pass, twenty minutes on two cores
	$(PYTEST) $(PYTEST_ARGS)

# Both write tests/slow_runs.tsv.
SLOW_TESTS := $(BIN)/python scripts/slow_tests.py --workers $(TEST_WORKERS)
test-slow: setup ## Run the tests that take longer, too many for every change
	$(SLOW_TESTS) all $(PYTEST_ARGS)

test-slow-share: setup ## Run the slow tests of what changed, and those whose turn it is: ten minutes
	$(SLOW_TESTS) share $(PYTEST_ARGS)

# Needs Chromium (apt install chromium). PICTURES=docs/pictures takes those of Airflow's pages anew.
test-browser: setup ## Log in, trigger, approve and read reports in a real browser, with a real Airflow: five minutes
	$(if $(PICTURES),KALMAN_BROWSER_PICTURES=$(PICTURES)) $(BIN)/python -m pytest -m slow tests/browser $(PYTEST_ARGS)

# Each in a process of its own: they end Spark's between their worlds, which the other tests share.
KILLS := tests/jobs/test_hundred_kills.py
STATE_KILLS := tests/jobs/test_state_kills.py
soak: setup ## Kill every verb and every step of the state at many moments, over three hundred times, and compare (hours)
	$(BIN)/python -m pytest -m soak --ignore $(KILLS) --ignore $(STATE_KILLS) $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m soak $(KILLS) $(PYTEST_ARGS)
	KALMAN_KILLS_STORE=s3 $(BIN)/python -m pytest -m soak $(KILLS) $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m soak $(STATE_KILLS) $(PYTEST_ARGS)

MUTANTS := $(VENV)/.mutants-ready
$(MUTANTS): $(STAMP)
	$(PIP_INSTALL) -e '.[mutants]'
	@touch $@

# N mutants, drawn with SEED; MUTANTS_ARGS="--only kalman/filters --patience 5" for some files, on a busy machine.
N ?= 300
SEED ?= 1
mutants: $(MUTANTS) ## Change the code in N places, one at a time, and see whether the tests notice (an hour or two)
	$(BIN)/python -m tests.mutants --number $(N) --seed $(SEED) $(MUTANTS_ARGS)

BENCH := $(VENV)/.bench-ready
$(BENCH): $(STAMP)
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@

# WORKS="dense_20k_x5 dense_200k_x5" measures these alone and keeps the results of the others.
bench: $(BENCH) ## Measure against Spark's limit and state by the key (half an hour; keep the machine quiet)
	$(BIN)/python -m benchmarks.run $(if $(WORKS),--only $(WORKS))
	$(BIN)/python -m benchmarks.picture

bench-quick: $(BENCH) ## The same in four minutes, for a look
	$(BIN)/python -m benchmarks.run --quick
	$(BIN)/python -m benchmarks.suites.landing --quick --runs 1 --output /tmp/landing-quick.json
	$(BIN)/python -m benchmarks.suites.journeys --scale 0.01 --runs 1 --alone --only journey series floor \
		--output /tmp/journeys-quick.json

bench-filters: $(BENCH) ## Measure the filters alone beside filterpy and simdkalman (two minutes, one thread)
	$(BIN)/python -m benchmarks.suites.filters

# WORKS="journey floor" measures these groups alone and keeps the results of the others; SCALE=0.01 is a small trial.
bench-journeys: $(BENCH) ## Measure whole cold commands, as a person waits for them (an hour; keep the machine quiet)
	$(BIN)/python -m benchmarks.suites.journeys $(if $(WORKS),--only $(WORKS)) \
		$(if $(SCALE),--scale $(SCALE) --output /tmp/journeys-small.json)

docs: setup ## Build the guide as a site in ./site, and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: setup ## Check style, format, layers and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

format: setup ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

POSTGRES := $(VENV)/.postgres-ready
$(POSTGRES): $(STAMP)
	$(PIP_INSTALL) -e '.[postgres]'
	@touch $@

# DATABASE=postgres keeps Airflow's database in a PostgreSQL of its own, for more than a few models.
airflow: setup $(if $(filter postgres,$(DATABASE)),$(POSTGRES)) ## Start Airflow with our DAGs; prints the address and the login
	PATH="$(CURDIR)/$(BIN):$$PATH" $(if $(DATABASE),KALMAN_AIRFLOW_DATABASE=$(DATABASE)) scripts/airflow-standalone

lock: setup ## Write the versions of all that can be installed to requirements/lock.txt
	$(PIP_INSTALL) -e '.[audit,bench,demo,dev,kubernetes,mutants,postgres,sbom]'
	@{ sed -n '/^#/p' $(LOCK); $(BIN)/python -m pip freeze --all --exclude pip --exclude-editable --exclude kalman-pipeline \
		| tr 'A-Z_' 'a-z-' | LC_ALL=C sort; } > $(LOCK).new
	@mv $(LOCK).new $(LOCK)
	$(BIN)/python scripts/hash-lock

SBOM := $(VENV)/.sbom-ready
$(SBOM): $(STAMP)
	$(PIP_INSTALL) -e '.[sbom]'
	@touch $@

sbom: $(SBOM) ## Write what an installation consists of to build/sbom.json (CycloneDX)
	PYTHONPATH=. $(BIN)/python scripts/sbom build/sbom.json

# pip-audit asks the network for every package of the lock.
audit: $(STAMP) ## Look up known weaknesses of the versions in requirements/lock.txt (needs a network)
	$(PIP_INSTALL) -e '.[audit]'
	$(BIN)/pip-audit --no-deps --disable-pip -r $(LOCK)

clean: ## Remove .venv, caches and what runs left in ./var
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis var
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
