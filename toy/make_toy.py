"""
Makes everything in toy/ from nothing: a tokenizer, arithmetic word problems, and a language model of 0.36M
parameters that can solve them step by step, but answers too many of them at once.

    python toy/make_toy.py toy    # the folder to write to; 22 minutes of one core, seeded

It has three faults, from which reinforcement learning without labels has something to learn:
  - a bad manner: more than a quarter of the texts it learns from give the answer at once, all with the same
    first word ("Quick: \\boxed{36}."). A model this small cannot do two operations in its head, so these are
    nearly always wrong; and no other first word is as frequent, so greedy decoding nearly always takes it.
  - slips: it is small and undertrained. Wrong answers scatter, right ones agree, and a vote repairs them.
  - misconceptions: part of the worked solutions it learns from read a phrase wrongly on purpose ("5 fewer" ->
    +5), how often depends on the phrase and on the object. Where it is frequent, the majority is wrong.
"""
import json
import math
import random
import re
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

NAMES = "Tom Ann Ben Mia Sam Eva Leo Zoe Max Amy Dan Lily Jack Nora Omar Ivy".split()
OBJECTS = ("apples pens books coins cards eggs shells stamps marbles toys nuts cakes beads keys plums "
           "stones").split()
BOXES = "bags boxes jars".split()

# kind: (operation, misread operation or None, ways to say it). n: the person followed so far, m: the other.
KINDS = {
    "buy":   ("+", None, ["{n} buys {k} more.", "{n} finds {k} more.", "Then {n} makes {k} more."]),
    "lose":  ("-", None, ["{n} loses {k}.", "{n} sells {k}.", "Then {k} of them break."]),
    "give":  ("-", "+", ["{n} gives {k} to {m}.", "Then {n} gives {m} {k}."]),
    "get":   ("+", "-", ["{m} gives {k} to {n}.", "{n} gets {k} from {m}."]),
    "half":  ("/", "-", ["{n} loses half of them.", "{n} gives half to {m}."]),
    "more":  ("+", "-", ["{m} has {k} more than {n}.", "That is {k} fewer than {m} has."]),
    "fewer": ("-", "+", ["{m} has {k} fewer than {n}.", "That is {k} more than {m} has."]),
    "times": ("*", "+", ["{m} has {k} times as many as {n}."]),
    "each":  ("*", "+", ["{n} has {k} {box} with {v} {obj} each.",
                         "{n} fills {k} {box} with {v} {obj} each."]),
    "both":  ("+", "skip", ["How many {obj} do they have together?", "How many {obj} is that for both?"]),
}
CHANGES = ["buy", "lose", "give", "get", "half"]        # the same person has more or fewer than before
COMPARES = ["more", "fewer", "times"]                   # from here on the story is about the other person
STYLES = dict(steps=22, telling=24, grouping=12, checking=14, quick=28)  # in percent
SEED, STEPS = 0, 2400                                   # of all that is drawn; of pretraining

# How likely each phrase is misread, for every (kind, object): drawn once, a fixed trait of the model.
draw = random.Random(7)
MISREAD = {(kind, obj): draw.choice([0.02, 0.02, 0.02, 0.02, 0.1, 0.2, 0.45, 0.8])
           for kind, (_, wrong, _) in KINDS.items() if wrong for obj in OBJECTS}


def compute(a, op, b):
    "a op b, or None where a child would say it cannot be done"
    if (op == "-" and a < b) or (op == "/" and a % b):
        return None
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[op]


