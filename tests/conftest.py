"""Shared by the tests: short toy runs in this process, tiny random models, toy policies and rollouts."""

import atexit
import contextlib
import functools
import importlib
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run in the background inherit
signal.signal(signal.SIGINT, signal.default_int_handler)  # that these two are ignored

import pytest
import torch

import common
from common import Rollout
from engine import options, process
from engine.base import Sample
from engine.models import load_model
from engine.options import TOY_MODEL
from engine.policy import Policy
from engine.run_folder import read_metrics

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
SCRIPTS = "ttrl evol_rl scrl restrain ettrl dynamic_rl".split()
SMALL = dict(steps=2, votes=8, train_samples=8, prompts_per_batch=4, max_new_tokens=64, eval="",
             checkpoint_every=0, num_minibatches=2)
SMALL_OF = dict(restrain=dict(kappa=2), ettrl=dict(trunks=2))  # what else is sized by the number of responses
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.diff"))
TIMED = ("seconds/", "tokens_per_second/")


# ------------------------------------------------- forks ---------------------------------------------------
@functools.cache
def patched() -> Path:
    """The folder of forks that load_script made; Python imports from it."""
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.path.insert(0, str(folder))  # before what `make gspo.py` once wrote
    return folder


def load_script(name: str):
    """A script's module; a fork's is ttrl.py with examples/NAME.diff, as make writes it."""
    path, diff = patched() / f"{name}.py", ROOT / f"examples/{name}.diff"
    if name in EXAMPLES and not path.exists():
        command = ["patch", "-F0", "-o", path, ROOT / "ttrl.py", diff]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            path.unlink()
            pytest.fail(f"{diff} no longer fits ttrl.py:\n{done.stdout}{done.stderr}")
    return importlib.import_module(name)


# ------------------------------------------------- toy runs ------------------------------------------------
@functools.cache
def toy_of(module) -> dict:
    """The toy's defaults that a script gives to common.launch in its last line."""
    return launched_with(module).get("toy", common.TOY)


@functools.cache
def launched_with(module) -> dict:
    with mock.patch.object(common, "launch") as launch:
        runpy.run_path(module.__file__, run_name="__main__")
    _, args_class, *toy = launch.call_args.args
    assert args_class.__name__ == "Args"
    return dict(zip(("toy",), toy)) | launch.call_args.kwargs


def toy_args(module, **overrides):
    """A script's arguments on the toy with a small budget."""
    values = toy_of(module) | SMALL | SMALL_OF.get(module.__name__, {}) | overrides
    return options.make_args(module.Args, values)


