"""Faulty models, chat templates and run folders, through a script's real start: one sentence each."""

import json
import math
import shutil
import sys
import time
from unittest import mock

import pytest
import torch
from conftest import ROOT, SMALL, run_toy
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import ttrl
from engine import checkpoint, data, options

TINY = SMALL | dict(votes=2, train_samples=2, prompts_per_batch=2, max_new_tokens=8, num_minibatches=1)
TINY_TOY = TINY | dict(dataset="toy", sampler="hf", max_prompt_tokens=128)  # with --model


# ---------------------------------------------------- models -----------------------------------------------
def copy_of_the_toy(folder, file, change):
    """The toy with one file changed: fields of JSON, all its bytes, None (removed), a function of tensors."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                 "tokenizer_config.json"):
        shutil.copy(ROOT / "toy" / name, folder)
    path = folder / file
    if isinstance(change, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    elif isinstance(change, bytes):
        path.write_bytes(change)
    elif change is None:
        path.unlink()
    else:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def lacks_one(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def another_shape(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)


def another_head(tensors):
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])


def renamed(tensors):
    for name in list(tensors):
        tensors["x." + name] = tensors.pop(name)


def one_nan(tensors):
    tensors["model.norm.weight"][0] = torch.nan


def cast_to(dtype):
    """Cast one weight, and say nothing of it in the config."""
    def change(tensors):
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(dtype)

    return change


CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
BAD_MODELS = {
    # weights
    "no weights": (WEIGHTS, None, "its weights cannot be read: OSError Error no file named model"),
    "empty weights": (WEIGHTS, b"", "but model.safetensors cannot be read: Error while deserializing header"),
    "broken header": (WEIGHTS, b"\xff" * 99, "but model.safetensors cannot be read: Error while"),
    "truncated": (WEIGHTS, (ROOT / "toy" / WEIGHTS).read_bytes()[:-99], "model.safetensors cannot be read: "),
    "fp8": (WEIGHTS, cast_to(torch.float8_e4m3fn), "which is quantised (F8_E4M3); give a causal language "),
    "int8": (WEIGHTS, cast_to(torch.int8), "which is quantised (I8); give a causal language model in "),
    "int32": (WEIGHTS, cast_to(torch.int32), "which is quantised (I32); give a causal language model in "),
    "tied, yet another": (WEIGHTS, another_head, "whose config ties the output layer to the embeddings, but"),
    "a tensor is missing": (WEIGHTS, lacks_one, "1 are missing or of another shape, among them model.layers"),
    "another shape": (WEIGHTS, another_shape, "1 are missing or of another shape, among them model.layers.1"),
    "renamed": (WEIGHTS, renamed, "39 are missing or of another shape, among them"),
    "NaN": (WEIGHTS, one_nan, "but model.norm.weight holds NaN or infinite values."),
    # config
    "no config": (CONFIG, None, "must be a Hub id or a folder with a model and its tokenizer: Unrecognized"),
    "config is a list": (CONFIG, b"[1]", "must be a Hub id or a folder with a model and its tokenizer: "),
    "small vocabulary": (CONFIG, dict(vocab_size=300), "has 620 tokens, but the model's vocabulary 300."),
    "no heads": (CONFIG, dict(num_attention_heads=0), "with a model and its tokenizer: integer division"),
    "negative heads": (CONFIG, dict(num_attention_heads=-1), "weights cannot be read: RuntimeError Trying"),
    "small context": (CONFIG, dict(max_position_embeddings=100), "must fit the model's context of 100 token"),
    "no context": (CONFIG, dict(max_position_embeddings=0), "must fit the model's context of 0 tokens."),
    "another architecture": (CONFIG, dict(model_type="gpt2"), "are missing or of another shape, among them"),
    "unknown activation": (CONFIG, dict(hidden_act="x"), "its weights cannot be read: KeyError 'x'"),
    "unknown rope": (CONFIG, dict(rope_parameters=dict(rope_type="x")), "cannot be read: KeyError 'x'"),
    "encoder-decoder": (CONFIG, dict(model_type="t5"), "which is an encoder-decoder model; give a causal"),
    "quantised": (CONFIG, dict(quantization_config=dict(quant_method="gptq", bits=4)), "which is quantised;"),
    # end of sequence
    "eos is text": (GENERATION, dict(eos_token_id="two"), "of {model} is 'two', but must be the id of one o"),
    "eos is a fraction": (GENERATION, dict(eos_token_id=2.5), "of {model} is 2.5, but must be the id of one"),
    "eos is a truth": (GENERATION, dict(eos_token_id=True), "of {model} is True, but must be the id of one"),
    "eos is nested": (GENERATION, dict(eos_token_id=[[1]]), "of {model} is [1], but must be the id of one o"),
    "eos is unknown": (GENERATION, dict(eos_token_id=[2, 620]), "is 620, but must be the id of one of the m"),
    "eos is negative": (GENERATION, dict(eos_token_id=-1), "is -1, but must be the id of one of the model's"),
    "list": (GENERATION, b"[]", "generation_config.json of {model} cannot be read: "),
    "binary": (GENERATION, b"\xff\xff", "generation_config.json of {model} cannot be read: It looks like"),
    "half": (GENERATION, b'{"eos_token_id": [1, 2', "generation_config.json of {model} cannot be read: "),
    # tokenizer
    "tokenizer is garbage": ("tokenizer.json", b"{", "must be a Hub id or a folder with a model and its tok"),
    "eos token is a number": ("tokenizer_config.json", dict(eos_token=5), "with a model and its tokenizer:"),
}


@pytest.mark.parametrize("fault", BAD_MODELS)
def test_bad_models_are_one_sentence(tmp_path, launch, fault):
    file, change, words = BAD_MODELS[fault]
    model, out = copy_of_the_toy(tmp_path / "model", file, change), tmp_path / "run"
    code, _, errors = launch(model=model, out=out, **TINY_TOY)
    sentence = errors[errors.index("Error: "):]
    assert code == 2 and "Traceback" not in errors and sentence.count("\n") == 1
    assert words.replace("{model}", str(model)) in sentence and (str(model) in sentence or "context" in fault)
    if "safetensors cannot be read" in words or "quantised" in words:  # whatever would read the weights
        assert not out.exists()
    if "(traceback: " in sentence:
        assert "Traceback" in next(out.glob("traceback-*.txt")).read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evaluate_refuses_what_training_refuses(tmp_path, launch, dtype):
    """Its samplers read the file themselves. NaN shows in the tokens' probabilities, whatever samples."""
    flags = dict(benchmarks="toy_test", samples=1, max_new_tokens=8, max_prompt_tokens=128)
    flags |= dict(sampler="hf", dtype=dtype)
    for change, words in ((lacks_one, "among them model.layers.1.mlp.up_proj.weight; they would be random."),
                          (one_nan, "but model.norm.weight holds NaN or infinite values.")):
        model = copy_of_the_toy(tmp_path / change.__name__, WEIGHTS, change)
        code, _, errors = launch("evaluate", model=model, out=tmp_path / f"run-{change.__name__}", **flags)
        assert code == 2 and words in errors and "Traceback" not in errors


