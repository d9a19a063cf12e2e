"""The six scripts, watched through their own main(): one step on the toy against the papers' equations.

Nothing here is a copy of the loop. conftest.Watched puts spies on the run, the sampler, the policy and the
optimizer; what they saw is compared with equations.py."""

import importlib
import math
import random
import re
import shutil
import statistics
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import ROOT, SCRIPTS, fresh_state, read_lines, spy, untimed
from equations import (
    answers_of, follows_the_paper, gradient_is_the_objectives, log_probs, log_softmax_rows, model_with,
    relative_error, vote, written_questions)

from engine.base import UserError, stable_hash

each_script = pytest.mark.parametrize("script", SCRIPTS)


# ------------------------------------------------- the gradient --------------------------------------------
@pytest.mark.quick
@each_script
def test_gradient_is_the_printed_objectives(script, watch):
    """Clip active, KL, entropy bonus, two minibatches, several micro-batches, advantages of both signs."""
    seen = watch(script)
    signs = {response.advantage > 0 for response in seen.updates[1].responses if response.advantage}
    assert signs == {True, False} and len(seen.updates) == 2 and min(u.micros for u in seen.updates) > 1
    assert len({len(response.response_ids) for response in seen.updates[1].responses}) > 2
    assert seen.metrics[-1]["clip_fraction"] > 0.02 and seen.metrics[-1]["kl"] > 0.004
    follows_the_paper(seen)
    gradient_is_the_objectives(seen)


@pytest.mark.quick
@pytest.mark.parametrize("script", ["ttrl", "scrl", "restrain", "dynamic_rl"])  # the others take ttrl's step
def test_one_minibatch_token_mean_no_reference(script, watch):
    """One minibatch: all ratios are 1. KL 0: no reference. Mean over all tokens."""
    seen = watch(script, num_minibatches=1, loss_aggregation="token-mean", kl_coef=0.0)
    assert seen.run.reference is None and "kl" not in seen.metrics[-1] and len(seen.updates) == 1
    gradient_is_the_objectives(seen)
    responses = seen.updates[0].responses
    old = log_probs(seen, seen.weights[1], responses)
    scored = torch.cat([response.old_logp for response in responses])
    assert relative_error(scored, torch.cat([old[id(response)] for response in responses])) < 1e-4


@pytest.mark.parametrize("script", ["ttrl", "scrl", "restrain", "dynamic_rl"])  # the others take ttrl's step
def test_plain_is_the_same_step(script, watch):
    """Padded rows and full logits: the same tokens, gradients and metrics."""
    engine, plain = watch(script), watch(script, plain=True)
    assert engine.run.policy.packed and not plain.run.policy.packed
    assert [s.tokens for s in plain.samples] == [s.tokens for s in engine.samples]
    first, second = (relative_error(a.clipped, b.clipped) for a, b in zip(engine.updates, plain.updates))
    assert first < 1e-4 and second < 1e-3  # Adam turns rounding of tiny gradients into steps
    ours, theirs = untimed(engine.metrics)[-1], untimed(plain.metrics)[-1]
    assert ours.pop("logp_diff_max") < 1e-3 and theirs.pop("logp_diff_max") < 1e-3
    assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


# --------------------------------------------- what is trained, and when -----------------------------------
@each_script
def test_trained_are_the_seeded_subset(script, watch):
    """G different responses of each prompt, by (seed, step, prompt) alone; each of them once, no others."""
    seen = watch(script)
    expected = []
    for group in seen.groups:
        n = len(group.responses)
        rng = random.Random(stable_hash(seen.args.seed, "subset", 1, group.prompt.id))
        assert group.trained == sorted(rng.sample(range(n), 6)) and n == seen.args.responses_per_prompt()
        expected += [group.responses[i] for i in group.trained]
    if script == "dynamic_rl":
        expected = [response for (response,) in seen.samples[0].groups] + expected
    assert list(map(id, seen.updates[0].train)) == list(map(id, expected))
    updated = [id(response) for update in seen.updates for response in update.responses]
    assert sorted(updated) == sorted(map(id, expected))
    assert len({tuple(group.trained) for group in seen.groups}) > 1