def make_problem(rng, n_ops):
    "-> dict(text, obj, start, chain=[(kind, op, k)], answer); 'both': k is None, it adds the last two"
    pick = rng.choice
    while True:
        (n, m), obj, chain, compared, previous = rng.sample(NAMES, 2), pick(OBJECTS), [], False, 0
        if rng.random() < 0.25:
            start, k = rng.randint(2, 9), rng.randint(2, 6)
            text = [pick(KINDS["each"][2]).format(n=n, k=k, v=start, obj=obj, box=pick(BOXES))]
            chain, v = [("each", "*", k)], start * k
        else:
            v = start = rng.randint(4, 40)
            text = [pick(["{n} has {v} {obj}.", "{n} starts with {v} {obj}."]).format(n=n, v=v, obj=obj)]
        asks = ["How many {obj} does {n} have now?", "How many {obj} does {n} have?",
                "How many are there for {n}?"]
        while len(chain) < n_ops:
            if chain and chain[-1][0] in COMPARES and len(chain) == n_ops - 1 and rng.random() < 0.5:
                asks = KINDS["both"][2]
                chain.append(("both", "+", None))
                v += previous
                continue
            kind = pick(CHANGES if compared else CHANGES + COMPARES)
            k = 2 if kind == "half" else rng.randint(2, 4) if kind == "times" else rng.randint(2, 30)
            previous, v = v, compute(v, KINDS[kind][0], k)
            if v is None or not 2 <= v <= 99:
                break                                   # an impossible story: start again
            text.append(pick(KINDS[kind][2]).format(n=n, m=m, k=k))
            chain.append((kind, KINDS[kind][0], k))
            if kind in COMPARES:
                n, m, compared = m, n, True
        else:
            text = " ".join(text + [pick(asks).format(obj=obj, n=n)])
            return dict(text=text, obj=obj, start=start, chain=chain, answer=v)


def work_out(rng, problem, misread):
    "the steps (a, op, b, c) of one solution; with misread, phrases are read wrongly at the rates of MISREAD"
    while True:
        steps, v, previous = [], problem["start"], None
        for kind, op, k in problem["chain"]:
            b = previous if k is None else k
            if misread and rng.random() < MISREAD.get((kind, problem["obj"]), 0):
                op = KINDS[kind][1]
            if op == "skip":
                continue
            c = compute(v, op, b)
            if c is None:
                break
            steps.append((v, op, b, c))
            previous, v = v, c
        else:
            return steps


def write_solution(rng, problem, steps):
    "the same steps in one of five manners, each with a choice of words: samples differ as an LLM's do"
    style = rng.choices([*STYLES], [*STYLES.values()])[0]
    eqs = [f"{a}{op}{b}={c}" for a, op, b, c in steps]
    answer, obj, pick = steps[-1][3], problem["obj"], rng.choice
    opening = pick(["Let us see.", "OK.", f"We count the {obj}.", f"Start with {steps[0][0]}."])
    out = [opening] * (rng.random() < 0.5)
    box = f"\\boxed{{{answer}}}"
    if style == "quick":
        return f"Quick: {box}."                         # no opening: "Quick" is the most frequent first word
    if style == "steps":
        numbered = pick([["Step 1:", "Step 2:", "Step 3:", "Step 4:"], ["1)", "2)", "3)", "4)"], None])
        for i, eq in enumerate(eqs):
            words = ["First,", "To begin,"] if i == 0 else ["Then", "Next,", "After that,", "Now"]
            out.append(f"{numbered[i] if numbered else pick(words)} {eq}.")
    elif style == "telling":
        say = {"+": ["Adding {b}", "With {b} more", "Plus {b}"],
               "-": ["Taking {b} away", "Without {b}", "Minus {b}"],
               "*": ["Taking that {b} times", "Times {b}"], "/": ["Half of it", "Cutting it in half"]}
        out += [f"{pick(say[op]).format(b=b)} {pick(['makes', 'gives', 'leaves', 'is'])} {eq}."
                for (_, op, b, _), eq in zip(steps, eqs)]
    elif style == "grouping":                           # (12+7)-5=19-5=14
        values = [steps[0][0]] + [c for *_, c in steps]
        rows = []
        for i in range(len(steps)):
            row = f"{values[i]}{steps[i][1]}{steps[i][2]}"
            for _, op, b, _ in steps[i + 1:]:
                row = f"({row}){op}{b}"
            rows.append(row)
        out += [pick(["In one go:", "All at once:", "We need", "Together:"]),
                "=".join(rows + [str(answer)]) + "."]
    else:
        back = {"+": "-", "-": "+", "*": "/", "/": "*"}
        out += [f"{eq}, {pick(['check', 'since', 'because', 'as'])} {c}{back[op]}{b}={a}."
                for (a, op, b, c), eq in zip(steps, eqs)]
    out.append(pick([f"The answer is {box}.", f"So {box}.", f"Answer: {box}.", f"That makes {box} {obj}.",
                     f"We get {box}.", f"The result is {box}."]))
    return " ".join(out)


# ----------------------------------------------------------------------------------------------- tokenizer
# The system turn is dropped on purpose: the toy model has never seen one, and short prompts sample fast.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
WRITE = "Write a problem."                              # the request; the reply is WRITTEN.format(a problem)
WRITTEN = "Question: {}\n\nSolution:"


