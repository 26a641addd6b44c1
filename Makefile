# Two commands to know: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Without --no-compile, pip compiles thousands of files of which few are imported; Python compiles those it imports.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# Bytecode is kept: many processes import the same files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test lint style types types-windows docs format report dist clean

quickstart: .venv/installed
	$(BIN)/iterand reproduce digits

# Three processes fill two cores: many tests wait for processes of their own.
test: .venv/installed-dev
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

report: .venv/installed
	$(BIN)/iterand report results

lint: style types types-windows

style: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-dev
	$(BIN)/mypy

types-windows: .venv/installed-dev
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32

docs: .venv/installed-dev
	$(BIN)/python tools/reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tools/reference.py

dist: .venv/installed-dev
	$(BIN)/python -m build --no-isolation

# The pip that comes with Python 3.11 needs twice as long to choose the versions.
.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "iterand needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(INSTALL) --upgrade pip

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) -c constraints.txt -e '.[lab]'
	@touch $@

# timm without its dependencies: torchvision's wheels fit only one build of torch, and the tests need nothing of it.
.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) -c constraints.txt -e '.[dev]'
	$(INSTALL) --no-deps 'timm>=1.0.12'
	@touch $@

clean:
	rm -rf .venv runs build dist