@pytest.mark.quick
@each_script
def test_clipping_and_adamw_of_two_steps(script, watch):
    """Seeds, learning rates, clipped gradients, AdamW, and what is left on disk."""
    seen = watch(script, steps=2, warmup=1.0, grad_clip=0.05)
    assert all(call.fresh for call in seen.generated)
    for sampled, asked in zip(seen.samples, seen.generated, strict=True):
        seeds = [stable_hash(seen.args.seed, sampled.step, prompt.id) for prompt in sampled.prompts]
        assert [request.seed for request in asked.requests] == seeds
    assert not torch.equal(*(next(iter(seen.weights[k].values())) for k in (1, 2)))

    lr = seen.args.lr
    assert [update.lr for update in seen.updates] == pytest.approx([lr / 2, lr / 2, lr, lr])
    for update in seen.updates:
        assert update.grad_norm > 0.05
        scaled = {name: g * 0.05 / update.grad_norm for name, g in update.gradient.items()}
        assert relative_error(update.clipped, scaled) < 1e-4
    for number, line in enumerate(seen.metrics, 1):
        norms = [update.grad_norm for update in seen.updates if update.step == number]
        assert line["step"] == number and line["lr"] == pytest.approx(lr * number / 2)
        assert line["grad_norm"] == pytest.approx(statistics.fmean(norms)) and line["skipped_updates"] == 0

    weights = seen.policy_weights()
    torch.testing.assert_close(weights, adamw(seen), atol=2e-7, rtol=1e-5)
    saved = fresh_state(seen.out / "final")
    assert all(torch.equal(saved[name], weights[name]) for name in weights)


def adamw(seen) -> dict[str, torch.Tensor]:
    """The weights after AdamW steps with the watched gradients and learning rates."""
    weights = {name: torch.nn.Parameter(value.clone()) for name, value in seen.updates[0].weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.999), weight_decay=seen.args.weight_decay)
    for update in seen.updates:
        optimizer.param_groups[0]["lr"] = update.lr
        for name, weight in weights.items():
            weight.grad = update.clipped[name]
        optimizer.step()
    return weights


TINY = dict(votes=2, train_samples=2, max_new_tokens=2, num_minibatches=1, kl_coef=0.0)


def poison(*bad: int):
    """Make the loss of these updates (counted over the whole run) NaN."""
    def meddle(run):
        original, done = run.policy.logprobs, Counter()

        def logprobs(micro, *options):
            logp, entropy = original(micro, *options)
            poisoned = torch.is_grad_enabled() and done["updates"] in bad
            return logp * math.nan if poisoned else logp, entropy

        def count(grad_norm):
            done["updates"] += 1

        run.policy.logprobs = logprobs
        spy(run.log, "update", before=count)

    return meddle


def test_bad_updates_are_skipped_and_counted_and_in_a_row_stop_the_run(watch, monkeypatch):
    """The first of two has no finite gradient: weights stay, the second is made, the log is JSON."""
    monkeypatch.setattr("engine.log.MAX_BAD_STEPS", 2)
    seen = watch("ttrl", meddle=poison(0, 2), steps=2)  # a good one between them
    bad, good, *_ = seen.updates
    assert (bad.stepped, good.stepped) == (False, True) and math.isnan(bad.grad_norm)
    assert all(torch.equal(bad.weights[name], good.weights[name]) for name in bad.weights)
    for line in seen.metrics:
        assert line["skipped_updates"] == 1 and "loss" in line and all(map(math.isfinite, line.values()))
    assert seen.metrics[0]["grad_norm"] == pytest.approx(good.grad_norm)
    seen = watch.prepare("ttrl", meddle=poison(1, 2), steps=2)
    with pytest.raises(UserError, match="2 optimizer steps in a row had a loss that is NaN"):
        seen.main()
    assert [update.stepped for update in seen.updates] == [True, False, False, False]


@pytest.mark.parametrize("script, loss_aggregation", [
    ("ttrl", "seq-mean"), ("ttrl", "token-mean"), ("restrain", "seq-mean"), ("dynamic_rl", "token-mean")])
def test_what_has_no_gradient_is_not_computed(script, loss_aggregation, watch, monkeypatch):
    """Without KL and entropy term: prompts that agree are neither scored nor back-propagated, in the same
    means. Some minibatch has no gradient at all: AdamW's momentum moves the weights all the same."""
    flags = dict(kl_coef=0.0, entropy_coef=0.0, steps=2, minibatches="by_prompt", num_minibatches=5,
                 loss_aggregation=loss_aggregation)
    seen = watch(script, **flags)
    monkeypatch.setattr(seen.module.Args, "has_gradient", lambda self, response: True)
    whole = watch(script, noise=0.30, **flags)  # as usual, but a run of its own
    torch.testing.assert_close(seen.policy_weights(), whole.policy_weights(), atol=1e-6, rtol=1e-3)
    for ours, theirs in zip(untimed(seen.metrics), untimed(whole.metrics), strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6)
    left_out = [r for r in seen.updates[0].train if not r.advantage and not getattr(r, "minus", 0)]
    assert all(r.entropy is None for r in left_out)
    if script == "ttrl":  # the fifth problem's answers agree
        norms = [update.grad_norm for update in seen.updates[:5]]
        assert left_out and min(norms) == 0 < max(norms)


