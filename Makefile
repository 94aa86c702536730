# `make demo` and `make test` work on a fresh clone with nothing but Python >= 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo duel test test-all test-lowest test-newest test-vllm test-environments release-check release-build release-use lint bench docs clean

demo: $(VENV)/.test
	$(BIN)/python recipes/smollm2/demo.py

# a test takes one core; those of a file share what they prepare
ON_TWO_CORES = --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow" $(ON_TWO_CORES)

test-all: $(VENV)/.test
	$(BIN)/python -m pytest

# the unit tests with the lowest versions of setup.cfg; TORCH=2.13.0 takes another torch, e.g. for its CPU build
TORCH ?= 2.7.0
test-lowest:
	test -x $(VENV)-lowest/bin/python || $(PYTHON) -m venv $(VENV)-lowest
	echo "torch==$(TORCH)" > $(VENV)-lowest/torch.txt
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(VENV)-lowest/bin/uv pip compile setup.cfg --extra test --resolution lowest-direct --no-deps --quiet \
		--override $(VENV)-lowest/torch.txt --output-file $(VENV)-lowest/lowest.txt
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check -r $(VENV)-lowest/lowest.txt
	$(VENV)-lowest/bin/python -m pytest -m "not slow" $(ON_TWO_CORES) tests/unit

# the same with the newest versions that setup.cfg allows, whatever constraints.txt says; NEWEST_TORCH is a CPU build
NEWEST_TORCH ?= 2.13.0
test-newest:
	test -x $(VENV)-newest/bin/python || $(PYTHON) -m venv $(VENV)-newest
	echo "torch==$(NEWEST_TORCH)" > $(VENV)-newest/torch.txt
	$(VENV)-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
		--constraint $(VENV)-newest/torch.txt --editable '.[test]'
	$(VENV)-newest/bin/python -m pytest -m "not slow" $(ON_TWO_CORES) tests/unit

# against the real engine and a real server, in an environment of their own (3.4 GB)
test-vllm: $(VENV)-vllm/.test
	$(VENV)-vllm/bin/python -m pytest -m "not slow" tests/with_vllm

$(VENV)-vllm/.test: setup.cfg constraints.txt tests/with_vllm/install.py
	test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python tests/with_vllm/install.py
	@touch $@

# environments of other packages, trained on, in an environment of their own (0.9 GB more than that of `make test`)
test-environments: $(VENV)-environments/.test
	$(VENV)-environments/bin/python -m pytest tests/with_environments

$(VENV)-environments/.test: setup.cfg constraints.txt
	test -x $(VENV)-environments/bin/python || $(PYTHON) -m venv $(VENV)-environments
	$(VENV)-environments/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[test,environments]'
	@touch $@

# the files of a release in dist/, checked, and used from an empty environment (1.5 GB); REPOSITORY=owner/name and
# REF=v0.1.0 complete the metadata
release-check: release-build release-use

release-build:
	test -x $(VENV)-release/bin/python || $(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --quiet --disable-pip-version-check build twine
	$(VENV)-release/bin/python .github/release/build.py $(if $(REPOSITORY),--repository $(REPOSITORY) --ref $(REF))
	$(VENV)-release/bin/python -m twine check --strict dist/*

# as a user does, in an empty environment; TORCH_INDEX_URL has torch's builds for the CPU
release-use:
	$(PYTHON) .github/release/check_wheel.py $(VENV)-empty

duel: $(VENV)/.test
	$(BIN)/python benchmarks/learning/duel.py

bench: $(VENV)/.test
	$(BIN)/python benchmarks/speed/step.py

docs: $(VENV)/.test
	$(BIN)/python docs/diagram.py
	$(BIN)/python docs/fields.py
	$(BIN)/python -m mkdocs build

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.test $(VENV)/.dev: $(VENV)/.%: setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "Python >= 3.11 is needed, $(PYTHON) is older: make PYTHON=python3.11 ..." && false)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest $(VENV)-vllm $(VENV)-environments $(VENV)-release $(VENV)-empty dist runs
