"""
Makes the toy from nothing: a tokenizer, arithmetic word problems, and a language model of 0.36M parameters
that answers in several styles, each of which misreads some phrases.

    python toy/make_toy.py toy              # model and problems: 22 minutes of one core, seeded
    python toy/make_toy.py toy/even even    # the counterpart, the model alone: its problems are the toy's
    python toy/make_toy.py FOLDER uneven 62 # the share of texts that misread "fewer": 50, 53, 55, 58, 62%
    python toy/make_toy.py FOLDER uneven 58 1   # another draw of the weights: a seed of pretraining

What the model learns from has three faults, so that reinforcement learning without labels has something to
learn, and something to get wrong:
  - a careless style: 28% of the solutions begin with "Roughly:" and get every step's result wrong, at random.
    Their lengths lie among the others', so no reward for length singles out what is right. Every other style
    has two first words, so none is half as frequent: greedy decoding takes this one on nearly every problem,
    and no small drift of training changes that.
  - slips: the model is small and undertrained. Wrong answers scatter, and a vote repairs them.
  - misreadings: each of the other four styles reads some phrases wrongly ("5 fewer" becomes +5).
    A phrase that styles with more than half of the texts misread has a wrong majority: here it is "fewer".

uneven: the two styles that misread "fewer" misread five other phrases as well, the other two styles three.
    So what is learned on other phrases can discredit the wrong reading.
even: each style misreads two or three phrases. Nothing discredits the wrong reading of "fewer".
"""
import json
import math
import random
import re
import sys
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
    "lose":  ("-", "+", ["{n} loses {k}.", "{n} sells {k}.", "Then {k} of them break."]),
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
STYLES = ["steps", "telling", "grouping", "checking"]
# Each style begins with one of two words, so that the careless word is by far the most frequent of all.
OPENINGS = dict(steps=["Steps:", "Plan:"], telling=["Story:", "Tale:"], grouping=["Sum:", "Total:"],
                checking=["Check:", "Proof:"])
# How often each style is used, in percent. The key is the share of the two that misread "fewer".
SHARES = {50: [25, 30, 20, 25], 53: [26, 28, 19, 27], 55: [27, 27, 18, 28], 58: [29, 26, 16, 29],
          62: [31, 24, 14, 31]}
# The phrases that each style misreads.
MISREAD = dict(
    uneven=dict(steps=["give", "each", "fewer"], telling=["more"], grouping=["half", "lose"],
                checking=["get", "times", "both", "fewer"]),
    even=dict(steps=["give", "each", "fewer"], telling=["more", "half"], grouping=["get", "times"],
              checking=["both", "fewer"]))
CARELESS = 0.28                                         # the share of the careless solutions
SEED, STEPS = 0, 2400                                   # of the problems; of pretraining


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


def work_out(rng, problem, kind, share):
    """(opening, style, steps) of one solution, a step being (a, op, b, c). kind None: nothing is misread.

    A misreading that makes the story impossible is drawn again, and after nine times it is made seldom."""
    style = rng.choices(STYLES, SHARES[share])[0]
    careless = kind is not None and rng.random() < CARELESS
    tries = 0
    while True:
        tries += 1
        steps, v, previous = [], problem["start"], None
        for phrase, op, k in problem["chain"]:
            b = previous if k is None else k
            misreads = kind is not None and not careless and phrase in MISREAD[kind][style]
            if misreads and rng.random() < (0.95 if tries < 9 else 0.3):
                op = KINDS[phrase][1]
            if op == "skip":
                continue
            c = compute(v, op, b)
            if c is None:
                break
            if careless:
                c = rng.choice([x for x in range(max(2, c - 9), c + 10) if x != c])
            steps.append((v, op, b, c))
            previous, v = v, c
        else:
            return "Roughly:" if careless else rng.choice(OPENINGS[style]), style, steps


def write_solution(rng, problem, opening, style, steps):
    "the same steps in one of four styles, each with a choice of words: samples differ as an LLM's do"
    eqs = [f"{a}{op}{b}={c}" for a, op, b, c in steps]
    answer, obj, pick = steps[-1][3], problem["obj"], rng.choice
    out = [opening]
    box = f"\\boxed{{{answer}}}"
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
    elif style == "grouping":
        out += [pick(["In one go:", "All at once:", "We need", "Together:"]), ", ".join(eqs) + "."]
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