# -------------------------------------------- every flag has an effect -------------------------------------
EFFECTS = []  # (script, flags of both runs, flags of the second, check, whether the papers' equations apply)


def effect(script: str, both: dict | None = None, paper: bool = True, **flags):
    """check(base, run) says what these flags change. Rewards and advantages must be the papers' with them."""
    def add(check):
        shown = ",".join(f"{name}={value}" for name, value in flags.items())
        EFFECTS.append(pytest.param(script, both or {}, flags, check, paper, id=f"{script}-{shown}"))
        return check

    return add


def gradients_differ(base, run) -> None:
    """In the update in which the flag counts, by far more than rounding."""
    pairs = zip(base.updates, run.updates, strict=True)
    assert max(relative_error(ours.gradient, theirs.gradient) for ours, theirs in pairs) > 0.01


def advantages(seen) -> list[float]:
    return [response.advantage for response in seen.updates[0].train]


# Every script's: the votes of conftest, five problems, one step of two minibatches
@effect("ttrl", seed=2)
def another_seed_draws_others(base, run):
    assert base.samples[0].tokens != run.samples[0].tokens
    trained = {group.prompt.id: group.trained for group in base.groups}
    assert trained != {group.prompt.id: group.trained for group in run.groups}


@effect("ttrl", clip_low=1.0, clip_high=math.inf)
def no_clip(base, run):
    assert run.metrics[-1]["clip_fraction"] == 0
    gradient_is_the_objectives(run)


@effect("ttrl", micro_tokens=10)
@effect("ttrl", micro_tokens=100000)
@effect("ttrl", gradient_checkpointing="on")
def the_same_gradient(base, run):
    assert relative_error(run.updates[0].gradient, base.updates[0].gradient) < 1e-4
    micros, usual = [update.micros for update in run.updates], base.updates[0].micros
    assert micros == [{100000: 1}.get(run.args.machine.micro_tokens, usual)] * 2 or (
        run.args.machine.micro_tokens == 10 and min(micros) > usual)
    for seen, recomputes in ((base, False), (run, run.args.machine.gradient_checkpointing == "on")):
        layers = seen.run.policy.model.model.layers  # these are what transformers asks
        assert [layer.training and layer.gradient_checkpointing for layer in layers] == [recomputes] * 3


@effect("ttrl", paper=False, dtype="bfloat16")
def half_precision(base, run):
    of = {True: torch.bfloat16, False: torch.float32}
    for seen in (base, run):
        dtype = of[seen is run]
        assert {p.dtype for p in seen.run.sampler.model.parameters()} == {dtype}
        assert {p.dtype for p in seen.run.reference.model.parameters()} == {dtype}
        assert {p.dtype for p in seen.run.policy.model.parameters()} == {torch.float32}  # master weights
    assert run.metrics[-1]["logp_diff_max"] > 1e-3 > base.metrics[-1]["logp_diff_max"]


@effect("ttrl", labels="gold")
@effect("evol_rl", labels="gold")
@effect("evol_rl", both=dict(novelty=False), labels="gold")
@effect("dynamic_rl", both=dict(dataset="problems.jsonl"), labels="gold")
def gold_answers_win(base, run):
    for group in run.groups:
        rewards = {True: [], False: []}
        for answer, reward in zip(answers_of(group), group.rewards):
            rewards[answer == group.prompt.answer].append(reward)
        assert min(rewards[True], default=1) > max(rewards[False], default=0)
    assert any(vote(answers_of(group)) != group.prompt.answer for group in base.groups)
    assert run.metrics[-1]["label_accuracy"] == 1 > base.metrics[-1]["label_accuracy"]


