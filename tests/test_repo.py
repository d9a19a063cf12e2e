"""The shape of the repository: siblings stay siblings, commands in the README parse, nothing speaks of a machine."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

METHODS = {"evol_rl": 170, "scrl": 170, "restrain": 200, "ettrl": 210, "dynamic_rl": 315}  # ceilings of changed lines against ttrl.py
RENT = ROOT / "examples/rent.py"
SECTIONS = ["# Without --model: the toy.", "class Args(common.Args):", "    def errors(self):", "# --- the method ---", "def group_advantages(",
            "# --- the loop ---", "def main(args: Args)", "    run = common.Run(args)", "    for _ in run.steps():", "        # Sample:",
            "        # Reward:", "        # Update:", "        run.score(", "                    logp, entropy = policy.logprobs(",
            "                    rho = (logp", "                    clipped = rho", "                    loss = -micro.tis",
            "                    kl = common.k3", "policy.backward(micro, loss", "updates.append(policy.step", "run.end_step(", "common.launch("]


def lines_of(name):
    return re.sub(r"# -+ (the \w+) -+", r"# --- \1 ---", (ROOT / f"{name}.py").read_text()).splitlines()


@pytest.mark.parametrize("name", METHODS)
def test_sibling_diff_stays_small(name):
    diff = subprocess.run(["diff", str(ROOT / "ttrl.py"), str(ROOT / f"{name}.py")], capture_output=True, text=True).stdout
    size = sum(line[:1] in "<>" for line in diff.splitlines())
    assert size <= METHODS[name], f"{name}.py changes {size} lines of ttrl.py; move plumbing to common.py or take ttrl.py's words"


@pytest.mark.parametrize("name", METHODS)
def test_the_diffs_for_readers_are_current(name):
    command = ["diff", "-u", "--label", "ttrl.py", "--label", f"{name}.py", str(ROOT / "ttrl.py"), str(ROOT / f"{name}.py")]
    diff = subprocess.run(command, capture_output=True, text=True).stdout
    assert (ROOT / f"diffs/{name}.diff").read_text() == diff, "run `make diffs`"


@pytest.mark.parametrize("name", ["ttrl", *METHODS])
def test_same_sections_in_the_same_order(name):
    lines, at = lines_of(name), 0
    for section in SECTIONS:
        at = next((i for i in range(at, len(lines)) if section in lines[i]), None)
        assert at is not None, f"{name}.py: '{section}' is missing or out of order"


@pytest.mark.parametrize("name", METHODS)
def test_shared_functions_are_word_for_word_the_same(name):
    def function(text, head):
        return re.search(rf"^def {head}\(.*?(?=\n\n\n)", text, re.DOTALL | re.MULTILINE)

    for head in ("group_advantages", "majority_reward"):
        here = function((ROOT / f"{name}.py").read_text(), head)
        assert here is None or here[0] == function((ROOT / "ttrl.py").read_text(), head)[0]


def test_common_and_ttrl_stay_small():
    assert len(lines_of("common")) <= 825 and len(lines_of("ttrl")) <= 200


def test_the_fork_of_the_guide_is_small_and_trains(tmp_path):
    """examples/rent.py is ttrl.py with another reward: at most 40 changed lines, and it trains, evaluates and saves."""
    diff = subprocess.run(["diff", str(ROOT / "ttrl.py"), str(RENT)], capture_output=True, text=True).stdout
    assert sum(line[:1] in "<>" for line in diff.splitlines()) <= 40
    flags = "--steps 2 --votes 8 --train_samples 8 --prompts_per_batch 4 --max_new_tokens 64 --eval_samples 2".split()
    done = subprocess.run([sys.executable, "-m", "examples.rent", *flags, "--out", str(tmp_path / "run")], cwd=ROOT, capture_output=True,
                          text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run/final/model.safetensors").exists()


@pytest.mark.parametrize("script", ["ttrl", *METHODS, "evaluate", "compare", "plot"])
def test_help_is_a_manual(script):
    done = subprocess.run([sys.executable, str(ROOT / f"{script}.py"), "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(done.stdout) > 500
    if script in ("ttrl", *METHODS):
        assert "torchrun --nproc-per-node 8" in done.stdout and "--kl-coef" in done.stdout.replace("_", "-")


def test_every_option_is_explained():
    import common
    source = (ROOT / "common.py").read_text().split("def errors")[0]
    fields = re.findall(r"^    (\w+): .* = .*\n((?:    \"\"\")?)", source, re.MULTILINE)
    plain = {"weight_decay", "grad_clip", "eval_every", "eval_samples", "eval_top_p"}  # say what they are by name
    assert len(fields) == len(common.Args.__dataclass_fields__)
    assert {name for name, docstring in fields if not docstring} <= plain


BAD = [  # (script, flags, words of the one sentence)
    ("ttrl", "--votes 0", "--votes is 0, but must be at least 1"), ("ttrl", "--temperature 0", "--temperature is 0"),
    ("ttrl", "--attention fancy", "--attention is 'fancy', but must be one of packed, sdpa"),
    ("ttrl", "--lr -1", "--lr is -1"), ("ttrl", "--clip_low 2", "--clip_low is 2"), ("ttrl", "--clip_high -1", "--clip_high is -1"),
    ("ttrl", "--warmup 1.5", "--warmup is 1.5"), ("ttrl", "--kl_coef inf", "--kl_coef is inf"), ("ttrl", "--eval_top_p 0", "--eval_top_p is 0"),
    ("ttrl", "--train_samples 33", "--train_samples is 33"), ("ttrl", "--max_new_tokens 0", "--max_new_tokens is 0"),
    ("ttrl", "--micro_tokens 0", "--micro_tokens is 0"), ("ttrl", "--resume", "--resume needs --out"),
    ("ttrl", "--dataset nothing", "unknown benchmark 'nothing'"), ("ttrl", "--dataset no.jsonl", "does not exist"),
    ("ttrl", "--question_field x", "--question_field is 'x'"), ("ttrl", "--model nowhere", "--model is 'nowhere'"),
    ("ttrl", "--eval math5", "unknown benchmark 'math5'"), ("ttrl", "--max_prompt_tokens 3", "--max_prompt_tokens 3"),
    ("ttrl", "--max_new_tokens 9000", "context of 512 tokens"), ("ttrl", "--hsdp 2", "--hsdp is 2"),
    ("ttrl", "--prompts_per_batch 200", "--prompts_per_batch is 200"), ("ttrl", "--out /proc/run", "cannot be written"),
    ("ttrl", "--easy_fraction 2", "--easy_fraction is 2"), ("ttrl", "--keep 0", "--keep is 0"), ("ttrl", "--max_bad_steps 0", "--max_bad_steps"),
    ("ttrl", "--steps -1", "--steps is -1"), ("ttrl", "--gpu_memory 0", "--gpu_memory is 0"), ("ttrl", "--updates_per_batch 0", "--updates_per"),
    ("evol_rl", "--alpha 1.5", "--alpha is 1.5"), ("evol_rl", "--embedder nowhere", "--embedder is 'nowhere'"),
    ("evol_rl", "--embedder toy", "--embedder is 'toy'"), ("scrl", "--tau_pos 2", "--tau_pos is 2"), ("scrl", "--tau_neg 0.5", "--tau_neg is 0.5"),
    ("scrl", "--lambda_h -1", "--lambda_h is -1"), ("restrain", "--kappa 99", "--kappa is 99"), ("restrain", "--delta -1", "--delta is -1"),
    ("restrain", "--sigma -0.1", "--sigma is -0.1"), ("ettrl", "--trunks 0", "--trunks is 0"), ("ettrl", "--forks -1", "--forks is -1"),
    ("ettrl", "--branches 0", "--branches is 0"), ("ettrl", "--train_samples 99", "--train_samples is 99"),
    ("dynamic_rl", "--tau 0", "--tau is 0"), ("dynamic_rl", "--prompts_per_batch 1", "--prompts_per_batch is 1"),
    ("dynamic_rl", "--votes 1", "--votes is 1"), ("dynamic_rl", "--lambda_dq -1", "--lambda_dq is -1"),
    ("dynamic_rl", "--labels gold", "--labels is 'gold'"), ("evaluate", "--benchmarks nothing", "unknown benchmark"),
    ("evaluate", "--samples 0", "--samples is 0"), ("evaluate", "--model tests/nowhere", "--model is 'tests/nowhere'"),
    ("ttrl", "--resume --out nowhere", "no folder 'nowhere'")]


def test_bad_input_ends_with_one_sentence_and_code_2(tmp_path):
    """All in forks of one process, because starting Python fifty times would take minutes."""
    code = f"""
