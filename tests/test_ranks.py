"""Real ranks under torchrun: 1 rank = 2 ranks for every script, resume across them, kills."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SCRIPTS, as_if_killed, fresh_state, launched_with, load_script, read_lines, run_toy
from conftest import untimed
from equations import relative_error
from safetensors.torch import load_file, save_file

import ttrl

FLAGS = ("--steps 1 --num_minibatches 4 --votes 8 --train_samples 8 --prompts_per_batch 4 "
         "--max_new_tokens 64 --eval_samples 2 --eval_every 0 --checkpoint_every 0 --lr 1e-3 --eval=").split()
CROSSING = ("--steps 4 --checkpoint_every 1 --keep_checkpoints 9 --votes 4 --train_samples 4 "
            "--prompts_per_batch 2 --num_minibatches 2 --max_new_tokens 64 --lr 1e-4 --eval=").split()
OWN = {  # scripts whose budget has other names
    "ettrl": "--trunks 2 --forks 2 --branches 2".split(),
    "dynamic_rl": "--votes 6 --train_samples 6".split()}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PIPES = dict(env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
# Runs scripts one after another, each in a fork of this process, which has imported everything. Under
# torchrun every rank does so, and each script's ranks find each other anew, on a port of their own. All
# samples go to a file, so that the tokens of two runs can be compared one by one; so does the exit code.
DRIVER = """
import importlib, json, os, sys
root, jobs = sys.argv[1:]
sys.path[:0] = [root, os.path.dirname(sys.argv[0])]
import torch
torch.set_num_threads(1)
import common
sample = common.sample

def recorded(run, step, prompts, n, *options, **stop):
    groups = sample(run, step, prompts, n, *options, **stop)
    everywhere = groups
    if "gather" in stop:  # RESTRAIN's initial votes
        everywhere = common.gather_shares(groups, run.args.machine.tensor_parallel)
    if run.log.rank == 0:
        with open(str(run.log.path) + ".tokens", "a") as file:
            for response in sum(everywhere, []):
                file.write(json.dumps(dict(step=step, tokens=response.response_ids)) + chr(10))
    return groups

common.sample = recorded
for job in json.loads(jobs):
    script = importlib.import_module(job["script"])
    child = os.fork()
    if child == 0:
        if "RANK" in os.environ:
            os.environ.update(MASTER_PORT=job["port"], TORCHELASTIC_USE_AGENT_STORE="False")
        sys.argv = [job["script"] + ".py", *job["flags"]]
        if "nodes" in job:  # every rank is a machine of its own
            os.environ["LOCAL_RANK"] = "0"
            os.dup2(os.open(job["out"] + ".errors" + os.environ["RANK"], os.O_CREAT | os.O_WRONLY), 2)
            node = job["nodes"][int(os.environ["RANK"])]
            os.chdir(node["folder"])
            sys.argv += node["flags"]
        common.launch(script.main, script.Args, **job["defaults"])
        sys.stdout.flush()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(job["out"] + ".code" + os.environ.get("RANK", "0"), "w") as file:
        file.write(str(code))
"""


def free_port() -> str:
    """Outside the range from which outgoing connections take theirs, or one of these could be faster."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return str(port)


def python(ranks: int) -> list[str]:
    """What stands before a script that runs on so many ranks, with torchrun if there are several."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", free_port()]
    return [sys.executable, *(launcher if ranks > 1 else [])]


def torchrun(ranks, *command):
    return subprocess.Popen([*python(ranks), *command], **PIPES)


def ended(process, timeout=300) -> SimpleNamespace:
    output, errors = process.communicate(timeout=timeout)
    return SimpleNamespace(code=process.returncode, output=output, errors=errors)


def metrics_of(folder):
    """The lines less times, and less the difference of sampler and trainer, which is rounding."""
    lines = untimed(read_lines(folder / "metrics.jsonl"))
    for line in lines:
        line.pop("logp_diff_max", None), line.pop("logp_diff_mean", None)
    return lines


# ----------------------------------------------- 1 rank = 2 ranks -----------------------------------------
def job(script, out, *flags) -> dict:
    defaults = launched_with(load_script(script))
    return dict(script=script, flags=[*flags, "--out", str(out)], out=str(out), port=free_port(),
                defaults=defaults)


def drive(ranks, folder, *jobs):
    """Start the driver on one rank (without torchrun) or on several."""
    (folder / "driver.py").write_text(DRIVER)
    return torchrun(ranks, str(folder / "driver.py"), str(ROOT), json.dumps(jobs))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Folder of the runs NAME-1 and NAME-2 of every script and of evaluate.py, on one and on two ranks, and
    of ttrl.py's runs whole, on one rank, and resumed, which goes on on two after its second step."""
    folder = tmp_path_factory.mktemp("pairs")
    four = folder / "four.jsonl"  # problems, so that each is seen again
    four.write_text("".join((ROOT / "toy/train.jsonl").open().readlines()[:4]))
    first = job("ttrl", folder / "whole", *CROSSING, "--dataset", str(four))
    crossing = {1: first, 2: job("ttrl", folder / "resumed", "--resume")}
    for ranks, micro_tokens in ((1, "3000"), (2, "500")):
        jobs = [crossing[ranks]]
        for script in SCRIPTS:
            flags = [*FLAGS, *OWN.get(script, []), "--seed", "1", "--micro_tokens", micro_tokens]
            if script == "restrain":  # whose initial votes are of all problems
                flags += ["--dataset", str(four)]
            jobs.append(job(script, folder / f"{script}-{ranks}", *flags))
        flags = [*FLAGS, *(["--gradient_checkpointing", "on"] if ranks == 2 else [])]
        jobs.append(job("ttrl", folder / f"recomputed-{ranks}", *flags, "--micro_tokens", micro_tokens))
        flags = ["--benchmarks", "toy", "--samples", "4", "--max_new_tokens", "64"]
        jobs.append(job("evaluate", folder / f"evaluate-{ranks}", *flags))
        done = ended(drive(ranks, folder, *jobs), timeout=580)
        (folder / f"errors-{ranks}").write_text(done.output + done.errors)
        if ranks == 1:
            as_if_killed(folder / "whole", folder / "resumed", 2)
    return folder