@contextlib.contextmanager
def signal_handlers_kept():
    """A run's handlers hold the run, and the run holds the lock of its folder."""
    handlers = {number: signal.getsignal(number) for number in process.StopSignal.NUMBERS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_toy(module, out, **overrides) -> list[dict]:
    """Run a script's main on the toy with a small budget; returns its metrics, a dict per step."""
    with signal_handlers_kept():
        module.main(toy_args(module, **overrides, out=str(out)))
    return read_metrics(out)


@pytest.fixture
def launch(monkeypatch, capfd):
    """launch(script, **flags) -> (exit code, output, errors), as from the shell but in this process."""
    def launched(script="ttrl", **flags):
        def leave(code):
            raise SystemExit(code)

        module = importlib.import_module(script)
        toy = module.TOY if script == "evaluate" else toy_of(module)
        arguments = [f"--{name}={value}" for name, value in flags.items() if value is not True]
        arguments += [f"--{name}" for name, value in flags.items() if value is True]
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
        monkeypatch.setattr(process, "leave", leave)
        code = 0
        with signal_handlers_kept():
            try:
                process.launch(module.main, module.Args, toy)
            except SystemExit as ended:
                code = ended.code
        return code, *capfd.readouterr()

    return launched


def write_run(folder, args, **files):
    """A folder like a run's, with these files; without metrics two steps."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(dict(script="ttrl", args=args, identity={"data": 1})))
    files = dict(metrics=[dict(step=1, reward=0.5, loss=0.1), dict(step=2, reward=1)]) | files
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def as_if_killed(run, copy, step) -> None:
    """Copy a run's folder as it was after this step's checkpoint."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "final")
    for folder in copy.glob("checkpoints/step_*"):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def untimed(lines: list[dict]) -> list[dict]:
    """The lines of metrics.jsonl without times and speeds."""
    kept = []
    for line in lines:
        kept.append({name: value for name, value in line.items() if not name.startswith(TIMED)})
    return kept


# ---------------------------------------------- policies, rollouts -----------------------------------------
def make_policy(model=None, trainable=True, dtype=torch.float32, **options) -> Policy:
    options = {"max_length": 192, **options}
    model = load_model(str(model or TOY_MODEL))
    return Policy(model, torch.device("cpu"), dtype, trainable, **options)


def random_rollouts(count, seed=0, vocabulary=300, shortest=1, longest=40) -> list[Rollout]:
    """Responses of very uneven length over random tokens."""
    rng = random.Random(seed)
    rollouts = []
    for _ in range(count):
        prompt = [rng.randrange(5, vocabulary) for _ in range(rng.randint(2, 30))]
        response = [rng.randrange(5, vocabulary) for _ in range(rng.randint(shortest, longest))]
        rollout = Rollout(prompt, response, torch.zeros(len(response)), True, advantage=rng.uniform(-2, 2))
        rollouts.append(rollout)
    return rollouts


def fresh_state(path) -> dict[str, torch.Tensor]:
    """The weights of a saved model, by name."""
    from safetensors.torch import load_file
    return load_file(Path(path) / "model.safetensors")


# ------------------------------------------------ tiny models ----------------------------------------------
def tiny_model(name, folder, **more):
    """A randomly initialised model of this architecture, vocabulary 64, saved to folder; more: its config."""
    import transformers
    options = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                   num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, bos_token_id=1,
                   eos_token_id=2, initializer_range=0.5) | more
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**options)
    model = getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))(config)
    model.eval().save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A randomly initialised model of another architecture (untied head) with the toy's tokenizer."""
    from transformers import AutoTokenizer
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    stop = tokenizer.eos_token_id
    tiny_model("Llama", folder, vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, head_dim=32,
               max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=0.02,
               eos_token_id=stop, pad_token_id=stop, bos_token_id=None)
    tokenizer.save_pretrained(folder)
    return folder


# --------------------------------------- watching a script's own main() ------------------------------------
# What the responses of a problem answer, a letter each: g the gold answer, a to c wrong ones, w one without a
# digit, - none. So there is every kind of vote, whatever the toy writes; ETTRL's further leaves begin again.
VOTES = {0: "ggggaab-", 1: "aaagggbw", 2: "abc-gwba", 3: "aaaaaaag", 4: "gggggggg"}
INITIAL_VOTES = {0: "gaabbcw-", 1: "aaaaaagg", 2: "--------", 3: "gggggggg", 4: "aaabbbcc"}  # before step 1
ANSWERS = dict(a="101", b="202", c="303", w="no idea")

VERBS = "restore sample decode minibatches".split()

# Temperature, KL and entropy count, the second minibatch leaves the clip range, several micro-batches
WATCHED = dict(steps=1, prompts_per_batch=5, votes=8, train_samples=6, max_new_tokens=20, temperature=0.8,
               num_minibatches=2, micro_tokens=300, lr=4e-4, warmup=0.0, grad_clip=1e9, weight_decay=0.1,
               clip_low=0.05, clip_high=0.08, kl_coef=0.2, entropy_coef=0.1, dtype="float32", sampler="hf")
WATCHED_OF = dict(
    scrl=dict(tau_neg=0.3, lambda_h=0.4), restrain=dict(kappa=3),
    ettrl=dict(trunks=3, forks=1, branches=2),
    dynamic_rl=dict(dataset="", max_question_tokens=96, lambda_q=0.7, lambda_dq=0.4, lambda_da=1.3,
                    lambda_s=0.6))


def spy(owner, name, before=None, after=None) -> None:
    """before(arguments) and after(result, arguments) are called around this one object's method."""
    original = getattr(owner, name)

    def spied(*arguments, **options):
        if before:
            before(*arguments, **options)
        result = original(*arguments, **options)
        if after:
            after(result, *arguments, **options)
        return result

    setattr(owner, name, spied)


