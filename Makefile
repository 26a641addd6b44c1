# Two commands to know: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

# The tests start many processes, which would each compile the package again.
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

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "iterand needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lab]'
	@touch $@

# timm without its dependencies: torchvision's wheels fit only one build of torch, and the tests need nothing of it.
# Bytecode on all processors, where pip uses one; some packages hold files that are no Python of this release.
.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps 'timm>=1.0.12'
	$(BIN)/python -W ignore -m compileall -qq -j 0 .venv/lib || true
	@touch $@

clean:
	rm -rf .venv runs build dist
