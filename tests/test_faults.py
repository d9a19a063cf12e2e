"""Faulty models and run folders, through a script's real start: one sentence each."""

import json
import shutil
import sys
from unittest import mock

import pytest
import torch
from conftest import ROOT, SMALL, read_lines, run_toy
from safetensors.torch import load_file, save_file

import ttrl

TINY = SMALL | dict(votes=2, train_samples=2, prompts_per_batch=2, max_new_tokens=8, num_minibatches=1)
TINY_TOY = TINY | dict(dataset="toy", sampler="hf", max_prompt_tokens=128)  # with --model
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
WEIGHTS = "model.safetensors"


# ---------------------------------------------------- models -----------------------------------------------
def copy_of_the_toy(folder, file, change):
    """The toy with one file changed: fields of JSON, all its bytes, a function of its tensors."""
    folder.mkdir()
    for name in (CONFIG, GENERATION, TOKENIZER, WEIGHTS, "tokenizer.json"):
        shutil.copy(ROOT / "toy" / name, folder)
    path = folder / file
    if isinstance(change, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    elif isinstance(change, bytes):
        path.write_bytes(change)
    else:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def lacks_one(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def one_nan(tensors):
    tensors["model.norm.weight"][0] = torch.nan


BAD_MODELS = {
    "truncated": (WEIGHTS, (ROOT / "toy" / WEIGHTS).read_bytes()[:-99], "its weights cannot be read: "),
    "a tensor is missing": (WEIGHTS, lacks_one, "1 of its weights are missing or of another shape,"),
    "another shape": (CONFIG, dict(intermediate_size=200), "9 of its weights are missing or of another"),
    "NaN": (WEIGHTS, one_nan, "gives tokens the probability NaN"),
    "small context": (CONFIG, dict(max_position_embeddings=100), "must fit the model's context of 100 token"),
    "encoder-decoder": (CONFIG, dict(model_type="t5"), "its weights cannot be read: "),
    "quantised": (CONFIG, dict(quantization_config=dict(quant_method="gptq", bits=4)), "which is quantised;"),
    "eos is unknown": (GENERATION, dict(eos_token_id=[2, 620]), "whose eos_token_id (generation_config.j"),
    "tokenizer is garbage": ("tokenizer.json", b"{", "but its tokenizer or generation_config.json canno"),
    "no template": (TOKENIZER, dict(chat_template=""), "has no chat template; give --prompt plain."),
}


@pytest.mark.parametrize("fault", BAD_MODELS)
def test_a_bad_model_is_one_sentence(tmp_path, launch, fault):
    file, change, words = BAD_MODELS[fault]
    model = copy_of_the_toy(tmp_path / "model", file, change)
    code, _, errors = launch(model=model, out=tmp_path / "run", **TINY_TOY)
    assert code == 2 and "Traceback" not in errors
    assert words in errors[errors.index("Error: "):]


# ---------------------------------------------------- folders ----------------------------------------------
@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was killed in its third step, with one checkpoint, of its second."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with mock.patch.object(sys, "argv", ["ttrl.py"]):
        run_toy(ttrl, out, **TINY | dict(steps=2, checkpoint_every=2))
    shutil.rmtree(out / "final")
    return out


CHECKPOINT = "checkpoints/step_00000002"
LINES = b'5\n[1]\nnull\n{"step":null}\n{"step":1,"reward":1.0}\n{"st'
MANY = b'{"script": "ttrl", "args": {"votes": "many"}, "identity": {"data": "1"}}'
FOLDERS = {  # fault -> (file, its bytes, exit code, words)
    "a file too many": (f"{CHECKPOINT}/x.safetensors", b"", 2, "is damaged ("),
    "metrics: half a line": ("metrics.jsonl", LINES, 0, "Final model"),
    "run.json is damaged": ("run.json", b'{"script": "tt', 2, "cannot be read, it is damaged"),
    "votes are no number": ("run.json", MANY, 2, "run.json is damaged: --votes is 'many', but"),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_a_damaged_folder_resumes_or_says_why_not(tmp_path, launch, stopped, fault):
    name, content, expected, words = FOLDERS[fault]
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    (out / name).write_bytes(content)
    code, printed, errors = launch(resume=True, out=out, steps=3)
    assert code == expected and "Traceback" not in errors and words in printed + errors
    if code == 0:
        assert read_lines(out / "metrics.jsonl")[-1]["step"] == 3


def test_somebodys_own_file_is_not_written_over(tmp_path, launch):
    (tmp_path / "metrics.jsonl").write_text("mine")
    code, _, errors = launch(out=tmp_path, **TINY)
    assert code == 2 and "which is not empty; give another folder, or --resume if it holds a run." in errors
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("metrics.jsonl", "mine")]


def test_a_strangers_folder_runs_no_code(tmp_path, launch, stopped):
    """Neither the flag nor the code of a stranger's run.json acts, unless trust is given again."""
    out, executed = tmp_path / "run", tmp_path / "executed"
    model = copy_of_the_toy(tmp_path / "model", CONFIG, dict(
        model_type="other", auto_map={"AutoConfig": "other.Config", "AutoModelForCausalLM": "other.Model"}))
    (model / "other.py").write_text(f"open({str(executed)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    shutil.copytree(stopped, out)
    run = json.loads((out / "run.json").read_text())
    run["args"] |= dict(model=str(model), trust_remote_code=True)
    (out / "run.json").write_text(json.dumps(run))
    code, _, errors = launch(resume=True, out=out)
    assert code == 2 and "contains custom code" in errors and not executed.exists()
    launch(resume=True, out=out, trust_remote_code=True)
    assert executed.exists()  # it would have


def test_an_evaluation_without_answers_says_why(tmp_path, launch):
    code, printed, _ = launch("evaluate", benchmarks="toy_test", samples=1, max_new_tokens=2,
                              out=tmp_path / "run")
    assert code == 0 and "Warning: toy_test: 0% of the responses have an answer (in " in printed
    assert "100% were cut off. --show_prompt shows what the model is asked" in printed