class Watched:
    """A run of a script's main on the CPU: what it samples, rewards, trains, and sends to the optimizer.

    answers: what is answered, see VOTES; None: what the model writes, uncut. noise: added to the policy, so
    that it differs from the reference. meddle(run): puts in spies of its own, or faults, before step 1."""

    def __init__(self, script: str, out: Path, answers=VOTES, noise=0.3, meddle=None, **flags):
        self.script, self.out, self.answers, self.noise, self.meddle = script, out, answers, noise, meddle
        self.module, self.flags = load_script(script), flags
        self.generated = []  # the sampler's calls: requests, options; fresh: it had the policy's weights
        self.samples = []    # common.sample's calls: step, prompts, n, limits, groups, and tokens as sampled
        self.groups = []     # log.vote's calls: step, prompt, responses, rewards, label ...
        self.updates = []    # per minibatch: step, responses, weights, gradient, grad_norm, stepped, lr ...
        self.weights = {}    # {step: weights that sampled}; "initial": the checkpoint's
        self.metrics = []    # lines of metrics.jsonl
        self.answered = {}   # {(step, problem): how many of its responses were given an answer}

    def main(self) -> "Watched":
        start = common.start

        def start_and_spy(args, **task):
            self.args, self.run, self.step = args, start(args, **task), 0
            self._spy(self.run)
            if self.meddle:
                self.meddle(self.run)
            return self.run

        instead = contextlib.nullcontext()
        if self.script == "dynamic_rl":
            verdicts = itertools.cycle([True, False, True, True, True])  # whatever the questions are
            instead = mock.patch.object(self.module, "keep_question", lambda text: next(verdicts))
        types = dict(bfloat16=torch.bfloat16).get(self.flags.get("dtype"), torch.float32)
        cpu = mock.patch("common.start_processes", lambda *flags, **options: (torch.device("cpu"), types))
        clip = mock.patch("torch.nn.utils.clip_grad_norm_", self._clip)
        kept = {name: getattr(common, name) for name in VERBS}  # spies and faults end with the run
        try:
            with mock.patch.object(common, "start", start_and_spy), cpu, clip, instead, \
                    mock.patch.object(sys, "argv", [f"{self.script}.py"]):
                self.metrics = run_toy(self.module, self.out, **self.flags)
        finally:
            for name, verb in kept.items():
                setattr(common, name, verb)
        return self

    def policy_weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.run.policy.named_tensors()}

    def gradient(self) -> dict[str, torch.Tensor]:
        named = self.run.policy.model.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.requires_grad}

    def _spy(self, run) -> None:
        self.weights["initial"] = self.policy_weights()
        spy(common, "restore", after=self._started)
        spy(common, "sample", before=self._will_sample, after=self._sampled)
        spy(common, "decode", after=self._decoded)
        spy(common, "minibatches", after=self._split)
        spy(run.log, "vote", before=self._voted)
        spy(run.sampler, "generate", after=self._cut)
        spy(run.sampler, "generate", before=self._will_generate)
        spy(run.policy, "logprobs", before=self._forward)

    def _started(self, result, run, optimizer) -> None:
        self.optimizer = optimizer
        spy(optimizer, "step", before=self._will_step)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.run.policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * self.noise * 0.05
            with torch.no_grad():
                parameter.add_(noise)

    def _will_generate(self, requests, temperature, top_p=1.0, top_k=0, **stop) -> None:
        policy, sampler = self.policy_weights(), dict(self.run.sampler.model.named_parameters())
        fresh = all(torch.equal(policy[name], p.float()) for name, p in sampler.items())
        options = dict(temperature=temperature, top_p=top_p, top_k=top_k)
        self.generated.append(SimpleNamespace(requests=requests, fresh=fresh, **options))

    def _cut(self, groups, requests, temperature, top_p=1.0, top_k=0, **stop) -> None:
        """Lengths differ, as if some responses had met their limit earlier; else all means were the same."""
        for group in groups if self.answers else []:
            for i, (ids, logprobs, finished) in enumerate(group):
                length = max(1, len(ids) - i % 5 * 3)
                group[i] = Sample(ids[:length], logprobs[:length], finished and length == len(ids))

    def _will_sample(self, run, step, prompts, n, limits=None, stop=(), gather=True) -> None:
        self.step = step
        self.weights.setdefault(step, self.policy_weights())

    def _sampled(self, groups, run, step, prompts, n, limits=None, stop=(), gather=True) -> None:
        tokens = []
        for group in groups:
            tokens.append([list(r.response_ids) for r in group])
        self.samples.append(SimpleNamespace(step=step, prompts=prompts, n=n, limits=limits, groups=groups,
                                            tokens=tokens, stop=stop))

    def _decoded(self, result, run, responses, problem) -> None:
        if not self.answers or not isinstance(problem.id, int):
            return  # no problem: a prompt of Dynamic RL's or ETTRL's own
        letters = (self.answers if self.step else INITIAL_VOTES)[problem.id]
        first = self.answered.setdefault((self.step, problem.id), 0)
        self.answered[self.step, problem.id] += len(responses)
        for i, response in enumerate(responses, first):
            letter = letters[i % len(letters)]
            response.answer = problem.answer or "707" if letter == "g" else ANSWERS.get(letter)

    def _voted(self, prompt, responses, classes, rewards, label, negatives=frozenset()) -> None:
        self.groups.append(SimpleNamespace(
            step=self.step, prompt=prompt, responses=responses, classes=classes, rewards=rewards.tolist(),
            label=label, negatives=negatives))

    def _split(self, minibatches, args, step, train) -> None:
        for group in self.groups:
            if group.step == step:
                group.trained = [i for i, response in enumerate(group.responses) if response in train]
        for responses in minibatches:
            update = SimpleNamespace(step=step, responses=responses, train=train, micros=0, gradient=None,
                                     stepped=False)
            self.updates.append(update)

    def _update(self) -> SimpleNamespace:
        return next(update for update in self.updates if update.gradient is None)

    def _forward(self, micro, temperature, entropy_coef=1.0, statistics=()) -> None:
        if torch.is_grad_enabled():
            self._update().micros += 1

    def _clip(self, parameters, largest, clip=torch.nn.utils.clip_grad_norm_) -> torch.Tensor:
        update = self.update = self._update()
        update.weights, update.gradient = self.policy_weights(), self.gradient()
        update.trained = {name: p.detach().double() for name, p in self.run.policy.model.named_parameters()
                          if p.requires_grad}
        norm = clip(parameters, largest)
        update.grad_norm = float(norm)
        return norm

    def _will_step(self, closure=None) -> None:
        if self.updates:  # else a checkpoint makes the optimizer's state
            self.update.stepped, self.update.lr = True, self.optimizer.param_groups[0]["lr"]
            self.update.clipped = self.gradient()


@pytest.fixture(scope="session")
def watch(tmp_path_factory):
    """watch(script, **flags): its main() on five problems, watched. Equal calls share one run."""
    folder = tmp_path_factory.mktemp("watched")
    rows = read_lines(ROOT / "toy" / "train.jsonl")[:5]
    problems = folder / "problems.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    number = itertools.count()

    def prepare(script, **flags) -> Watched:
        """The same, not yet run: for runs that must fail."""
        flags = WATCHED | dict(dataset="problems.jsonl") | WATCHED_OF.get(script, {}) | flags
        if flags["dataset"] == "problems.jsonl":
            flags["dataset"] = str(problems)
        return Watched(script, folder / f"run{next(number)}", **flags)

    @functools.lru_cache(maxsize=16)
    def shared(script, flags) -> Watched:
        return prepare(script, **dict(flags)).main()

    def watch(script, **flags) -> Watched:
        if {"meddle", "answers"} & set(flags):
            return prepare(script, **flags).main()
        return shared(script, tuple(sorted(flags.items())))

    watch.problems = problems
    watch.prepare = prepare
    return watch


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if isinstance(item, pytest.DoctestItem):  # the formulas' examples
            item.add_marker("quick")