def runs_of(pairs, script):
    """The folders of both runs, after checking that every rank ended well."""
    for ranks in (1, 2):
        for rank in range(ranks):
            code = (pairs / f"{script}-{ranks}.code{rank}").read_text()
            assert code == "0", (pairs / f"errors-{ranks}").read_text()[-3000:]
    return pairs / f"{script}-1", pairs / f"{script}-2"


def turned_tokens(one, two) -> int:
    """Responses of two runs that are not the same, token for token."""
    lines = [read_lines(f"{out}.tokens") for out in (one, two)]
    return sum(a["tokens"] != b["tokens"] for a, b in zip(*lines, strict=True))


def assert_same_runs(one, two):
    """Losses to 1e-5, weights to 1e-4 of their norm; the share of clipped tokens jumps at a border."""
    for a, b in zip(metrics_of(one), metrics_of(two), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"clip_fraction"}:
            # kl: exp(d) multiplies the rounding of a token made unlikely. grad_norm: Adam divides a gradient
            # by its size, so the rounding of one near 0 becomes a whole step, which the next minibatch sees.
            rel = 5e-3 if name in ("kl", "grad_norm") else 1e-4
            assert a[name] == pytest.approx(b[name], abs=1e-5, rel=rel), (a["step"], name)
    first, second = fresh_state(one / "final"), fresh_state(two / "final")
    assert relative_error(first, second) < 1e-4


@pytest.mark.parametrize("script", [*SCRIPTS, "recomputed"])
def test_one_rank_equals_two(pairs, script):
    """Four optimizer steps, micro-batches cut differently, one rollout batch.

    The ranks' sums are rounded differently, which can turn a sampled token: once in 100,000 tokens. At most
    one response may differ, and only then may the updates."""
    one, two = runs_of(pairs, script)
    assert "returned a view tensor" not in (pairs / "errors-2").read_text()
    turned = turned_tokens(one, two)
    assert turned <= 1
    if turned == 0:
        assert_same_runs(one, two)


def test_resume_on_another_number_of_ranks(pairs, tmp_path):
    """1 rank -> 2 -> 1, against one uninterrupted run on one rank."""
    whole, run = pairs / "whole", tmp_path / "run"
    assert (pairs / "resumed/final").exists(), (pairs / "errors-2").read_text()[-3000:]
    assert ["flip_rate" in line for line in metrics_of(whole)] == [False, False, True, True]
    as_if_killed(pairs / "resumed", run, 3)
    args = json.loads((run / "run.json").read_text())["args"]
    run_toy(ttrl, **args | dict(resume=True, out=str(run)))
    for expected, record in zip(*(read_lines(out / "samples.jsonl") for out in (whole, run)), strict=True):
        pairs = zip(expected["responses"], record["responses"], strict=True)
        if turned := sum(a["text"] != b["text"] for a, b in pairs):
            assert turned == 1  # from here on the policies differ
            return
    assert_same_runs(whole, run)


def test_evaluation_is_the_same_table_for_one_and_two_ranks(pairs):
    tables = []
    for out in runs_of(pairs, "evaluate"):
        tables.append(json.loads((out / "results.json").read_text())["results"]["toy"])
    for name, value in tables[0].items():  # rounding may turn one token in a hundred thousand
        assert value == pytest.approx(tables[1][name], abs=0.5 if name == "length" else 0.02), name


# -------------------------------------- nodes that do not have the same ----------------------------------
OWN_LINE = {  # a fork: a piece of ttrl.py, by what it replaces it
    "own_advantage": ("responses[i].advantage = advantage",
                      "responses[i].advantage = advantage * (1 + log.rank)"),
    "one_left_out": ("            trained_G = ",
                     "            if log.rank and prompt is prompts[-1]:\n                continue\n"
                     "            trained_G = ")}


