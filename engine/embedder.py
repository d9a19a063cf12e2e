"""Sentence embeddings for EVOL-RL, through sentence-transformers."""

from __future__ import annotations

import contextlib
from importlib import import_module
from pathlib import Path

import torch
from transformers.utils import cached_file

from engine.base import UserError


def embedder_path(name: str) -> str:
    """Hub id or folder of --embedder; package:NAME is the folder NAME/model/ of a pip package."""
    if not name.startswith("package:"):
        return name
    package = import_module(name.removeprefix("package:"))
    return str(Path(package.__file__).parent / "model")


@contextlib.contextmanager
def moved(model: torch.nn.Module, device: str):
    """The model on this device for a while. Then its weights are the mapped file again, which all ranks of a
    node share, instead of a copy in each rank's memory."""
    stored = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield model.to(device)
    finally:
        for parameter, data in stored:
            parameter.data = data
        model.to("cpu")  # buffers


class Embedder:
    """texts -> unit vectors: a list of n tensors [d] on the CPU.

    The model is loaded at first use and takes GPU memory only while it works. A text longer than its limit
    loses its beginning. Raises UserError if anything fails: a run never goes on without embeddings."""

    def __init__(self, name: str):
        self.name, self.model = name, None
        try:
            self.path = embedder_path(name)
            cached_file(self.path, "modules.json")  # without it, any language model would be pooled somehow
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"--embedder is {name!r}, but must be a Hub id, a folder or package:NAME of a "
                            f"sentence-transformers model: {reason}") from None

    def __call__(self, texts: list[str]) -> list[torch.Tensor]:
        if not texts:
            return []
        cuda = torch.cuda.is_available()
        try:
            if self.model is None:
                from sentence_transformers import SentenceTransformer
                options = dict(dtype=torch.bfloat16 if cuda else torch.float32)
                self.model = SentenceTransformer(self.path, device="cpu", model_kwargs=options)
                self.model.tokenizer.truncation_side = "left"
            with moved(self.model, "cuda" if cuda else "cpu") as model:
                vectors = model.encode(texts, batch_size=8, convert_to_tensor=True, show_progress_bar=False)
                vectors = vectors.float().cpu()
            if not vectors.isfinite().all():
                raise ValueError("embeddings are not finite")
        except torch.OutOfMemoryError:  # engine/options.py says what to do
            raise
        except Exception as error:
            raise UserError("the responses could not be embedded with --embedder "
                            f"{self.name!r}: {error}") from error
        return list(torch.nn.functional.normalize(vectors, dim=-1))
