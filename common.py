"""What the six scripts share: problems and responses, options, and the functions of the loop, by its steps:
evaluate (1); next_prompts, sample (2); answer_classes, majority, subset (3); check_sampler (5);
learning_rate, minibatches (6). engine/ holds what only makes a run fast or resumable, including restore,
save_when_due and launch.

The scripts read as if there were one process. Under torchrun every rank runs the same script: `sample` shares
the prompts among the ranks and gathers all responses on every rank, rewards depend on the whole batch alone,
and `policy.micro_batches` hands each rank its share: N ranks compute the update that one would.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Literal

from engine import data, samplers  # keep above torch: engine sets environment variables
import torch
import tyro
from tqdm import tqdm
from answers import classes as equivalence_classes, equal as answers_equal, extract_answer
from answers import majority as majority  # the most frequent class
from engine.base import Request, UserError, stable_hash, stop_texts, timed
from engine.checkpoint import steps_done
from engine.log import Log
from engine.metrics import grade, mean, summary
from engine.models import load_model, model_folder, read_config, read_tokenizer, weights_digest
from engine.options import Machine, bad_flags, options_dict
from engine.policy import check_batch, load_policies
from engine.process import StopSignal, start_processes
from engine.ranks import gather_shares, on_all_engines, print0, rank_and_ranks
from engine.ranks import same_on_all_ranks, share_of_rank
from engine.run import Run

# What a script calls as common.NAME, though it stands in engine/:
from engine.base import timed_loop as timed_loop  # the items; the time spent on them is logged
from engine.options import SMOLLM2 as SMOLLM2, TOY as TOY  # what replaces defaults for a built-in model
from engine.options import Count, CountOrZero, NonNegative, NonNegativeOrInf  # types of options, with ranges
from engine.options import Finite as Finite, Place, Positive, PositiveShare, Share
from engine.process import launch as launch  # reads the command line, runs main, tells errors
from engine.ranks import all_gather as all_gather  # every rank's item, on every rank
from engine.run import restore as restore  # loads the newest checkpoint
from engine.run import save_when_due as save_when_due  # writes one


# ------------------------------------------------ problems and responses ------------------------------------
@dataclass
class Problem:
    question: str
    answer: str | None = None  # gold: for evaluation and label accuracy, never for a label-free reward
    id: int = 0
    choices: int = 0  # multiple choice: so many options are in the question, and the answer is a letter
    prompt_ids: list[int] = field(default_factory=list)
    also_right: list[str] = field(default_factory=list)  # other gold answers
    row: dict = field(default_factory=dict, repr=False)  # the data set's, for methods that need other columns

    # A task of your own is a subclass with another `read` or `keys`, given to `start`.
    def read(self, text: str, end_of_prompt: str = "") -> str | None:
        """The answer in a response, or None."""
        return extract_answer(text, self.choices, end_of_prompt)

    keys = None  # a static method, n answers -> n keys, equal for equal answers; None: compare as mathematics

    @classmethod
    def classes(cls, answers: list[str | None]) -> list[int | None]:
        """[n] equal answers have equal classes, numbered as they appear; None (no answer) stays None."""
        return equivalence_classes(answers, cls.keys)

    def is_right(self, answer: str | None) -> bool:
        """Whether it is the gold answer; False without one."""
        return any(answers_equal(answer, gold, self.keys) for gold in [self.answer, *self.also_right])


@dataclass(eq=False)
class Rollout:
    """One response. A script may set attributes of its own on it (RESTRAIN: plus and minus)."""
    prompt_ids: list[int]
    response_ids: list[int]  # [T] sampled tokens, with the end-of-sequence token if the response finished
    sampler_logp: torch.Tensor  # [T] float32, the sampler's log-probs of them at the sampling temperature
    finished: bool  # False: cut off at max_new_tokens
    text: str = ""
    answer: str | None = None  # None: no \\boxed{} in it
    old_logp: torch.Tensor | None = None  # [T] the trainer's, of the policy that sampled: the ratio's divisor
    ref_logp: torch.Tensor | None = None  # [T] log-probs under the frozen base model
    entropy: torch.Tensor | None = None  # [T] nats, over the whole vocabulary, of the policy that sampled
    advantage: float = math.nan  # every response that is trained needs one
    # [T] 0 at tokens that are in no loss and no metric, such as a tool's, else 1; None: all are 1
    mask: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Number of unmasked tokens."""
        return len(self.response_ids) if self.mask is None else int(self.mask.sum())

    def unmasked(self, values_T: torch.Tensor) -> torch.Tensor:
        """The values [T] at the unmasked tokens."""
        return values_T if self.mask is None else values_T[self.mask.bool()]

    def mean(self, values_T: torch.Tensor) -> float:
        """The mean of values [T] over the unmasked tokens; 0 if there is none."""
        return float(self.unmasked(values_T).mean()) if self.length else 0.0