def test_integers_in_an_old_kind_of_file(tmp_path, launch):
    model = copy_of_the_toy(tmp_path / "model", CONFIG, {})
    tensors = load_file(model / WEIGHTS)
    cast_to(torch.int16)(tensors)
    torch.save(tensors, model / "pytorch_model.bin")
    (model / WEIGHTS).unlink()
    code, _, errors = launch(model=model, out=tmp_path / "run", **TINY_TOY)
    assert code == 2 and "which is quantised (int16); give a causal language model in float32" in errors


def test_a_model_that_computes_nan_is_not_called_another_architecture(tmp_path, launch):
    model = copy_of_the_toy(tmp_path / "model", CONFIG, dict(rms_norm_eps=math.nan))
    code, _, errors = launch(model=model, out=tmp_path / "run", **TINY_TOY)
    assert code == 2 and f"--model is '{model}', but tokens have the probability NaN: it or the" in errors


def test_no_end_of_sequence(tmp_path, launch):
    model = copy_of_the_toy(tmp_path / "model", "tokenizer_config.json", dict(eos_token=None))
    (model / GENERATION).unlink()
    code, _, errors = launch(model=model, out=tmp_path / "run", **TINY_TOY)
    assert code == 2 and f"the tokenizer of {model} has no end-of-sequence token" in errors


