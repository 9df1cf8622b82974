# Every target sets up what it needs first. PYTHON=... uses another environment as it is.
# `make test` uses all processors if pytest-xdist is there, each mostly for files of its own, which
# share what they compile; ARGS=... are further options of pytest.
# `make test-slow` runs the combinations of parameters that `make test` leaves out
# (tests/sampled_parameters.py).
# `make demo` shows three kernels on every target, `make demo-all` all examples.

ifdef PYTHON
python := $(PYTHON)
else
python := .venv/bin/python
endif

.PHONY: setup setup-demo demo demo-all test test-slow lint format docs clean

setup:
ifndef PYTHON
	@tools/setup dev
endif

setup-demo:
ifndef PYTHON
	@tools/setup demo
endif

demo: setup-demo
	@$(python) examples/demo.py $(ARGS)

demo-all: setup-demo
	@$(python) examples/demo.py --all $(ARGS)

test: setup
	$(python) -m pytest $(shell $(python) -c 'import xdist; print("-n auto --dist worksteal")' 2>/dev/null) $(ARGS)

test-slow: override ARGS += -m slow
test-slow: test

lint: setup
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy
	$(python) -c "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"

format: setup
	$(python) -m ruff check --fix
	$(python) -m ruff format

docs: setup
	$(python) tools/make_api_docs.py
	$(python) tools/make_function_docs.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