# ------------------------------------------------------ options ---------------------------------------------
@dataclass
class Args:
    """What a paper's table sets; --help is the manual. A default is the paper's value (of one experiment, if
    they differ), else the released code's, else ours; its help says which. What no paper sets, such as the
    sampling engine or checkpoints, is in `machine`."""
    model: Place = ""
    """Hub id or local folder of a causal language model. Empty: the built-in toy. smollm2: a real model of
    135M parameters that comes as a pip package (docs/hardware.md). Both have defaults of their own, which
    are printed at the start."""
    dataset: Place = "aime24"
    """Training problems: a short name (engine/data.py), a Hub id, a file or a folder (docs/data.md)."""
    steps: CountOrZero = 0
    """Number of rollout batches to train on; 0: epochs x (problems // prompts_per_batch)."""
    prompts_per_batch: Count = 8
    """Problems per rollout batch (EVOL-RL Table 3; TTRL's, SCRL's code; RESTRAIN, ETTRL: none given)."""
    votes: Count = 64
    """N, the number of responses sampled per prompt; all of them vote (TTRL 3.1, SCRL 4.1, ETTRL 4: 64)."""
    train_samples: Count = 32
    """G, the size of the seeded random subset that is trained (TTRL 3.1, SCRL 4.1, ETTRL 4: 32)."""
    temperature: Positive = 1.0
    """Sampling temperature; log-probs and entropies are taken at the same one (TTRL 3.1: 0.6, Qwen2.5-Math
    1.0; EVOL-RL, RESTRAIN: 1.0)."""
    max_new_tokens: Count = 3072
    """Length limit of a response, in tokens (TTRL 3.1, SCRL 4.1, ETTRL 4: 3072)."""
    lr: NonNegative = 5e-7
    """Peak learning rate of AdamW, betas 0.9 and 0.999 (TTRL 3.1, SCRL 4.1, ETTRL 4: 5e-7)."""
    num_minibatches: Count = 8
    """Optimizer steps per rollout batch; the default is one per prompt (EVOL-RL Table 3; TTRL's, SCRL's
    code)."""
    kl_coef: NonNegative = 0.001
    """Weight of the KL term; 0: none, and no reference model (EVOL-RL Table 3, RESTRAIN D.2; TTRL's, SCRL's
    code)."""
    eval: Place = "train"
    """Benchmarks of the evaluations, comma-separated; 'train': the problems of --dataset; empty: none."""
    prompt: Place = "system"
    """Prompt format. system: the instruction as system turn (EVOL-RL A.1). suffix: behind the question.
    plain: no chat template. Or a file whose lines [system], [user], [assistant] begin turns
    (examples/prompts)."""
    labels: Literal["majority", "gold"] = "majority"
    """Which answers vote. majority: all. gold: the right ones alone, which makes ttrl.py supervised GRPO."""
    seed: CountOrZero = 1
    """Seed of data order, sampling and subsets."""
    epochs: CountOrZero = 80
    """Passes over the problems (TTRL 3.1, SCRL 4.1, ETTRL 4: AIME 80, AMC 30, MATH-500 10)."""
    max_prompt_tokens: Count = 1024
    """Length limit of a prompt, in tokens. Longer ones are not trained, and count as wrong in an evaluation
    (released codes: 512, 1024)."""
    weight_decay: NonNegative = 0.01
    """AdamW's weight decay (the released codes; the papers' texts give none)."""
    warmup: Share = 0.03
    """Share of the steps with linear warm-up (the released codes); then a cosine falls to 0 (TTRL 3.1)."""
    grad_clip: Positive = 1.0
    """Largest norm of an optimizer step's gradient (the released codes; the papers' texts give none)."""
    minibatches: Literal["mixed", "by_prompt"] = "mixed"
    """Order of the responses. mixed: at random (ours). by_prompt: prompt after prompt (EVOL-RL Table 3)."""
    clip_low: Share = 0.2
    """Lower clip: ratios are at least 1 - clip_low (the released codes; ETTRL 3.1: typically 0.2)."""
    clip_high: NonNegativeOrInf = 0.2
    """Upper clip: ratios are at most 1 + clip_high (the released codes)."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus; a positive one pushes the entropy up (EVOL-RL Eq. 2; RESTRAIN D.2: 0)."""
    loss_aggregation: Literal["seq-mean", "token-mean"] = "seq-mean"
    """How the tokens' losses are averaged. seq-mean: over each response, then over responses (EVOL-RL, SCRL,
    ETTRL). token-mean: over all tokens of the minibatch (DAPO)."""
    eval_every: CountOrZero = 20
    """Steps between evaluations, beside those before the first step and after the last; 0: these two alone
    (ours)."""
    eval_samples: Count = 16
    """Responses per problem of an evaluation (TTRL 3.1, SCRL 4.1, RESTRAIN 3: 16; EVOL-RL Table 1: 32)."""
    eval_temperature: NonNegative = 0.6
    """Temperature of an evaluation; 0: greedy, with one response (TTRL 3.1, SCRL 4.1, RESTRAIN 3: 0.6)."""
    eval_top_p: PositiveShare = 0.95
    """Top-p of an evaluation; 1: off (TTRL 3.1, SCRL 4.1, RESTRAIN 3: 0.95)."""
    eval_top_k: CountOrZero = 0
    """Top-k of an evaluation; 0: off (Dynamic RL 3.1, EVOL-RL's released test: 20)."""
    eval_greedy: bool = False
    """Measure greedy pass@1, too (TTRL 3.1 for its analysis, RESTRAIN Table 3)."""
    machine: tyro.conf.OmitArgPrefixes[Machine] = field(default_factory=Machine)
    MIN_TRAIN_SAMPLES = 2  # one response has nothing to be compared with

    def errors(self) -> list[str]:
        """One sentence per bad flag (flag, value, what is allowed), all found before anything is loaded."""
        return bad_flags(self)

    def responses_per_prompt(self) -> int:
        """Number of responses that vote on a prompt; --train_samples of them are trained on."""
        return self.votes

    def has_gradient(self, response: Rollout) -> bool:
        """Whether the loss has a gradient of this response. Else it counts in the means, but is not computed:
        without KL and entropy term, it is the advantage that makes one."""
        return bool(self.kl_coef or self.entropy_coef or response.advantage)

    def own_prompts(self, tokenizer) -> dict[str, list[int]]:
        """Prompts beside the problems' own (Dynamic RL: z_0), for --show_prompt."""
        return {}