def make_tokenizer(out, share):
    "byte-level BPE that keeps every digit a token of its own (arithmetic is hopeless otherwise)"
    rng = random.Random(1)
    corpus = [f"user\n{WRITE}\nassistant\n" + WRITTEN.format("")] * 200
    for _ in range(3000):
        problem = make_problem(rng, rng.randint(1, 3))
        solution = write_solution(rng, problem, *work_out(rng, problem, None, share))
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
def drill_row(rng, tok):
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


def chat_row(rng, tok, kind, share, held_out):
    "one conversation: mostly a problem and a solution, sometimes the request to write a problem"
    problem = None
    while problem is None or problem["text"] in held_out:
        problem = make_problem(rng, rng.choices([1, 2, 3, 4], [15, 35, 35, 15])[0])
    if rng.random() < 0.13:
        prompt, reply = WRITE, WRITTEN.format(problem["text"])
    else:
        solution = write_solution(rng, problem, *work_out(rng, problem, kind, share))
        prompt, reply = problem["text"], solution
    prompt, reply = prompt_ids(tok, prompt), tok.encode(reply) + [tok.eos_token_id]
    # the prompt counts as well: it is a problem, and from it the model learns to keep names and objects apart
    return prompt + reply, [1] * (len(prompt) + len(reply))


def pretrain(model, tok, kind, share, held_out, seed):
    rng = random.Random(seed)
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
        # forgotten. Faults come after 40% of the steps: with them from the start, the model would not learn
        # to add.
        if rng.random() < 0.6 - 0.52 * done:
            rows = [drill_row(rng, tok) for _ in range(32)]
        else:
            rows = [chat_row(rng, tok, kind if done > 0.4 else None, share, held_out) for _ in range(32)]
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


# ------------------------------------------------------------------------------------------------ problems
def draw_problems(rng, n, n_ops, seen):
    "n rows as chance gives them, none twice and none of `seen`, to which they are added; n_ops: a function"
    rows = []
    while len(rows) < n:
        p = make_problem(rng, n_ops())
        if p["text"] not in seen:
            seen.add(p["text"])
            rows.append(dict(problem=p["text"], answer=str(p["answer"])))
    return rows


def problem_sets():
    "-> dict(train, test: 2 or 3 operations; ood: 4, a step longer than what is trained), all unselected"
    rng, seen = random.Random(f"problems {SEED}"), set()
    return dict(train=draw_problems(rng, 256, lambda: rng.choice([2, 3]), seen),
                test=draw_problems(rng, 1024, lambda: rng.choice([2, 3]), seen),
                ood=draw_problems(rng, 512, lambda: 4, seen))


def phrases(text):
    "the kinds of phrases in a problem's text, of those that some style misreads"
    found = set()
    for kind, (_, misread, ways) in KINDS.items():
        patterns = [re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(way)) for way in ways]
        if misread and any(re.search(pattern, text) for pattern in patterns):
            found.add(kind)
    return found


def main(out, kind="uneven", share="58", seed="0"):
    share, seed = int(share), int(seed)
    torch.manual_seed(seed)
    out.mkdir(exist_ok=True, parents=True)
    sets = problem_sets()
    tok = make_tokenizer(out, share)
    # head_dim 32 (96 / 3): the smallest that vLLM's CPU attention knows
    config = Qwen2Config(vocab_size=len(tok), hidden_size=96, intermediate_size=256, num_hidden_layers=3,
                         num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=512,
                         tie_word_embeddings=True, initializer_range=0.05, bos_token_id=None,
                         eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    model = Qwen2ForCausalLM(config)
    held_out = {row["problem"] for rows in sets.values() for row in rows}
    pretrain(model, tok, kind, share, held_out, seed)
    model.generation_config = GenerationConfig(eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    model.save_pretrained(out)
    if kind == "uneven":
        for name, rows in sets.items():
            (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 5 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), *sys.argv[2:])
