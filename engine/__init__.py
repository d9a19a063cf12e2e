"""What makes a run fast, and lets it resume. Nobody needs it to understand a paper.

This file holds only what must be set before torch, transformers and vLLM are imported."""

import logging
import os
import warnings
from importlib.metadata import version

# Libraries read these when they are loaded, so they are set before.
VARIABLES = dict(
    TOKENIZERS_PARALLELISM="false",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine lives in the trainer's process
    VLLM_NO_USAGE_STATS="1",  # else it reports model and hardware to its authors
    VLLM_CONFIGURE_LOGGING="0",  # its warnings go to the rank's log, see below
    # FlashInfer's sampler is never used, since it takes no seed per request, but vLLM would compile it at
    # its start and fail without nvcc
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_ALLREDUCE_USE_FLASHINFER="0",  # see vllm_options
    # In a CUDA graph NCCL takes a buffer for one allocation, which expandable segments are not: a hang, or an
    # illegal access, where vLLM's engines of several GPUs have no symmetric memory (A100, virtual machines)
    NCCL_GRAPH_REGISTER="0",
    # cuDNN's attention compiles anew for every shape, about a second each (an H100 without vLLM prefers it)
    TORCH_CUDNN_SDPA_DEPRIORITIZED="1",
    # micro-batches differ in shape
    PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
if version("torch").startswith("2.13."):  # an older torch refuses unknown keys
    # Pinned memory above 1 MiB is not rounded up to powers of two (--offload), nor kept for reuse: torch 2.13
    # may give a kept block to a larger request.
    VARIABLES["PYTORCH_CUDA_ALLOC_CONF"] += ",pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"
for name in VARIABLES.keys() - os.environ.keys():
    os.environ[name] = VARIABLES[name]
warnings.filterwarnings("ignore", category=FutureWarning)
# what goes to the terminal: of vLLM errors alone
logging.lastResort.addFilter(lambda record: record.name[:4] != "vllm" or record.levelno >= logging.ERROR)
# At every sync vLLM warns that a tied head and rotary embeddings got no weights; samplers.py looks itself
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
