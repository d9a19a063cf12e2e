"""--plan from the command line, and: every GPU command of the pages fits into 90% of the GPUs it names."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import test_docs
from conftest import ROOT
from test_docs import PAGES, commands_of, understand

import common
from engine.plan import plan_from_args
from tools.simulate_memory import config_of

MODELS = {  # Hub id: a shape of tools/simulate_memory.py, or the same numbers, from its config.json
    "Qwen/Qwen2.5-Math-1.5B": "qwen2.5-math-1.5b", "Qwen/Qwen2.5-Math-7B": "qwen2.5-math-7b",
    "Qwen/Qwen2.5-3B": "qwen2.5-3b", "Qwen/Qwen2.5-7B": "qwen2.5-math-7b", "Qwen/Qwen2.5-32B": "qwen2.5-32b",
    "Skywork/Skywork-OR1-Math-7B": "qwen2.5-math-7b",
    "Qwen/Qwen3-1.7B-Base": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-4B": "qwen3-4b", "Qwen/Qwen3-4B-Base": "qwen3-4b",
    "Qwen/Qwen3-8B": "qwen3-8b", "Qwen/Qwen3-8B-Base": "qwen3-8b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama-3.2-1b",
    "meta-llama/Llama-3.2-3B-Instruct": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "sail/Llama-3.2-3B-Oat-Zero": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b", "OctoThinker/OctoThinker-8B-Hybrid-Base": "llama-3.1-8b",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "llama-3.1-8b",
    "deepseek-ai/deepseek-math-7b-instruct": ("llama", 4096, 11008, 30, 32, 32, 128, 102400, False),
    "mistralai/Mistral-Nemo-Instruct-2407": ("mistral", 5120, 14336, 40, 32, 8, 128, 131072, False),
    "mistralai/Ministral-8B-Instruct-2410": ("mistral", 4096, 12288, 36, 32, 8, 128, 131072, False)}
