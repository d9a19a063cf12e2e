"""What makes a run fast, and lets it resume. No reader of a paper needs it."""

import os
import warnings
from importlib.metadata import version

# Libraries read these when they are loaded, so they are set before.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in the trainer's process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# its sampler can never run here, as every request has a seed, but a missing nvcc would stop the start
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")  # see vllm_options
# cuDNN's attention compiles anew for every shape, about a second each time (an H100 without vLLM prefers it)
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
# Micro-batches differ in shape. Pinned memory above 1 MiB is not rounded up to powers of two (--offload), nor
# kept for reuse: torch 2.13 may give a kept block to a larger request. An older torch refuses unknown keys.
PINNED = ",pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF",
                      "expandable_segments:True" + PINNED * version("torch").startswith("2.13."))
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
