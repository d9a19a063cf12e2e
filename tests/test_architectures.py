"""Model types other than Llama's (architectures.json): their own log-probs, or one sentence."""

import functools
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, make_policy, random_rollouts, tiny_model
from equations import log_softmax_rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common import Rollout
from engine.base import Request, UserError
from engine.run_folder import read_metrics
from engine.logprobs import ChunkedHead, PackedHead, PlainHead
from engine.models import CHUNKED, PACKED, is_fast, read_config
from engine.options import Machine
from engine.samplers import HFSampler, load_sampler

CPU = torch.device("cpu")
TYPES = json.loads((ROOT / "tests/architectures.json").read_text())
SHAPE = TYPES.pop("every type")
FLAGS = ("--dataset toy --steps 2 --prompts_per_batch 4 --votes 4 --train_samples 4 --num_minibatches 2 "
         "--lr 1e-2 --max_prompt_tokens 128 --max_new_tokens 48 --eval= --checkpoint_every 0")


def make_model(kind, folder):
    """Save a model of this type with random weights and the toy's tokenizer; returns the folder."""
    torch.manual_seed(0)
    default = AutoConfig.for_model(kind)
    names = set(dir(default)) | set(default.attribute_map)
    for name in ("head_dim", "sliding_window"):
        names -= {name} if isinstance(getattr(type(default), name, None), property) else set()
    shape = {name: value for name, value in (SHAPE | TYPES[kind]).items() if name in names}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).float()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms begin as ones and biases as zeros, which hides what forgets them
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "toy").save_pretrained(folder)
    return folder


def from_eager(folder):
    """The largest difference of the trainer's log-probs from the model's own, eager and without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model.config.use_cache = False
    responses = random_rollouts(4, vocabulary=600)
    make_policy(folder).score_old(responses, 1.0)
    own = [log_softmax_rows(model, r, 1.0)[range(r.length), r.response_ids] for r in responses]
    return float((torch.cat(own) - torch.cat([r.old_logp for r in responses])).abs().max())


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(type): a tiny random model of this type."""
    return functools.cache(lambda kind: make_model(kind, tmp_path_factory.mktemp(kind)))


# ------------------------------------------- the trainer and the sampler ----------------------------------
@pytest.mark.parametrize("kind", [*PACKED, *CHUNKED, "gemma2", "granite"])
def test_a_types_log_probs_are_its_models_own(folder_of, kind):
    """The trainer's, in the fast way that models.py names or in the plain one. The hf sampler's, too, of
    prompts of uneven length, several responses to each, and limits at which rows are dropped."""
    folder = str(folder_of(kind))
    policy = make_policy(folder)
    window = policy.model.config.get_text_config().to_dict().get("sliding_window")
    fast = (PackedHead, "packed") if kind in PACKED and not window else (ChunkedHead, "sdpa")
    assert policy.implementation == (fast if is_fast(policy.model.config) else (PlainHead, "eager"))
    assert from_eager(folder) < 1e-4

    hf, vocabulary = HFSampler(folder, [2], CPU, torch.float32), list(range(30, 600, 7))
    prompts = [vocabulary[:12], [31, 33], vocabulary[20:27], [40] * 5]
    requests = [Request(prompt, 3, i, 4 + 5 * i) for i, prompt in enumerate(prompts)]
    groups = hf.generate(requests, 1.0)
    responses = [Rollout(r.prompt_ids, *sample) for r, group in zip(requests, groups) for sample in group]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for r in responses:
        own = log_softmax_rows(model, r, 1.0)[range(r.length), r.response_ids]
        assert (r.sampler_logp - own).abs().max() < 1e-3
    alone = [hf.generate([request], 1.0)[0] for request in requests]
    assert [r.response_ids for r in responses] == [r.response_ids for group in alone for r in group]


def test_a_config_that_scales_logits_is_computed_in_the_plain_way():
    """A type may have an entry that no test has set: what only the model's own code does with it."""
    for entry, fast in ((dict(logit_scale=1), True), (dict(final_logit_softcapping=30.0), False),
                        (dict(logits_scaling=8.0), False)):
        assert is_fast(AutoConfig.for_model("llama", **entry)) == fast


def test_experts_are_refused_with_vllm(folder_of):
    folder, vllm = str(folder_of("mixtral")), Machine(sampler="vllm")
    with pytest.raises(UserError, match="--model has experts .* give --sampler hf"):
        load_sampler(folder, CPU, torch.float32, vllm, 448, [2], 1, make_policy(folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind, sampler", [("gemma2", "vllm"), ("mixtral", "hf")])
def test_the_row_of_a_type(kind, sampler, folder_of, tmp_path):
    """Real runs with the real vLLM, in processes that it may change."""
    command = f"ttrl.py --model {folder_of(kind)} --out {tmp_path / 'run'} --sampler {sampler} {FLAGS}"
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert max(line["logp_diff_max"] for line in read_metrics(tmp_path / "run")) < 1e-3
    assert from_eager(tmp_path / "run/final") < 1e-4


# --------------------------------------------------- configs ----------------------------------------------
def test_longrope_beyond_its_first_length_is_refused(tmp_path):
    """A longer sequence turns all its positions otherwise, so sampler and trainer would differ."""
    rope = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    tiny_model("Phi3", tmp_path, max_position_embeddings=1024, original_max_position_embeddings=256,
               rope_parameters=rope)
    read_config(str(tmp_path), 256)
    with pytest.raises(UserError, match="must fit the model's context of 256 tokens"):
        read_config(str(tmp_path), 257)