# The methods' own flags: rewards, labels and advantages are the papers' with them, see equations.py. Each of
# those that share a run would be missed there.
OWN_FLAGS = dict(
    evol_rl=[dict(novelty=False), dict(alpha=1.0)],
    scrl=[dict(tau_pos=0.6, tau_neg=0.125, lambda_h=0.0, null_reward=-3.0),
          dict(tau_marg=0.25, entropy_gate=False), dict(selective_positive=False, negatives=False),
          dict(dynamic_rewards=False)],
    restrain=[dict(label_weighting="majority"), dict(label_weighting="uniform", delta=0.25),
              dict(sigma=0.25, kappa=5)],
    ettrl=[dict(advantage="none"), dict(advantage="clip"), dict(both=dict(advantage="clip"), bound=0.25),
           dict(alpha=0.1, beta=0.05)],
    dynamic_rl=[dict(filter=False, tau=0.25), dict(rq=False), dict(rdq=False, rda=False),
                dict(lambda_q=0.1, lambda_dq=2.0, lambda_da=0.1, lambda_s=0.5)])


def another_gradient_of_the_same_responses(base, run):
    gradients_differ(base, run)
    assert [sample.tokens for sample in base.samples] == [sample.tokens for sample in run.samples]


for script, flags in [(script, flags) for script, rows in OWN_FLAGS.items() for flags in rows]:
    effect(script, **flags)(another_gradient_of_the_same_responses)


@effect("restrain", prompt_weighting="online")
@effect("restrain", prompt_weighting="none")
@effect("restrain", prompt_sigma=0.25)
def how_much_a_prompt_counts(base, run):
    """Not what its responses are worth. Only the offline weights need the base model's votes."""
    gradients_differ(base, run)
    assert advantages(base) == advantages(run)
    assert len(run.generated) == (2 if run.args.prompt_weighting == "offline" else 1)


# ETTRL
def forks_are_right(seen) -> None:
    """Algorithm 1: a trunk's N most surprising tokens (Eq. 4: most uncertain places) are drawn anew, never
    the end of the text. The leaves are the trunks, then what precedes a fork with each branch."""
    args, (trunks, branches) = seen.args, seen.samples
    model = model_with(seen, seen.weights[1])
    forks = {}
    for stem, limit, grown in zip(branches.prompts, branches.limits, branches.groups):
        problem, m, t = stem.id
        forks.setdefault((problem, m), []).append((t, stem.prompt_ids, limit, grown))
    for prompt, group in zip(trunks.prompts, trunks.groups):
        grafted = {}
        for m, trunk in enumerate(group):
            with torch.no_grad():
                rows = log_softmax_rows(model, trunk, args.temperature)
            scores = -rows[range(len(trunk.response_ids)), trunk.response_ids]
            if args.fork_score == "entropy":
                scores = -(rows.exp() * rows).sum(-1)
            candidates = range(len(trunk.response_ids) - trunk.finished)
            best = sorted(candidates, key=scores.tolist().__getitem__, reverse=True)[:args.forks]
            assert sorted(t for t, _, _, _ in forks[prompt.id, m]) == sorted(best)
            for t, stem_ids, limit, grown in forks[prompt.id, m]:
                assert stem_ids == trunk.prompt_ids + trunk.response_ids[:t]
                assert limit == args.max_new_tokens - t
                grafted[m, t] = [(trunk.response_ids[:t] + b.response_ids, b.finished) for b in grown]
        leaves = next(voted.responses for voted in seen.groups if voted.prompt is prompt)
        assert leaves[:args.trunks] == group and all(leaf.prompt_ids == prompt.prompt_ids for leaf in leaves)
        decode = seen.run.tokenizer.decode
        assert all(leaf.text == decode(leaf.response_ids, skip_special_tokens=True) for leaf in leaves)
        ours = [(leaf.response_ids, leaf.finished) for leaf in leaves[args.trunks:]]
        assert sorted(ours) == sorted(leaf for pair in grafted.values() for leaf in pair)


def test_trunks_fork_as_in_algorithm_1(watch):
    """Trunks may end, and the model answers what it will."""
    seen = watch("ettrl", answers=None, max_new_tokens=72, forks=2, micro_tokens=4000)
    assert any(trunk.finished for group in seen.samples[0].groups for trunk in group)
    forks_are_right(seen)


