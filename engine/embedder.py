"""Sentence embeddings for EVOL-RL: of a sentence-transformers model, or, without one, of hashed words."""

from __future__ import annotations

import zlib
from importlib import resources, util

import torch
from transformers.utils import cached_file

from engine.base import UserError, first_line


def count_words(texts: list[str], size: int = 1024) -> torch.Tensor:
    """[n, size] how often each word stands in a text. Its column is a hash, the same in every process."""
    counts = torch.zeros(len(texts), size)
    for row, text in zip(counts, texts):
        for word in text.split():
            row[zlib.crc32(word.encode(errors="replace")) % size] += 1
    return counts


class Embedder:
    """texts -> unit vectors: a list of n tensors [d] on the CPU. --embedder words: of `count_words`.

    Any other is a model, which is on the GPU only while it works: a Hub id, a folder, or package:NAME, the
    folder NAME/model/ of a pip package. A text longer than its limit loses its beginning. Raises UserError
    if there is no such model: a run never goes on without embeddings."""

    def __init__(self, name: str):
        self.name, self.path, self.model = name, name, None
        if name != "words" and not util.find_spec("sentence_transformers"):
            raise UserError(f"--embedder is {name!r}, which needs another package; pip install "
                            "sentence-transformers, or give --embedder words.")
        try:
            if name.startswith("package:"):
                self.path = str(resources.files(name.removeprefix("package:")) / "model")
            if name != "words":
                cached_file(self.path, "modules.json")  # without it, any language model would be pooled
        except Exception as error:
            raise UserError(f"--embedder is {name!r}, but must be words, or a Hub id, a folder or "
                            "package:NAME of a sentence-transformers model: "
                            f"{first_line(error)}") from None

    def __call__(self, texts: list[str]) -> list[torch.Tensor]:
        vectors = count_words(texts) if self.name == "words" else self._encode(texts)
        return list(torch.nn.functional.normalize(vectors.float().cpu(), dim=-1))

    def _encode(self, texts: list[str]) -> torch.Tensor:
        """[n, d]. The model is loaded at first use, after all flags have been checked."""
        cuda = torch.cuda.is_available()
        if self.model is None:
            from sentence_transformers import SentenceTransformer
            options = dict(dtype=torch.bfloat16 if cuda else torch.float32)
            self.model = SentenceTransformer(self.path, device="cpu", model_kwargs=options)
            self.model.tokenizer.truncation_side = "left"
        self.model.to("cuda" if cuda else "cpu")
        vectors = self.model.encode(texts, batch_size=8, convert_to_tensor=True, show_progress_bar=False)
        self.model.to("cpu")
        return vectors