def start(args: Args, train: bool = True, *,  # the rest are a fork's hooks, the same on all ranks
          problem: type = Problem,              # its subclass, for another task
          generate: Callable | None = None,     # (run, work, temperature, **options), as common.generate
          adapt: Callable | None = None) -> Run:  # (policy), before sharding: examples/lora.diff
    """Read what the flags name, open the processes and the run's folder, load the weights. train: False to
    evaluate."""
    # Read: bad flags, model and data are refused before anything slow.
    if bad := args.errors():
        raise UserError("\n       ".join(bad))
    machine = args.machine
    trust = machine.trust_remote_code
    path = model_folder(args.model)
    length = args.max_prompt_tokens + args.max_new_tokens
    config = read_config(path, length, trust)
    tokenizer, stop_ids = read_tokenizer(path, config, args.prompt, machine.template_vars, trust)
    problems, benchmarks = data.read_data(args, tokenizer, train, problem)
    if machine.show_prompt:
        data.print_prompts(args, tokenizer, problems, benchmarks)  # and exit
    total_steps = data.count_steps(args, problems, tokenizer) if train else 0

    # Open: the ranks meet, and the folder is this run's alone.
    torch.manual_seed(args.seed)
    options = options_dict(args)
    device, dtype = start_processes(machine.dtype, train)
    same_on_all_ranks({f"--{name}": value for name, value in options.items()})
    log = Log(options, device, data.digests(problems, benchmarks, stop_ids))
    done = steps_done(log.path, machine.checkpoint_every, log.record["id"]) if machine.resume else 0

    # Load: weights are memory-mapped, then on the device; the sampler has its own.
    policy = reference = None
    if train:
        log.open_board(done)
        models = [load_model(path, trust) for _ in range(2 if args.kl_coef > 0 else 1)]
        log.identify({"the weights of --model": weights_digest(models[0])})
        policy, reference = load_policies(models, device, dtype, machine, length, adapt)
    sampler = samplers.load_sampler(path, device, dtype, machine, length, stop_ids, args.seed, policy)
    if sum(p.numel() for p in sampler.model.parameters()) < 10**7:
        torch.set_num_threads(1)  # too small to share: two threads mostly wait for each other
    return Run(
        args=args, tokenizer=tokenizer, problems=problems, benchmarks=benchmarks, total_steps=total_steps,
        policy=policy, reference=reference, sampler=sampler, log=log, stop=StopSignal(log.path, done),
        device=device, dtype=dtype, problem=problem, generate=generate)