def test_weights_without_a_place_are_said(tmp_path, launch):
    """A Llama has no biases: those of the Qwen2 file would be dropped in silence."""
    model = copy_of_the_toy(tmp_path / "model", CONFIG, dict(model_type="llama"))
    code, printed, _ = launch(model=model, out=tmp_path / "run", **TINY_TOY)
    assert code == 0
    assert "holds 9 weights that have no place in a model of its config, among them model.layer" in printed


def test_a_generation_config_that_cannot_be_written_does_not_cost_the_final_model(tmp_path):
    model = copy_of_the_toy(tmp_path / "model", GENERATION, dict(temperature=0.7, do_sample=False, top_p=-1))
    run_toy(ttrl, tmp_path / "run", model=str(model), **TINY)
    assert json.loads((tmp_path / "run/final" / GENERATION).read_text())["eos_token_id"] == 2
    assert (tmp_path / "run/final" / WEIGHTS).exists()


# --------------------------------------------------- templates ---------------------------------------------
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
BAD_TEMPLATES = {
    "syntax": ("{% for m in messages %}{{ m.content }", "fails (unexpected '}'); fix it or give --prompt"),
    "always raises": ("{{ raise_exception('never') }}", "fails (never); fix it or give --prompt plain."),
    "forbidden access": ("{{ ''.__class__.__mro__ }}", "fails (access to attribute '__class__' of 'str' obj"),
    "other file": ("{% include '/etc/passwd' %}", "fails (no loader for this environment specified)"),
    "endless range": ("{% for i in range(10**12) %}{% endfor %}", "fails (Range too big."),
    "unknown name": ("{{ nosuch.thing }}", "fails ('nosuch' is undefined); fix it"),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails (maximum recursion depth"),
    "empty output": ("{{ '' }}", "fails (it leaves out the [user] turn); fix it or give --prompt plain."),
    "same for all": ("Hello.", "fails (it leaves out the [user] turn); fix it or give --prompt plain."),
    "number": (5, "fails (Can't compile non template nodes); fix it"),
    "none": ("", "has no chat template; give --prompt plain."),
}


@pytest.mark.parametrize("fault", BAD_TEMPLATES)
def test_bad_chat_templates_are_one_sentence(tmp_path, launch, fault):
    template, words = BAD_TEMPLATES[fault]
    model = copy_of_the_toy(tmp_path / "model", "tokenizer_config.json", dict(chat_template=template))
    began = time.time()
    code, _, errors = launch(model=model, out=tmp_path / "run", **TINY_TOY)
    assert code == 2 and words in errors and "Traceback" not in errors and errors.count("\n") == 1
    assert not (tmp_path / "run").exists() and time.time() - began < 20


def test_a_template_without_a_system_role(tmp_path, launch):
    """Gemma's raises: the instruction moves into the user turn, and this is said."""
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + TURNS
    model = copy_of_the_toy(tmp_path / "model", "tokenizer_config.json", dict(chat_template=refuses))
    code, printed, _ = launch(model=model, out=tmp_path / "run", show_prompt=True, **TINY_TOY)
    assert code == 0
    assert f"the chat template of {model} has no system role: the instruction is put before" in printed
    assert f"user: {data.SYSTEM}\n\n" in printed


# ---------------------------------------------------- folders ----------------------------------------------
@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was killed in its third step, with one checkpoint, of its second."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with mock.patch.object(sys, "argv", ["ttrl.py"]):
        run_toy(ttrl, out, **TINY | dict(steps=2, checkpoint_every=2))
    shutil.rmtree(out / "final")
    return out


def state(**fields):
    """Change fields of the checkpoint's state.json."""
    def change(out):
        path = out / "checkpoints/step_00000002/state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def written(name, text):
    """Put this text in a file's place, or in a folder's."""
    def change(out):
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def a_folder(name):
    """Put a folder in a file's place."""
    def change(out):
        (out / name).unlink(missing_ok=True)
        (out / name).mkdir()

    return change


def tensors(change_tensors):
    """Change the checkpoint's tensors, with checksums that are right."""
    def change(out):
        folder = out / "checkpoints/step_00000002"
        (path,) = folder.glob("*.safetensors")
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        loaded = load_file(path)
        change_tensors(loaded)
        save_file(loaded, path, metadata=metadata)
        state(files={path.name: checkpoint.checksum(path)})(out)

    return change


def lacks_a_moment(tensors):
    del tensors["model.norm.weight.exp_avg"]


def extra_file(out):
    (out / "checkpoints/step_00000002/shard-00002-model-00001-of-00001.safetensors").write_text("x")


NOT_USABLE = "step_00000002 is not usable ({}"
LINES = '5\n[1]\nnull\n{"step":null}\n{"step":"1"}\n{"step":1,"reward":"x","eval/toy/pass@1":{}}\n{"st'
HUGE = '{"step":1,"seconds/step":' + "9" * 400 + "}"
FOLDERS = {  # fault -> (change, exit code, words)
    "state is a list": (written("checkpoints/step_00000002/state.json", "[]"), 2, NOT_USABLE.format("Attri")),
    "state is empty": (written("checkpoints/step_00000002/state.json", ""), 2, NOT_USABLE.format("JSONDec")),
    "no step": (state(step=None), 2, NOT_USABLE.format("ValueError state.json tells of another step")),
    "step is text": (state(step="two"), 2, NOT_USABLE.format("ValueError state.json tells of another step")),
    "another step": (state(step=10**9), 2, NOT_USABLE.format("ValueError state.json tells of another step")),
    "files are a list": (state(files=[]), 2, NOT_USABLE.format("AttributeError")),
    "no files": (state(files={}), 2, NOT_USABLE.format("ValueError state.json tells of another step or oth")),
    "other folder's file": (state(files={"../../run.json": "x"}), 2, NOT_USABLE.format("ValueError state.j")),
    "a file too many": (extra_file, 2, NOT_USABLE.format("ValueError state.json tells of another step or o")),
    "a tensor is missing": (tensors(lacks_a_moment), 2, "another model or version (Missing key in checkpoin"),
    "another model's": (tensors(another_shape), 2, "does not fit --model: it is a checkpoint of another mod"),
    "NaN in it": (tensors(one_nan), 2, "but tokens have the probability NaN: it or the checkpoint holds"),
    "metrics: odd lines": (written("metrics.jsonl", LINES), 0, "Final model"),
    "metrics: no UTF-8": (written("metrics.jsonl", b"\xff\xfe\n"), 0, "Final model"),
    "metrics: huge number": (written("metrics.jsonl", HUGE), 0, "Final model"),
    "script.py: no UTF-8": (written("script.py", b"\xff\xff\n"), 0, "has changed since this run was started"),
    "metrics: empty": (written("metrics.jsonl", ""), 0, "Final model"),
    "metrics: deep": (written("metrics.jsonl", "[" * 10**5), 0, "Final model"),
    "samples: odd lines": (written("samples.jsonl", LINES), 0, "Final model"),
    "final is a file": (written("final", ""), 2, "final cannot be written (Not a directory"),
    "lock is a folder": (a_folder("lock"), 2, "which cannot be written: Is a directory."),
    "run.json: deep": (written("run.json", "[" * 10**5), 2, "run.json cannot be read, it is damaged"),
    "run.json is a folder": (a_folder("run.json"), 2, "run.json cannot be read, it is damaged"),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_damaged_folders_resume_or_say_why_not(tmp_path, launch, stopped, fault):
    change, expected, words = FOLDERS[fault]
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    change(out)
    code, printed, errors = launch(resume=True, out=out, steps=3)
    assert code == expected and "Traceback" not in errors
    assert words in printed + errors
    if code == 0:
        steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(set(steps)) and steps[-1] == 3 and (out / "final" / WEIGHTS).exists()
    else:
        assert errors.count("Error: ") == 1


@pytest.mark.parametrize("name", [
    "final", "metrics.jsonl", "samples.jsonl", "checkpoints", "script.py", "results.json", "curves.png",
    "generations.jsonl", "report.html", "final.partial", "run.json.partial", "initial_votes.jsonl",
    "tensorboard"])
def test_what_is_somebodys_own_is_not_written_over(tmp_path, launch, name):
    (tmp_path / name).write_text("mine")
    code, _, errors = launch(out=tmp_path, **TINY)
    assert code == 2 and f"Error: --out is '{tmp_path}', which holds a {name} that no run of ours w" in errors
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]


def test_a_final_model_that_cannot_be_written(tmp_path, launch, monkeypatch):
    def save(*given):
        raise SafetensorError("Error while serializing: File too large")

    monkeypatch.setattr("engine.policy.Policy.save", save)
    code, _, errors = launch(out=tmp_path / "run", **TINY | dict(steps=1, checkpoint_every=1))
    assert code == 2 and "final cannot be written (Error while serializing: File too large; " in errors
    assert "the trained weights are in " in errors and "step_00000001" in errors and "Traceback" not in errors


def test_an_evaluation_without_answers_says_so(tmp_path, launch):
    code, printed, _ = launch("evaluate", benchmarks="toy_test", samples=1, max_new_tokens=2, out=tmp_path)
    assert code == 0 and "Warning: toy_test: only 0% of the responses have an answer in \\boxed{}." in printed
    assert "(100% were cut off). One without an answer ends: " in printed


def test_without_checkpoints_the_trained_weights_are_not_lost(tmp_path, launch, monkeypatch):
    full = mock.Mock(side_effect=OSError(20, "Not a directory"))
    monkeypatch.setattr("engine.policy.Policy.save", full)
    code, _, errors = launch(out=tmp_path / "run", **TINY | dict(steps=1))
    assert code == 2 and "final cannot be written (Not a directory; " in errors
    assert "the trained weights are in " in errors and "step_00000001" in errors


def test_votes_that_no_memory_holds(tmp_path, launch):
    flags = dict(votes=65536, prompts_per_batch=128, max_new_tokens=384)
    code, _, errors = launch(out=tmp_path / "run", **flags)
    assert code == 2 and "the policy and a step's 8,388,608 responses take up to 208.0 GiB, more " in errors
    assert not (tmp_path / "run").exists()


def test_ranks_leave_together(monkeypatch):
    """A rank that unwinds while another still talks to it may abort."""
    called = mock.Mock()
    monkeypatch.setattr(options, "parse", called.parse)
    monkeypatch.setattr(options, "distributed", called.distributed)
    monkeypatch.setattr(options, "gather", called.gather)
    monkeypatch.setattr(options.dist, "destroy_process_group", called.destroy)
    monkeypatch.setattr(options, "leave", called.leave)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    options.launch(called.main, None, {})
    names = [name for name, _, _ in called.mock_calls]
    assert names == ["parse", "main", "distributed", "gather", "destroy", "leave"]
    called.leave.assert_called_once_with(0)


def test_a_folder_that_trusts_remote_code_runs_none(tmp_path, launch, stopped):
    """Neither the flag nor the code of a stranger's run.json acts, unless trust is given again."""
    out, executed = tmp_path / "run", tmp_path / "executed"
    model = copy_of_the_toy(tmp_path / "model", CONFIG, dict(
        model_type="other", auto_map={"AutoConfig": "other.Config", "AutoModelForCausalLM": "other.Model"}))
    (model / "other.py").write_text(f"open({str(executed)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    shutil.copytree(stopped, out)
    run = json.loads((out / "run.json").read_text())
    run["args"] |= dict(model=str(model), trust_remote_code=True)
    (out / "run.json").write_text(json.dumps(run))
    code, printed, errors = launch(resume=True, out=out)
    assert code == 2 and "contains custom code" in errors and not executed.exists()
    assert f"{out} was given --trust_remote_code, which is never taken from a folder" in printed
    launch(resume=True, out=out, trust_remote_code=True)
    assert executed.exists()  # it would have


def other_problems(out, model, data):
    data.write_text(data.read_text().replace("cakes", "pears"))


def another_gold_answer(out, model, data):
    data.write_text(data.read_text().replace('"answer": "3"', '"answer": "4"'))


def other_weights(out, model, data):
    tensors = load_file(model / WEIGHTS)
    save_file({name: tensor * 0.5 for name, tensor in tensors.items()}, model / WEIGHTS, {"format": "pt"})


def lacks(name):
    def change(out, model, data):
        record = json.loads((out / "run.json").read_text())
        del record["args"][name]
        (out / "run.json").write_text(json.dumps(record))

    return change


RESUMED = {  # fault -> (change, flags, exit code, words)
    "other problems": (other_problems, {}, 2, "the data of --dataset differs from what the run in"),
    "another gold answer": (another_gold_answer, {}, 2, "the data of --dataset differs from"),
    "other weights": (other_weights, {}, 2, "the weights of --model differs from what the run"),
    "seed": (None, dict(seed=2), 2, "--seed is 2, but the run in {out} has 1; start a new run."),
    "prompt": (None, dict(prompt="suffix"), 2, "the data of --dataset differs from what the run in"),
    "problems left out": (None, dict(max_prompt_tokens=40), 2, "the data of --dataset differs from"),
    "learning rate": (None, dict(lr=0.001), 0, "Resuming with another --lr: 0.001 (was 0.0005)"),
    "no kl_coef": (lacks("kl_coef"), {}, 0, "with another --kl_coef: 0.001 (was not in run.json)"),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """(run folder, model, data set): a stopped run of a model and a data set of the user's own."""
    folder = tmp_path_factory.mktemp("own")
    model = copy_of_the_toy(folder / "model", CONFIG, {})
    rows = [dict(problem=f"Ann has {i} cakes." + " Yes." * 9 * (i == 3), answer=str(i)) for i in range(4)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = TINY | dict(steps=2, checkpoint_every=2, model=str(model), dataset=str(folder / "data.jsonl"))
    with mock.patch.object(sys, "argv", ["ttrl.py"]):
        run_toy(ttrl, folder / "run", **flags)
    return folder


@pytest.mark.parametrize("fault", RESUMED)
def test_a_run_goes_on_only_as_what_it_was(tmp_path, launch, own, fault):
    """What differs is said before run.json is rewritten; model and data set lie at the paths they lay at."""
    change, flags, expected, words = RESUMED[fault]
    data, model, out = own / "data.jsonl", own / "model", tmp_path / "run"
    text, weights = data.read_text(), (model / WEIGHTS).read_bytes()
    shutil.copytree(own / "run", out)
    before = json.loads((out / "run.json").read_text())["args"]["seed"]
    if change:
        change(out, model, data)
    code, printed, errors = launch(resume=True, out=out, steps=3, **flags)
    data.write_text(text)
    (model / WEIGHTS).write_bytes(weights)
    assert code == expected and "Traceback" not in errors
    assert words.replace("{out}", str(out)) in (errors if code else printed)
    assert json.loads((out / "run.json").read_text())["args"]["seed"] == before