import contextlib, importlib, io, json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import common
os.chdir({str(tmp_path)!r})
for script, flags in json.loads(sys.stdin.read()):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        common.Policy = None  # weights are never loaded
        sys.argv = [script + ".py", *flags.split()]
        module = importlib.import_module(script)
        common.launch(module.main, module.Args, module.TOY)
        os._exit(0)
    os.close(write)
    error = os.fdopen(read).read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), error]), flush=True)
"""
    import json
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps([case[:2] for case in BAD]), capture_output=True, text=True, timeout=600)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(BAD) >= 40, done.stderr[-1000:]
    for (script, flags, words), (status, error) in zip(BAD, results):
        assert status == 2 and "Traceback" not in error, (script, flags, error)
        sentence = error[error.index("Error: "):]
        assert words in sentence and sentence.strip().endswith((".", "…")) or "unknown" in words, (script, flags, sentence)


def test_nothing_speaks_of_a_machine():
    files = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True).stdout.split("\n")
    for name in files:
        if name.endswith((".py", ".md", ".toml", ".txt", "Makefile", "run")) and name != "tests/test_repo.py":
            text = (ROOT / name).read_text()
            assert not re.search(r"/work/|/farm/|\.library|/root/", text), name


def readme_commands():
    text = (ROOT / "README.md").read_text()
    tables = re.findall(r"^\|.*?`((?:torchrun|python) [^`]*)`", text, re.MULTILINE)
    return tables + [line.split("  #")[0].strip() for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)
            for line in block.replace("\\\n", " ").splitlines() if re.match(r"\s*(python|torchrun) ", line)]


def test_every_command_of_the_readme_parses():
    """Scripts exist and take the flags; what needs a GPU or the Hub is not started here."""
    import importlib

    import tyro
    commands = readme_commands()
    assert len(commands) >= 16
    for command in commands:
        words = [w for w in command.split() if w != "..."]
        script = next(i for i, w in enumerate(words) if w.endswith(".py"))
        assert (ROOT / words[script]).exists(), command
        if words[script] in ("plot.py", "compare.py") or "/" in words[script]:
            continue
        module = importlib.import_module(words[script].removesuffix(".py"))
        args = tyro.cli(module.Args, args=[w.strip("'\"") for w in words[script + 1:]])
        if hasattr(args, "errors") and "--sampler" not in command:
            assert args.errors() == [], command


def test_line_counts_in_the_readme_are_true():
    text = (ROOT / "README.md").read_text()
    for name in ["ttrl", *METHODS]:
        row = next(line for line in text.splitlines() if line.startswith(f"| [{name}.py]"))
        assert f"| {len(lines_of(name))} |" in row, row