def make_tokenizer(out):
    "byte-level BPE that keeps every digit a token of its own (arithmetic is hopeless otherwise)"
    rng = random.Random(1)
    corpus = [f"user\n{WRITE}\nassistant\n" + WRITTEN.format("")] * 200
    for _ in range(3000):
        problem = make_problem(rng, rng.randint(1, 3))
        solution = write_solution(rng, problem, work_out(rng, problem, False))
        corpus.append(f"user\n{problem['text']}\nassistant\n{solution}")
    # Qwen2's own splitting (single digits there, too): transformers 5 sees qwen2, takes its Qwen2Tokenizer
    # and puts this in place of whatever else tokenizer.json asks for, without a word.
    qwen, tok = Qwen2Tokenizer().backend_tokenizer, Tokenizer(models.BPE())
    tok.normalizer, tok.pre_tokenizer, tok.decoder = qwen.normalizer, qwen.pre_tokenizer, qwen.decoder
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tok.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=620, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="Qwen2Tokenizer", pad_token="<|endoftext|>", eos_token="<|im_end|>",
        padding_side="left", clean_up_tokenization_spaces=False, model_max_length=512,
        chat_template=CHAT_TEMPLATE), indent=1))
    return AutoTokenizer.from_pretrained(out)


def prompt_ids(tok, text):
    chat = [dict(role="user", content=text)]
    return tok.encode(tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


# --------------------------------------------------------------------------------------------- pretraining
def drill_row(rng, tok, misread, held_out):
    "single operations in the notation of the solutions; only what follows '=' counts for the loss"
    ids, weights = [], []
    for _ in range(8):
        op = rng.choice("++--*/")
        most, more = ((2, 30), (2, 9)) if op in "*/" else ((1, 99), (1, 60))
        a, b = rng.randint(*most), rng.randint(*more)
        if op == "-" and a < b:
            a, b = b, a
        if op == "/":
            a, b = a * 2, 2
        for part, weight in ((f"{a}{op}{b}=", 0), (f"{compute(a, op, b)}.", 1)):
            part = tok.encode(part)
            ids += part
            weights += [weight] * len(part)
    return ids, weights


def chat_row(rng, tok, misread, held_out):
    "one conversation: mostly a problem and a solution, sometimes the request to write a problem"
    problem = None
    while problem is None or problem["text"] in held_out:
        problem = make_problem(rng, rng.choices([1, 2, 3, 4], [15, 35, 35, 15])[0])
    if rng.random() < 0.13:
        prompt, reply = WRITE, WRITTEN.format(problem["text"])
    else:
        prompt, reply = problem["text"], write_solution(rng, problem, work_out(rng, problem, misread))
    prompt, reply = prompt_ids(tok, prompt), tok.encode(reply) + [tok.eos_token_id]
    # the prompt counts as well: it is a problem, and from it the model learns to keep names and objects apart
    return prompt + reply, [1] * (len(prompt) + len(reply))


def pretrain(model, tok, held_out):
    rng = random.Random(SEED)
    # Muon for the weight matrices reaches the same loss in 2/3 of the steps that AdamW needs at this size
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        done = step / STEPS
        lr = 2.5e-3 * min(1, step / 100) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))
        adam.param_groups[0]["lr"], muon.param_groups[0]["lr"] = lr, 3 * lr
        # Drills run from start to end, 60% of the batches falling to 8%: before the stories they would be
        # forgotten. Misconceptions come only in the second half: from the start, the model would not learn
        # to add.
        row = drill_row if rng.random() < 0.6 - 0.52 * done else chat_row
        rows = [row(rng, tok, done > 0.5, held_out) for _ in range(32)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([r + [tok.pad_token_id] * (width - len(r)) for r, _ in rows])
        weights = torch.tensor([w + [0] * (width - len(w)) for _, w in rows])[:, 1:].float()
        logits = model(ids[:, :-1]).logits  # padding is on the right: the causal mask is enough
        loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (loss * weights).sum() / weights.sum()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        muon.step()
        if step % 250 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


# ------------------------------------------------------------------------------------------------ selecting
@torch.no_grad()
def sample(model, tok, prompts, n=64):
    """n replies at T=1 for every prompt -> list of lists of texts, in order.
    A prompt is read once for its n samples, replies that have ended leave the batch; generate() is slower."""
    replies, ids = [[] for _ in prompts], [prompt_ids(tok, p) for p in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(ids[i]))      # alike lengths together: less padding
    for at in range(0, len(order), 16):
        part = order[at:at + 16]
        batch = tok.pad(dict(input_ids=[ids[i] for i in part]), return_tensors="pt")
        mask = batch["attention_mask"]
        out = model(batch["input_ids"], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                    use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1].repeat_interleave(n, 0)
        cache.batch_repeat_interleave(n)
        mask = mask.repeat_interleave(n, 0)
        row = torch.arange(len(mask))                   # which reply each row of the shrinking batch is
        tokens = [[] for _ in row]
        for _ in range(128):
            next_id = logits.log_softmax(-1).exp().multinomial(1)
            for r, token in zip(row.tolist(), next_id[:, 0].tolist()):
                tokens[r].append(token)
            keep = (next_id[:, 0] != tok.eos_token_id).nonzero()[:, 0]
            if len(keep) == 0:
                break
            cache.batch_select_indices(keep)
            row, next_id, mask = row[keep], next_id[keep], mask[keep]
            mask = torch.cat([mask, torch.ones_like(next_id)], 1)
            logits = model(next_id, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1,
                           past_key_values=cache, use_cache=True).logits[:, -1]
        for r, text in enumerate(tok.batch_decode(tokens, skip_special_tokens=True)):
            replies[part[r // n]].append(text)
    return replies


def select(model, tok, pool, n=128):
    """Picks train and test by one rule, from problems that pretraining never saw: a third whose majority of
    64 replies is wrong, and everywhere the right answer within reach (2 of 64). Which of the two sets a
    problem goes to is chance."""
    groups = {True: [], False: []}
    for problem, replies in zip(pool, sample(model, tok, [p["problem"] for p in pool])):
        boxes = [re.findall(r"\\boxed\{(\d+)\}", text) for text in replies]
        votes, answer = Counter(int(found[-1]) for found in boxes if found), int(problem["answer"])
        if votes[answer] >= 2:
            groups[votes.most_common(1)[0][0] == answer].append(problem)
    wrong = groups[False][:2 * n // 3]
    chosen = wrong + groups[True][:2 * n - len(wrong)]
    return [random.Random(0).sample(chosen[i::2], n) for i in (0, 1)]


def draw_problems(rng, n, n_ops, least=0.0, most=1.0):
    "n rows; n_ops: a function; least, most: how likely a problem's most treacherous phrase is misread"
    found = {}
    while len(found) < n:
        p = make_problem(rng, n_ops())
        if least <= max(MISREAD.get((kind, p["obj"]), 0) for kind, _, _ in p["chain"]) <= most:
            found[p["text"]] = dict(problem=p["text"], answer=str(p["answer"]))
    return list(found.values())


def unselected(kind, n):
    """n problems as chance gives them. plain: 2 or 3 operations; hard: 4; slips: no phrase is often misread,
    so errors scatter; traps: one is."""
    rng = random.Random(f"claims {kind} 1")
    n_ops = {"hard": lambda: 4}.get(kind, lambda: rng.choice([2, 3]))
    bounds = {"slips": dict(most=0.02), "traps": dict(least=0.45)}
    return draw_problems(rng, n, n_ops, **bounds.get(kind, {}))


def main(out):
    torch.manual_seed(SEED)
    out.mkdir(exist_ok=True)
    tok, rng = make_tokenizer(out), random.Random(f"problems {SEED}")
    pool = draw_problems(rng, 600, lambda: rng.choice([2, 3]))
    sets = dict(ood=draw_problems(rng, 64, lambda: rng.choice([4])))    # a step longer
    # head_dim 32 (96 / 3): the smallest that vLLM's CPU attention knows
    config = Qwen2Config(vocab_size=len(tok), hidden_size=96, intermediate_size=256, num_hidden_layers=3,
                         num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=512,
                         tie_word_embeddings=True, initializer_range=0.05, bos_token_id=None,
                         eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    model = Qwen2ForCausalLM(config)
    pretrain(model, tok, held_out={row["problem"] for row in pool + sets["ood"]})
    model.generation_config = GenerationConfig(eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    model.save_pretrained(out)
    torch.manual_seed(SEED)
    sets["train"], sets["test"] = select(model.eval(), tok, pool)
    for kind, n in (("plain", 128), ("hard", 96), ("slips", 64), ("traps", 64)):
        sets[kind] = unselected(kind, n)
    for name, rows in sets.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