# ------------------------------------------------------ sampling --------------------------------------------
def next_prompts(args: Args, problems: list[Problem], batch: int) -> list[Problem]:
    """The problems of a batch, from 1 on: shuffled anew each epoch, the incomplete last batch dropped, none
    twice. Step k takes batch k, unless a fork draws several batches in a step (dynamic sampling)."""
    size, n = args.prompts_per_batch, len(problems)
    epoch, position = divmod(batch - 1, n // size)
    order = random.Random(stable_hash(args.seed, "order", epoch)).sample(range(n), n)
    return [problems[i] for i in order[position * size:(position + 1) * size]]


@timed("sample")
def sample(run: Run, step: int, prompts: list[Problem], n: int, limits: list[int] | None = None,
           stop: list[str] = (), gather: bool = True) -> list[list[Rollout]]:
    """n responses to every prompt, with text and answer, on all ranks; the ranks share the prompts. Without
    gather each rank has prompts of its own.

    Seeds derive from (seed, step, prompt.id) alone. limits: max_new_tokens of each prompt (less if a fork
    made it longer). stop: texts, or special tokens, that end a response (kept at its end). Raises ValueError
    if a prompt.id was sampled in this step already: it would get the same responses again; or if a prompt is
    too long."""
    args, work, stop = run.args, [], stop_texts(stop)
    run.sampled = {(k, number) for k, number in run.sampled if k == step}
    for prompt, limit in zip(prompts, limits or [args.max_new_tokens] * len(prompts), strict=True):
        if (step, prompt.id) in run.sampled:
            raise ValueError(f"the prompt with id {prompt.id!r} was sampled in this step already")
        run.sampled.add((step, prompt.id))
        room = args.max_prompt_tokens + args.max_new_tokens - len(prompt.prompt_ids)
        if room < 1:  # the sampler would return one token, which has no answer
            raise ValueError(f"the prompt with id {prompt.id!r} leaves no room for a response")
        seed = stable_hash(args.seed, step, prompt.id)
        work.append((prompt, Request(prompt.prompt_ids, n, seed, min(limit, room))))
    options = dict(stop=stop) if stop else {}  # a fork's function need not know stops

    def sample_share(mine):
        return (run.generate or generate)(run, mine, args.temperature, **options)

    if not gather:
        return sample_share(work)
    # a fork's own function gets all n responses of a prompt at once
    groups = on_all_engines(sample_share, work, n, args.machine.tensor_parallel, split=not run.generate)
    run.log.sampled_tokens += sum(len(response.response_ids) for group in groups for response in group)
    return groups


def generate(run: Run, work: list[tuple[Problem, Request]], temperature: float,
             **options) -> list[list[Rollout]]:
    """The responses to this rank's share of the work, in one engine call, with text and answer."""
    if not work:
        return []
    if options.get("stop"):
        options["decode"] = run.tokenizer.decode  # with special tokens: a stop may be one
    groups = []
    samples = run.sampler.generate([request for _, request in work], temperature, **options)
    for (problem, request), outputs in zip(work, samples):
        groups.append([Rollout(request.prompt_ids, *output) for output in outputs])
        decode(run, groups[-1], problem)
    invalid = torch.cat([r.sampler_logp for group in groups for r in group]).isnan()
    if invalid.sum() > max(1, len(invalid) // 100):  # single ones are only counted (check_sampler)
        raise UserError(f"--model is '{run.args.model}', but {int(invalid.sum())} of {len(invalid)} sampled "
                        "tokens have the probability NaN: it or the checkpoint holds NaN or infinite "
                        "weights, or a temperature is next to 0.")
    return groups


def decode(run: Run, responses: list[Rollout], problem: Problem) -> None:
    """Set text and answer from the responses' tokens. The prompt's end is passed on, since a chat template
    or a prefill may have opened a <think> block there.

    The text has special tokens, which thinking tags may be, but not the one that ended the response."""
    added = run.tokenizer.added_tokens_decoder
    for prompt_ids, group in groupby(responses, attrgetter("prompt_ids")):
        end_of_prompt = data.end_of_prompt(run.tokenizer, run.args.prompt, prompt_ids)
        for r in group:
            last = added.get(r.response_ids[-1]) if r.finished and r.response_ids else None
            ids = r.response_ids[:-1] if last and last.special else r.response_ids
            r.text = run.tokenizer.decode(ids)
            r.answer = problem.read(r.text, end_of_prompt)


# ------------------------------------------------------- votes ----------------------------------------------
@timed("vote")
def answer_classes(problem: Problem, responses: list[Rollout], labels: str = "majority") -> list[int | None]:
    """[N] the class of each response's answer; equal answers have equal classes, None is no answer.

    labels 'gold': right answers are class 0 and the others None, so that in ttrl.py the right answer wins."""
    classes = problem.classes([r.answer for r in responses])
    if labels == "majority":
        return classes
    right = {None: False}  # one comparison per class of answers
    for c, response in zip(classes, responses):
        if c not in right:
            right[c] = problem.is_right(response.answer)
    return [0 if right[c] else None for c in classes]


def initial_votes(run: Run, prompts_per_call: int = 0) -> dict[int, tuple[str | None, int]]:
    """{problem id: (majority answer, its votes)} from --votes responses of the base model. RESTRAIN Eq. 5.
    (None, 0): no response has an answer. About 8,192 responses per rank are sampled in one call and stored,
    so that a killed run continues; votes with other flags are sampled anew. As in a step the sampler is
    checked, by a few responses of each call."""
    args, file = run.args, "initial_votes.jsonl"
    flags = [args.votes, args.temperature, args.max_new_tokens]
    votes = {r["id"]: (r["answer"], r["votes"]) for r in run.log.lines(file) if r["flags"] == flags}
    todo = [p for p in run.problems if p.id not in votes]
    size = prompts_per_call or rank_and_ranks()[1] * max(1, 8192 // args.votes)
    for first in range(0, len(todo), size):
        part = todo[first:first + size]
        print0(f"Initial votes: {len(votes)} of {len(run.problems)} problems")
        run.sampler.load(run.policy.named_tensors())
        mine, counted = share_of_rank(part, args.machine.tensor_parallel), []
        groups = sample(run, 0, mine, args.votes, gather=False)
        run.sampler.sleep()
        some = sum(all_gather([group[0] for group in groups[:8]]), [])
        run.policy.score_old(some, args.temperature)
        check_sampler(run, some)
        for problem, responses in zip(mine, groups):
            classes = answer_classes(problem, responses)
            winner = majority(classes)
            answer = responses[classes.index(winner)].answer  # None if there is none
            counted.append((answer, 0 if winner is None else classes.count(winner)))
        # the ranks share votes: the responses' tokens would take gigabytes on each of them
        for problem, (answer, count) in zip(part, gather_shares(counted, args.machine.tensor_parallel)):
            votes[problem.id] = answer, count
            run.log.append(file, dict(flags=flags, id=problem.id, answer=answer, votes=count))
    return votes


# ------------------------------------------------------ the update ------------------------------------------
def subset(args: Args, step: int, prompt: Problem, n: int) -> list[int]:
    """--train_samples of the indices 0 to n - 1 at random, in order; seeded by (seed, step, prompt.id)."""
    draw = random.Random(stable_hash(args.seed, "subset", step, prompt.id))
    return sorted(draw.sample(range(n), min(n, args.train_samples)))


def check_sampler(run: Run, train: list[Rollout]) -> dict[str, float]:
    """How much the sampler's log-probs of its tokens differ from the trainer's own (old_logp), as metrics.

    A sampler with stale weights stops the run: in float32 if one token differs by more than MAX_LOGP_DIFF;
    in bfloat16, which rounds (healthy: by .01 to .02), if the average is above .1, and above 5 times the
    first step's. There an average above .05 is a warning."""
    scored = filter(run.args.has_gradient, train)
    diff = torch.cat([torch.zeros(0), *[r.unmasked((r.old_logp - r.sampler_logp).abs()) for r in scored]])
    invalid = int(diff.isnan().sum())  # of single tokens, vLLM's log-prob may be NaN
    diff = diff[diff.isfinite()]  # the update skips and counts what is not
    largest, average = (float(diff.max()), float(diff.mean())) if len(diff) else (0.0, 0.0)
    limit = max(0.1, 5 * run.log.first_diff)  # in the first step it is 0
    first = run.log.first_diff = run.log.first_diff or average
    if run.dtype == torch.float32:
        wrong = largest > samplers.MAX_LOGP_DIFF
    else:
        wrong = average > limit
        if average > 0.05:
            print0(f"Warning: sampler and trainer log-probs differ by {average:.3f} on average.")
    if wrong:
        raise UserError(f"sampler and trainer disagree: their log-probs differ by up to {largest:.2g}, "
                        f"{average:.2g} on average, {first:.2g} in the first step (allowed: "
                        f"{samplers.MAX_LOGP_DIFF} of a token in float32, {limit:.2g} on average in "
                        "bfloat16). Either --sampler computes this model otherwise, or its weights or its "
                        "prefix cache are stale, or tokens that it did not write have no mask 0.")
    return dict(logp_diff_max=largest, logp_diff_mean=average, logp_nan=invalid)


def learning_rate(args: Args, step: int, total_steps: int) -> float:
    """Linear warm-up that starts above 0, then a cosine to 0 after the last step. A step is a rollout batch;
    for a rate that changes within it, step - 1 + k / n is as good for the k-th of n minibatches. No state: a
    resumed run computes it anew, and with another --steps it follows another curve from there on."""
    warm = max(1, round(args.warmup * total_steps))
    if step <= warm and args.warmup:
        return args.lr * step / warm
    progress = (step - warm) / max(1, total_steps + 1 - warm)
    return args.lr * 0.5 * (1 + math.cos(math.pi * progress))


def minibatches(args: Args, step: int, train: list[Rollout]) -> list[list[Rollout]]:
    """The batch in num_minibatches parts, one optimizer step each: a random mix, or by prompt.

    Raises ValueError if a response has no finite advantage, or if the ranks differ."""
    check_batch(train)
    n = min(args.num_minibatches, len(train))
    if args.minibatches == "by_prompt":  # the prompts are in random order already
        return [train[k * len(train) // n:(k + 1) * len(train) // n] for k in range(n)]
    mixed = random.Random(stable_hash(args.seed, "split", step)).sample(train, len(train))
    return [mixed[k::n] for k in range(n)]


# ----------------------------------------------------- evaluation -------------------------------------------
def evaluate(run: Run, step: int) -> None:
    """Evaluate the policy after `step` steps and log the scores. The sampler must hold its weights."""
    metrics, verdicts, greedy = {}, {}, {}
    with run.stop.at_once(step), timed("evaluate"):
        for name, problems in run.benchmarks.items():
            if run.args.eval_greedy:
                graded = evaluate_benchmark(run, name, problems, greedy=True)
                greedy[name] = [verdict for verdict, _ in graded]
                metrics[f"eval/{name}/greedy"] = summary(greedy[name]).get("pass@1", math.nan)
            verdicts[name] = [verdict for verdict, _ in evaluate_benchmark(run, name, problems)]
            metrics |= {f"eval/{name}/{metric}": value for metric, value in summary(verdicts[name]).items()}
    rates = [value for name, value in metrics.items() if name.endswith("/pass@1")]
    if len(rates) > 1:
        metrics["eval/mean/pass@1"] = mean(rates)
    run.log.evaluation(step, metrics, verdicts, greedy)


def evaluate_benchmark(run: Run, name: str, problems: list[Problem], greedy: bool = False,
                       keep: bool = False) -> list[tuple[dict, list[Rollout]]]:
    """(verdicts, responses) of every problem, in order, on all ranks; each samples and grades a share.

    keep: the responses, too, gigabytes on every rank if they are long; else there are none.
    An overlong problem has no prompt: its responses are empty, so they count as wrong."""
    args, graded = run.args, []
    options = dict(top_p=args.eval_top_p, top_k=args.eval_top_k)
    temperature = 0.0 if greedy else args.eval_temperature
    samples = args.eval_samples if temperature else 1
    size = max(1, 4096 // samples)  # problems per engine call
    mine = share_of_rank(problems, args.machine.tensor_parallel)
    bar = tqdm(total=len(mine) * samples, desc=f"evaluating {name}", leave=False, disable=run.log.rank > 0)
    run.sampler.bar = bar  # transformers' moves it by responses, vLLM not at all
    for first in range(0, len(mine), size):
        part = mine[first:first + size]
        work = [(p, Request(p.prompt_ids, samples, stable_hash(args.seed, "eval", name, p.id),
                            args.max_new_tokens)) for p in part if p.prompt_ids]
        groups = iter((run.generate or generate)(run, work, temperature, **options))
        for p in part:
            group = next(groups) if p.prompt_ids else samples * [Rollout([], [], torch.zeros(0), False)]
            graded.append((grade(p, group), group if keep else []))
        bar.update(len(graded) * samples - bar.n)
    bar.close()
    return gather_shares(graded, args.machine.tensor_parallel)
