# Each target sets up what it needs in $(VENV) and is quick once that is done.
#
#   make demo                      analyze the example and print the report
#   make test                      run the tests; ARGS="-k cli" is passed on to pytest
#   make test WITH=integration     … with the optional libraries whose objects fastcap names
#   make bench                     run the benchmarks
#   make lint                      ruff and mypy
#   make sanitize                  run the tests on a build with AddressSanitizer and UBSan
#   make clean                     remove everything that was built

PYTHON ?= python3
VENV ?= .venv
WITH ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# What an installation depends on: after a change of any of these it is done again.
SOURCES := pyproject.toml setup.py $(wildcard src_cython/*.p[xy][dx])

comma := ,
EXTRAS := test,lint$(if $(WITH),$(comma)$(WITH))
RUNTIME := $(VENV)/.runtime
DEVELOPMENT := $(VENV)/.development-$(subst $(comma),-,$(EXTRAS))

.PHONY: demo test bench lint sanitize clean
.DELETE_ON_ERROR:

demo: $(RUNTIME)
	@$(BIN)/fastcap analyze examples/oversized_tune.py:train_func

test: $(DEVELOPMENT)
	$(BIN)/python -m pytest $(ARGS)

bench: EXTRAS := test,bench$(if $(WITH),$(comma)$(WITH))
bench: $(BIN)/python
	$(PIP) --editable ".[$(EXTRAS)]"
	$(BIN)/python -m pytest bench $(ARGS)

lint: $(DEVELOPMENT)
	$(BIN)/ruff check .
	$(BIN)/mypy

# A copy of the package with checked modules, which the tests then import in place of the installed one. Python itself
# is not instrumented: the libraries of the sanitizers have to be loaded before it, and what it leaks is not ours. A
# sanitizer ends the process on its first finding and writes to the file descriptor, which pytest must not capture.
sanitize: $(DEVELOPMENT)
	FASTCAP_BUILD=sanitize $(PIP) --no-deps --target build/sanitized --upgrade .
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
		PYTHONPATH=build/sanitized $(BIN)/pytest --capture=sys -o pythonpath=tests $(ARGS)

clean:
	rm -rf build dist *.egg-info fastcap/_native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	rm -f $(VENV)/.runtime $(VENV)/.development-*
	find fastcap tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): $(BIN)/python $(SOURCES)
	$(PIP) --editable .
	@touch $@

$(DEVELOPMENT): $(BIN)/python $(SOURCES)
	$(PIP) --editable ".[$(EXTRAS)]"
	@touch $@ $(RUNTIME)