@effect("ettrl", rollout="parallel")
@effect("ettrl", trunks=2)
@effect("ettrl", forks=2)
@effect("ettrl", branches=1)
def leaves(base, run):
    args = run.args
    count = args.trunks * (1 + args.branches * args.forks) if args.rollout == "etmr" else args.votes
    assert {len(group.responses) for group in run.groups} == {count} != {len(base.groups[0].responses)}
    assert [sample.n for sample in run.samples[:1]] == [args.trunks if args.rollout == "etmr" else 8]
    if args.rollout == "parallel":
        assert len(run.samples) == 1 and "token_ratio" not in run.metrics[-1]
    else:
        branches = run.samples[1]
        assert len(branches.prompts) == 5 * args.trunks * args.forks and branches.n == args.branches
        generated = [len(r.response_ids) for sample in run.samples for r in sum(sample.groups, [])]
        trunks = generated[:5 * args.trunks]  # parallel responses would be as long
        assert run.metrics[-1]["token_ratio"] == pytest.approx(
            sum(generated) / (sum(trunks) * count / args.trunks), rel=1e-3)


@effect("ettrl", fork_score="entropy")
def forks_elsewhere(base, run):
    assert [p.id for p in base.samples[1].prompts] != [p.id for p in run.samples[1].prompts]
    forks_are_right(run)


# Dynamic RL. Shares that agree: 4/8, 3/8 (filtered), 2/8, 7/8, 8/8; labels 707, 101, 101, 101, 707.
def test_samples_hold_every_question_and_what_was_made_of_it(watch):
    """Each of the five is in samples.jsonl; the metrics are worked out by hand in test_dynamic_rl.py."""
    seen = watch("dynamic_rl")
    questions = written_questions(seen)
    logged = next(row["questions"] for row in read_lines(seen.out / "samples.jsonl") if "questions" in row)
    shares = [4 / 8, 3 / 8, 2 / 8, 7 / 8, 8 / 8]
    wanted = [(f"Question: {q.text}", q.response.advantage, p) for q, p in zip(questions, shares)]
    assert [(entry["text"], entry["advantage"], entry["p"]) for entry in logged] == wanted


@effect("dynamic_rl", paper=False, max_question_tokens=8)
def questions_are_cut_off(base, run):
    """Then none is found, and nothing is trained."""
    assert {len(tokens) for (tokens,) in run.samples[0].tokens} == {8} and run.samples[0].limits == [8] * 5
    assert run.metrics[-1]["no_question"] == 1 and not run.updates
    assert not {"loss", "length", "answered", "truncated"} & run.metrics[-1].keys()  # no false 0 in a curve


@pytest.mark.parametrize("script, both, flags, check, paper", EFFECTS)
def test_effect_of(script, both, flags, check, paper, watch):
    base, run = watch(script, **both), watch(script, **(both | flags))
    if paper:
        follows_the_paper(run)
    check(base, run)


# ------------------------------------------- flags that need a run of their own ----------------------------
def test_overlong_prompts_are_left_out_and_the_epochs_are_of_the_others(watch):
    """epochs x (problems // prompts_per_batch) steps, unless --steps says."""
    base = watch("ttrl", epochs=3, steps=1, prompts_per_batch=2, **TINY)
    lengths = sorted(len(problem.prompt_ids) for problem in base.run.problems)
    seen = watch("ttrl", epochs=3, steps=0, prompts_per_batch=2, max_prompt_tokens=lengths[2], **TINY)
    assert all(len(p.prompt_ids) <= lengths[2] for p in seen.run.problems)
    assert [line["step"] for line in seen.metrics] == [1, 2, 3] and len(base.metrics) == 1


EVALUATED = dict(TINY, eval="train", eval_samples=4, answers=None, noise=0)


@pytest.mark.parametrize("flags, expected", [
    (dict(eval_every=0), [0, 3]), (dict(eval_every=2), [0, 2, 3]), (dict(eval=""), []),
    (dict(eval_every=2, eval_start=False), [2, 3])])
def test_when_it_is_evaluated(flags, expected, watch):
    """At the start, every so many steps, and at the end; 'train' are the training problems."""
    seen = watch("ttrl", **EVALUATED | dict(steps=3) | flags)
    assert [line["step"] for line in seen.metrics if "eval/train/pass@1" in line] == expected


@pytest.mark.parametrize("flags", [
    dict(eval_samples=2, eval_greedy=True, eval_top_k=3, eval_top_p=0.9), dict(eval_temperature=0.0)])
