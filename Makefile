# `make demo` and `make test` set everything up first. PYTHON=... uses another environment as it is.
# `make test` uses all processors if pytest-xdist is there; ARGS=... are further options of pytest.

ifdef PYTHON
python := $(PYTHON)
else
python := .venv/bin/python
endif

.PHONY: setup demo test lint format docs clean

setup:
ifndef PYTHON
	@tools/setup
endif

demo: setup
	$(python) examples/demo.py

test: setup
	$(python) -m pytest $(shell $(python) -c 'import xdist; print("-n", "auto")' 2>/dev/null) $(ARGS)

lint: setup
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy

format: setup
	$(python) -m ruff check --fix
	$(python) -m ruff format

docs: setup
	$(python) tools/make_api_docs.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