@pytest.fixture(scope="module")
def disagreeing(tmp_path_factory):
    """Folder of runs on two nodes, NAME.errors0 and NAME.errors1 theirs: what one has, the other has not."""
    folder = tmp_path_factory.mktemp("nodes")
    lines = (ROOT / "toy/train.jsonl").read_text().splitlines(keepends=True)
    for node, data in (("0", lines[:8]), ("1", lines[7::-1])):
        shutil.copytree(ROOT / "toy", folder / node / "model")
        (folder / node / "data.jsonl").write_text("".join(data))
    weights = load_file(folder / "1/model/model.safetensors")
    weights["model.norm.weight"] += 0.1
    save_file(weights, folder / "1/model/model.safetensors", metadata={"format": "pt"})
    for script, (old, new) in OWN_LINE.items():
        (folder / f"{script}.py").write_text((ROOT / "ttrl.py").read_text().replace(old, new))

    def nodes(name, *flags, script="ttrl", second=()) -> dict:
        same = job("ttrl", folder / name, *FLAGS) | dict(script=script)
        same["nodes"] = [dict(folder=str(folder / "0"), flags=flags),
                         dict(folder=str(folder / "1"), flags=[*flags, *second])]
        return same

    ended(drive(2, folder, nodes("same"), nodes("flag", second=["--lr", "0"]),
                nodes("data", "--dataset", "data.jsonl"),
                nodes("weights", "--model", "./model", "--dataset", "toy", "--max_prompt_tokens", "128"),
                *(nodes(script, script=script) for script in OWN_LINE),
                nodes("disk", "--checkpoint_every", "1", "--out", "run")))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name, sentence", [
    ("flag", "--lr is 0.0 on rank 1"),
    ("data", "the data of --dataset is "),
    ("weights", "the weights of --model is "),
    ("own_advantage", "the ranks have different advantages"),
    ("one_left_out", "the ranks have different responses"),
    ("disk", "which another rank wrote"),
])
def test_ranks_that_do_not_have_the_same_stop(disagreeing, name, sentence):
    assert sentence in (disagreeing / f"{name}.errors0").read_text()
    for rank in (0, 1):
        assert (disagreeing / f"{name}.code{rank}").read_text() != "0"
        assert (disagreeing / f"same.code{rank}").read_text() == "0"


# -------------------------------------------- killed on two ranks ----------------------------------------
KILLED = ("--steps 10 --votes 4 --train_samples 4 --prompts_per_batch 4 --max_new_tokens 48 --lr 1e-3 "
          "--num_minibatches 2 --checkpoint_every 1 --seed 1 --eval toy --eval_samples 1 "
          "--eval_every 5").split()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run on two ranks."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = ended(torchrun(2, str(ROOT / "ttrl.py"), *KILLED, "--out", str(out)))
    assert done.code == 0, done.errors[-2000:]
    return out


def alive(pids) -> int:
    """How many of the processes still run; one that nobody has waited for does not."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", ",".join(pids)], capture_output=True, text=True)
    return sum(not state.startswith("Z") for state in done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("victim, number, moment", [
    (0, signal.SIGKILL, "checkpoint"), ("agent", signal.SIGTERM, "evaluation"),
    ("agent", signal.SIGUSR1, "step"), ("all", signal.SIGUSR2, "step")])
def test_killed_on_two_ranks_and_bitwise_the_same(tmp_path, whole, victim, number, moment):
    """kill -9 of a rank, a signal for torchrun's agent, or for all, as Slurm sends it: all leave within a
    minute, none is left behind, and --resume on two ranks ends where the uninterrupted run does."""
    out = tmp_path / "run"
    process = torchrun(2, str(ROOT / "ttrl.py"), *KILLED, "--out", str(out))
    saved = 5 if moment == "evaluation" else 1  # after which there is one at once
    while not (out / f"checkpoints/step_{saved:08d}").exists():
        assert process.poll() is None, ended(process).errors[-2000:]
        time.sleep(0.05)
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    ranks = listed.stdout.split()
    while moment == "checkpoint" and not list(out.glob("checkpoints/*.partial")) and alive(ranks) == 2:
        time.sleep(0.0005)
    victims = {0: [int(ranks[0])], "agent": [process.pid], "all": [process.pid, *map(int, ranks)]}
    for pid in victims[victim]:
        os.kill(pid, number)
    began = time.time()
    ended(process, timeout=60)
    while alive(ranks) and time.time() - began < 60:
        time.sleep(0.2)
    assert not alive(ranks), f"{time.time() - began:.0f} s later"
    done = ended(torchrun(2, str(ROOT / "ttrl.py"), "--resume", "--out", str(out)))
    assert done.code == 0, done.errors[-2000:]
    assert metrics_of(out) == metrics_of(whole)
    torch.testing.assert_close(fresh_state(out / "final"), fresh_state(whole / "final"), rtol=0, atol=0)