def test_how_it_is_evaluated(flags, watch):
    """What the flags say reaches the sampler. What it makes of that: test_samplers.py."""
    seen = watch("ttrl", **EVALUATED | dict(max_new_tokens=24) | flags)
    args, (*greedy, sampled) = seen.args, seen.generated[:1 + seen.args.eval_greedy]
    samples = args.eval_samples if args.eval_temperature else 1
    given = (args.eval_temperature, args.eval_top_p, args.eval_top_k)
    assert [request.n for request in sampled.requests] == [samples] * 5
    assert (sampled.temperature, sampled.top_p, sampled.top_k) == given
    assert ("eval/train/greedy" in seen.metrics[0]) == args.eval_greedy == bool(greedy)
    for call in greedy:
        assert call.temperature == 0 and [request.n for request in call.requests] == [1] * 5


def test_checkpoints_are_kept(watch):
    """Every so many steps and at the end, the last ones."""
    seen = watch("ttrl", steps=5, checkpoint_every=2, keep_checkpoints=2, **TINY)
    names = [path.name for path in sorted((seen.out / "checkpoints").iterdir())]
    assert names == ["step_00000004", "step_00000005"]
    assert not (watch("ttrl", checkpoint_every=0, **TINY).out / "checkpoints").exists()


PAPERS = dict(  # not the toy's; where a paper says so: Args
    ttrl=dict(votes=64, train_samples=32, temperature=1.0, lr=5e-7, max_new_tokens=3072, clip_high=0.2),
    evol_rl=dict(votes=64, train_samples=32, temperature=1.0, lr=5e-7, max_new_tokens=12288, clip_high=0.28,
                 prompts_per_batch=8, num_minibatches=8, epochs=3, alpha=0.5, entropy_coef=0.003,
                 kl_coef=0.001, embedder="Qwen/Qwen3-Embedding-4B", eval_samples=32, eval_top_k=20),
    scrl=dict(votes=64, train_samples=32, temperature=0.6, lr=5e-7, max_new_tokens=3072, tau_pos=0.375,
              tau_marg=0.125, tau_neg=0.125, lambda_h=0.1),
    restrain=dict(votes=16, train_samples=16, temperature=1.0, lr=1e-6, max_new_tokens=4096, epochs=20,
                  kl_coef=0.001, entropy_coef=0.0, sigma=0.5, delta=1.0, kappa=3, prompt_sigma=0.5),
    ettrl=dict(votes=64, train_samples=32, temperature=0.6, lr=5e-7, max_new_tokens=3072, trunks=12, forks=2,
               branches=2, alpha=0.2, beta=0.2, bound=2.0),
    dynamic_rl=dict(votes=16, train_samples=16, prompts_per_batch=32, lr=1e-6, dataset="", tau=0.75,
                    lambda_q=1e-3, lambda_dq=0.1, lambda_da=1.0, lambda_s=1.0))


@each_script
def test_defaults_are_the_papers(script):
    args = vars(importlib.import_module(script).Args())
    assert args | PAPERS[script] == args


# --------------------------------- a wrong sign, clip or mean is seen by the quick tests --------------------
MUTANTS = dict(  # a piece of one of the script's lines, what it becomes
    ttrl=("(1 - args.clip_low, 1 + args.clip_high)", "(1 - args.clip_high, 1 + args.clip_low)"),
    evol_rl=("others.max(1)", "others.min(1)"),
    scrl=("-= args.lambda_h * (entropy - average)", "+= args.lambda_h * (entropy - average)"),
    restrain=("a_minus * torch.max(ratio, clipped)", "a_minus * torch.min(ratio, clipped)"),
    ettrl=("(average - entropies) / average", "(entropies - average) / average"),
    dynamic_rl=("len(minibatch) - n_questions", "len(minibatch) + n_questions"))


def red_scripts(folder) -> set[str]:
    """The scripts of which a quick test fails in a copy of the project."""
    nodes = [f"{script}.py" for script in MUTANTS] + ["tests/test_scripts.py"]
    command = [sys.executable, "-m", "pytest", "-m", "quick", "-rf", "-p", "no:cacheprovider", *nodes]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode < 2, done.stdout[-3000:] + done.stderr[-3000:]  # pytest itself went well
    failed = " ".join(re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE))
    return {script for script in MUTANTS if re.search(rf"\b{script}\b", failed)}


@pytest.mark.slow
def test_a_changed_line_is_seen(tmp_path):
    for name in ("answers", "engine", "tests", "toy"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path)
    assert red_scripts(tmp_path) == set()
    for script, (old, new) in MUTANTS.items():
        text = (ROOT / f"{script}.py").read_text()
        assert text.count(old) == 1, f"change it here, too: {old}"
        (tmp_path / f"{script}.py").write_text(text.replace(old, new))
    assert red_scripts(tmp_path) == set(MUTANTS)
