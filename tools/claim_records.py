"""The papers' claims as records, each written before its runs: what is compared, how, and on which seeds.

Reported seeds are 1 to 8; 11 to 18 are run once, later, and stand in a column of their own. Settings were
chosen on development seeds, 101 and above, and in the trial that docs/claims.md names. Both arms of a claim
have the same regime, the learning rate included, and differ by the script or by one switch; "start" is the
first arm's own initial model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

DEVELOPMENT = 101  # the first development seed
SAME = "--kl_coef 0 --temperature 1 --prompt system --eval_every 0 --checkpoint_every 0"
GROUP8 = f"{SAME} --eval train --votes 8 --train_samples 8 --num_minibatches 1"
GROUP16 = f"{SAME} --eval train --votes 16 --train_samples 16 --prompts_per_batch 8 --num_minibatches 2"
QUESTIONS = "--prompts_per_batch 32 --votes 4 --train_samples 4 --lr 1e-3 --steps 30 --eval_samples 8"
REGIMES = {
    # 96 problems of 4 operations, few votes, a large rate: a stress test in which runs fall within 15 steps
    "HARD8": f"--dataset toy/hard.jsonl --lr 1e-3 --steps 15 --prompts_per_batch 8 --eval_samples 4 {GROUP8}",
    # the same labels, more prompts a step, a lower rate with a warm-up, 80 steps: runs that learn first
    "LONG8": "--dataset toy/hard.jsonl --lr 7e-4 --warmup 0.2 --steps 80 --prompts_per_batch 20 "
             f"--eval_samples 8 {GROUP8}",
    # 16 votes and a larger rate: TTRL rises, then loses some of its gain on the development seeds
    "LONG16": "--dataset toy/hard.jsonl --lr 1e-3 --steps 60 --prompts_per_batch 20 --num_minibatches 1 "
              f"--votes 16 --train_samples 16 --eval_samples 8 --eval train {SAME}",
    # hundreds of steps at a lower rate; one vote of 12 is rare enough for SCRL's negative labels
    "LONG12": "--dataset toy/hard.jsonl --lr 5e-4 --warmup 0.1 --steps 200 --prompts_per_batch 20 "
              f"--num_minibatches 1 --votes 12 --train_samples 12 --eval_samples 8 --eval train {SAME}",
    # 4 operations, 16 votes: the least number of votes at which SCRL has negative labels is 9
    "HARD16": f"--dataset toy/hard.jsonl --lr 5e-4 --steps 20 --eval_samples 8 {GROUP16}",
    # 128 problems of 2 or 3 operations at the toy's own rate
    "PLAIN": f"--dataset toy/plain.jsonl --lr 5e-4 --steps 30 --eval_samples 16 {GROUP16}",
    # the same for ten times as long
    "PLAIN300": f"--dataset toy/plain.jsonl --lr 5e-4 --steps 300 --eval_samples 16 {GROUP16}",
    # 64 of 2 or 3 whose errors are slips
    "SLIPS": f"--dataset toy/slips.jsonl --lr 5e-4 --steps 40 --eval_samples 16 {GROUP16}",
    # a start model of half the pretraining, right on 8% of PLAIN's problems, and more votes
    "WEAK": "--model runs/weak --sampler hf --max_prompt_tokens 128 --max_new_tokens 128 --micro_tokens 2048 "
            "--dataset toy/plain.jsonl --lr 2e-4 --warmup 0.1 --steps 60 --prompts_per_batch 16 --votes 32 "
            "--train_samples 16 --num_minibatches 2 --eval train --eval_samples 16 --eval_temperature 1 "
            f"--eval_top_p 1 {SAME}",
    # SmolLM2-135M, each problem once, at four times its usual rate: one run lost its good labels at that rate
    "REAL": "--model smollm2 --dtype bfloat16 --lr 4e-5 --steps 12 --prompts_per_batch 4 --eval smollm2 "
            "--eval_samples 8 --eval_every 0 --no-eval_start --checkpoint_every 0",
    # no training (rate 0): only the votes of eight times 8 prompts
    "TREE": "--dataset toy/hard.jsonl --lr 0 --steps 8 --prompts_per_batch 8 --train_samples 1 "
            f"--num_minibatches 1 {SAME} --eval=",
    # Dynamic RL; the question rewards weigh 10 each, so that 30 steps show what thousands do in the paper
    "DYN": f"{QUESTIONS} --lambda_q 10 --lambda_dq 10 --lambda_da 10 --eval toy/plain.jsonl {SAME}"}
# of a run, on an idle core
MINUTES = dict(HARD8=.3, LONG8=2.9, LONG16=2.7, LONG12=6.8, HARD16=.7, PLAIN=.8, PLAIN300=8, SLIPS=1.0,
               WEAK=2.7, REAL=9, TREE=.3, DYN=.9)
VOTES = "VOTES"  # no training: the unit is the problem, 64 responses each of the initial model to HARD's 96


@dataclass(frozen=True)
class Claim:
    id: str
    says: str
    place: str
    arms: tuple[str, str] = ("", "")  # commands; "start"; a number; of VOTES: two measures (tools/claims.py)
    regime: str = ""                  # empty: not testable here
    metric: str = ""                  # how to read it: tools.claims.value
    direction: int = 1                # of first arm minus second, as the paper has it
    margin: float = 0.0               # what the mean must exceed, in the metric's unit
    note: str = ""                    # why it cannot be tested here, or what one must know
    seeds: tuple[int, ...] = tuple(range(1, 9))
    held_out: tuple[int, ...] = tuple(range(11, 19))


# five and six reported seeds, none held out: claims of less weight, and claims whose runs take minutes
few = partial(Claim, seeds=(1, 2, 3, 4, 5), held_out=())
slow = partial(Claim, seeds=(1, 2, 3, 4, 5, 6), held_out=())
EVOL = "evol_rl.py --embedder words --eval_top_k 0"
TREE20, PARALLEL = "ettrl.py --trunks 4", "ettrl.py --rollout parallel"
# about 3/16 of the votes, as in the paper
KAPPA8, KAPPA16, KAPPA32 = "restrain.py --kappa 2", "restrain.py --kappa 3", "restrain.py --kappa 6"
PAPERS = "dynamic_rl.py --lambda_q 0.001 --lambda_dq 0.1 --lambda_da 1"  # the paper's weights
END1, END8, END16 = "end eval/train/pass@1", "end eval/train/pass@8", "end eval/train/pass@16"
ENDPLAIN = "end eval/toy/plain.jsonl/pass@1"
GAIN = .05
MAKE_WEAK = "First make the start model: `python toy/make_toy.py --out runs/weak --steps 1200 --model_only`."
CLAIMS = [
    # ------------------------------------------------ TTRL ------------------------------------------------
    Claim("T1", "Majority labels alone raise pass@1.", "TTRL, Table 1",
          ("ttrl.py", "start"), "PLAIN", END1, +1, GAIN),
    Claim("T2", "The model ends above the majority vote of its start, the ceiling of self-training.",
          "TTRL, section 4.1", ("ttrl.py", "start eval/train/maj@16"), "SLIPS", END1),
    Claim("T3", "Lucky hit: rewards are right far more often than the labels they come from.",
          "TTRL, section 4.2", ("reward right", "right"), VOTES, "", +1, GAIN),
    Claim("T4", "On hard problems majority labels end below gold labels, all else equal.",
          "TTRL, section 4.3", ("ttrl.py --labels gold", "ttrl.py"), "HARD8", END1, +1, GAIN),
    Claim("T4b", "There the model ends below its start.", "TTRL, section 4.3",
          ("ttrl.py", "start"), "HARD8", END1, -1, GAIN),
    # ----------------------------------------------- EVOL-RL ----------------------------------------------
    Claim("E1a", "With majority labels only, pass@n falls.", "EVOL-RL, section 2.3, Figure 1",
          ("ttrl.py", "start"), "PLAIN", END16, -1, GAIN),
    Claim("E1b", "With majority labels only, the entropy of the policy falls.", "EVOL-RL, Figure 1",
          ("ttrl.py", "start"), "PLAIN", "last entropy", -1, .02),
    Claim("E1c", "With majority labels only, responses become shorter.", "EVOL-RL, Figure 1",
          ("ttrl.py", "start"), "PLAIN", "last length", -1, 1.0,
          "The toy's short manner, an answer without working, is also its worst."),
    Claim("E2a", "EVOL-RL keeps more entropy than TTRL.", "EVOL-RL, section 3.4, Figure 3",
          (EVOL, "ttrl.py"), "PLAIN", "last entropy", +1, .02),
    Claim("E2b", "EVOL-RL keeps more pass@n than TTRL.", "EVOL-RL, section 3.2, Table 1",
          (EVOL, "ttrl.py"), "PLAIN", END16, +1, .02),
    Claim("E2c", "EVOL-RL keeps more different answers than TTRL.", "EVOL-RL, section 3.4",
          (EVOL, "ttrl.py"), "PLAIN", "last distinct_answers", +1, .2),
    Claim("E3a", "The novelty reward matters: without it pass@n is lower.", "EVOL-RL, Table 2",
          (EVOL, f"{EVOL} --no-novelty"), "PLAIN", END16, +1, .02),
    Claim("E3b", "The novelty reward keeps entropy.", "EVOL-RL, Table 2",
          (EVOL, f"{EVOL} --no-novelty"), "PLAIN", "last entropy", +1, .02),
    few("E3c", "The wider clip matters: without it pass@n is lower.", "EVOL-RL, Table 2",
        (EVOL, f"{EVOL} --clip_high 0.2"), "PLAIN", END16, +1, .02),
    few("E3d", "The entropy bonus matters: without it pass@n is lower.", "EVOL-RL, Table 2",
        (EVOL, f"{EVOL} --entropy_coef 0"), "PLAIN", END16, +1, .02),
    few("E4", "EVOL-RL first collapses as TTRL does, then recovers: its entropy rises again.",
        "EVOL-RL, section 3.4", (EVOL, "0"), "PLAIN300", "late entropy", +1, .02),
    Claim("E5", "EVOL-RL's majorities end above TTRL's plateau.", "EVOL-RL, B.1, Figure 5",
          (EVOL, "ttrl.py"), "PLAIN", "last majority_accuracy", +1, .02),
    few("E6", "Novelty helps with gold labels, too.", "EVOL-RL, section 3.5, Figure 4",
        (f"{EVOL} --labels gold", f"{EVOL} --labels gold --no-novelty"), "HARD16", END8, +1, .02),
    # ------------------------------------------------ SCRL ------------------------------------------------
    Claim("S1", "Where few votes agree, the majority is often wrong.", "SCRL, section 3.2",
          ("right | clear", "right | unclear"), VOTES, "", +1, GAIN),
    Claim("S1b", "And just there GRPO pays its responses most: wrong majorities get the larger advantage.",
          "SCRL, section 3.2, Eq. 3", ("advantage | wrong", "advantage | right"), VOTES, "", +1, .1),
    Claim("S2", "Selective labels are right more often than majorities.", "SCRL, section 5.2, Figure 3a",
          ("right | positive", "right"), VOTES, "", +1, GAIN),
    Claim("S3a", "The entropy gate makes negative labels more accurate.", "SCRL, section 3.3, Figure 3b",
          ("negative right", "ungated right"), VOTES),
    Claim("S3b", "The entropy gate spares right answers that are rare.", "SCRL, section 3.3, Table 3",
          ("gold ungated", "gold negative"), VOTES, "", +1, .02),
    Claim("S3c", "Wrong responses have more entropy than right ones.", "SCRL, Table 8",
          ("entropy wrong", "entropy right"), VOTES, "", +1, .02),
    Claim("S4a", "SCRL ends above TTRL on hard problems with few votes.", "SCRL, section 4.2, Table 1",
          ("scrl.py", "ttrl.py"), "HARD8", END1, +1, GAIN),
    slow("S4b", "SCRL ends above TTRL on hard problems, in slower and longer runs.", "SCRL, Table 1",
         ("scrl.py", "ttrl.py"), "LONG8", END1, +1, GAIN),
    slow("S4c", "SCRL falls later than TTRL, or not at all.", "SCRL, section 5",
         ("scrl.py", "ttrl.py"), "LONG8", "collapse", +1, 5.0),
    slow("S4d", "SCRL keeps what it gained; TTRL loses more of it.", "SCRL, section 5",
         ("scrl.py", "ttrl.py"), "LONG8", "kept", +1, .02),
    few("S4e", "SCRL ends above TTRL, with 16 votes.", "SCRL, Table 1",
        ("scrl.py", "ttrl.py"), "LONG16", END1, +1, GAIN),
    few("S4f", "SCRL keeps what it gained; TTRL loses more of it, with 16 votes.", "SCRL, section 5",
        ("scrl.py", "ttrl.py"), "LONG16", "kept", +1, .02),
    few("S4g", "SCRL ends above TTRL after 200 steps at a lower rate.", "SCRL, Table 1",
        ("scrl.py", "ttrl.py"), "LONG12", END1, +1, GAIN),
    few("S4h", "SCRL ends above TTRL from a weaker start model.", "SCRL, Table 1",
        ("scrl.py", "ttrl.py"), "WEAK", END1, +1, .02, MAKE_WEAK),
    few("S4i", "SCRL ends above TTRL on real weights, at a large rate.", "SCRL, Table 1",
        ("scrl.py", "ttrl.py"), "REAL", "end eval/smollm2/pass@1", +1, GAIN),
    few("S5a", "Abstaining matters: with every majority as a label SCRL ends lower.", "SCRL, Table 3",
        ("scrl.py", "scrl.py --no-selective_positive"), "HARD16", END1, +1, .02),
    few("S5b", "Negative labels matter: without them SCRL ends lower.", "SCRL, Table 3",
        ("scrl.py", "scrl.py --no-negatives"), "HARD16", END1, +1, .02),
    few("S5c", "The entropy gate matters: without it SCRL ends lower.", "SCRL, Table 3",
        ("scrl.py", "scrl.py --no-entropy_gate"), "HARD16", END1, +1, .02),
    few("S5d", "Dynamic rewards matter: with hard ones SCRL ends lower.", "SCRL, Table 3",
        ("scrl.py", "scrl.py --no-dynamic_rewards"), "HARD16", END1, +1, .02),
    few("S6", "More prompts get a label as training goes on.", "SCRL, Figure 3",
        ("scrl.py", "start"), "HARD16", "last label_coverage", +1, .05),
    # ---------------------------------------------- RESTRAIN ----------------------------------------------
    Claim("R1a", "The right answer is often among the responses where the majority is wrong.",
          "RESTRAIN, section 2, Figure 2", ("seen", "right"), VOTES, "", +1, GAIN),
    Claim("R1b", "Majorities of few votes are seldom right.", "RESTRAIN, Figure 2",
          ("right | many", "right | few"), VOTES, "", +1, GAIN),
    Claim("R2a", "RESTRAIN ends above TTRL where TTRL falls.", "RESTRAIN, section 4, Figure 4",
          (KAPPA8, "ttrl.py"), "HARD8", END1, +1, GAIN),
    slow("R2b", "RESTRAIN ends above TTRL, in slower and longer runs.", "RESTRAIN, section 4, Figure 4",
         (KAPPA8, "ttrl.py"), "LONG8", END1, +1, GAIN),
    slow("R2c", "RESTRAIN falls later than TTRL, or not at all.", "RESTRAIN, Figure 4",
         (KAPPA8, "ttrl.py"), "LONG8", "collapse", +1, 5.0),
    slow("R2d", "RESTRAIN keeps what it gained; TTRL loses more of it.", "RESTRAIN, Figure 4",
         (KAPPA8, "ttrl.py"), "LONG8", "kept", +1, .02),
    few("R2e", "RESTRAIN ends above TTRL, with 16 votes.", "RESTRAIN, section 4, Figure 4",
        (KAPPA16, "ttrl.py"), "LONG16", END1, +1, GAIN),
    few("R2f", "RESTRAIN keeps what it gained; TTRL loses more of it, with 16 votes.", "RESTRAIN, Figure 4",
        (KAPPA16, "ttrl.py"), "LONG16", "kept", +1, .02),
    few("R2g", "RESTRAIN ends above TTRL after 200 steps at a lower rate.", "RESTRAIN, section 4, Figure 4",
        (KAPPA8, "ttrl.py"), "LONG12", END1, +1, GAIN),
    few("R2h", "RESTRAIN ends above TTRL from a weaker start model.", "RESTRAIN, section 4, Figure 4",
        (KAPPA32, "ttrl.py"), "WEAK", END1, +1, .02, MAKE_WEAK),
    few("R2i", "RESTRAIN ends above TTRL on real weights, at a large rate.", "RESTRAIN, section 4, Figure 4",
        ("restrain.py", "ttrl.py"), "REAL", "end eval/smollm2/pass@1", +1, GAIN,
        held_out=(11, 12, 13, 14, 15)),
    few("R3a", "Without soft labels, all weight on the majority, RESTRAIN ends lower.", "RESTRAIN, Figure 5a",
        (KAPPA16, f"{KAPPA16} --label_weighting majority"), "HARD16", END1, +1, .02),
    few("R3b", "With equal weights for all labels RESTRAIN ends lower.", "RESTRAIN, Table 8",
        (KAPPA16, f"{KAPPA16} --label_weighting uniform"), "HARD16", END1, +1, .02),
    few("R4", "The penalty on prompts with few agreeing votes helps.", "RESTRAIN, Table 4, Figure 6",
        (KAPPA16, "restrain.py --kappa 0"), "HARD16", END1, +1, .02),
    few("R5a", "Prompt weights from the initial model's votes are better than from the current ones.",
        "RESTRAIN, Appendix E, Figure 8", (KAPPA16, f"{KAPPA16} --prompt_weighting online"), "HARD16", END1,
        +1, .02, "The paper's difference appears after hundreds of steps."),
    few("R5b", "Prompt weights from the initial model are better than none.", "RESTRAIN, Table 4, Figure 8",
        (KAPPA16, f"{KAPPA16} --prompt_weighting none"), "HARD16", END1, +1, .02),
    few("R6", "RESTRAIN raises the majority vote itself.", "RESTRAIN, Appendix H",
        (KAPPA16, "start"), "PLAIN", "end eval/train/maj@16", +1, .02),
    # ------------------------------------------------ ETTRL -----------------------------------------------
    few("ET1a", "A tree costs fewer tokens than as many separate responses.", "ETTRL, section 3.2",
        (TREE20, "1"), "TREE", "mean token_ratio", -1, .05),
    few("ET1b", "A tree costs 60% of the tokens or less (tested: less than 65%).", "ETTRL, Eq. 9 to 11",
        (TREE20, "0.65"), "TREE", "mean token_ratio", -1),
    few("ET2", "At equal or better quality (tested: pass@1 above parallel sampling's minus .02).",
        "ETTRL, Table 1", (TREE20, "ettrl.py --rollout parallel --votes 20"), "PLAIN", END1, +1, -.02),
    few("ET3", "A tree's labels are right more often than those of as many separate responses.",
        "ETTRL, section 5.1", (TREE20, "ettrl.py --rollout parallel --votes 20"), "TREE",
        "mean majority_accuracy"),
    Claim("ET4", "Early on, few votes agree where labels are wrong: they get the larger advantage.",
          "ETTRL, section 3.3, Figure 3", ("share | right", "share | wrong"), VOTES, "", +1, GAIN),
    Claim("ET5a", "EAR damps the responses of wrong majorities.", "ETTRL, section 3.3, Eq. 14",
          ("factor | wrong", "1"), VOTES, "", -1),
    Claim("ET5b", "EAR scales right majorities up more than wrong ones.", "ETTRL, section 3.3",
          ("factor | right", "factor | wrong"), VOTES),
    few("ET5c", "EAR ends with a higher pass@1.", "ETTRL, Table 2",
        (f"{PARALLEL} --advantage res", f"{PARALLEL} --advantage none"), "PLAIN", END1, +1, .02),
    # --------------------------------------------- Dynamic RL ---------------------------------------------
    few("D1", "The model improves on its own questions, without any data.", "Dynamic RL, Table 1",
        (PAPERS, "start"), "DYN", ENDPLAIN, +1, .02),
    few("D2", "Without the question diversity reward the questions become alike.",
        "Dynamic RL, section 2, Figure 5", ("dynamic_rl.py", "dynamic_rl.py --no-rdq"), "DYN",
        "last question_entropy", +1, .02),
    few("D3", "Without the answer diversity reward the answers become one.", "Dynamic RL, Figure 6",
        ("dynamic_rl.py", "dynamic_rl.py --no-rda"), "DYN", "last unique_answers", +1, .02),
    few("D4", "The question reward keeps questions from becoming unanimous.",
        "Dynamic RL, section 3.4, Figure 3", ("dynamic_rl.py --no-rq", "dynamic_rl.py"), "DYN",
        "last unanimous", +1, .02),
    few("D5", "Filtering questions helps.", "Dynamic RL, Table 2",
        (PAPERS, f"{PAPERS} --no-filter"), "DYN", ENDPLAIN, +1, .02,
        "The toy seldom writes what the filter removes: 1 to 3% of its questions."),
    # -------------------------------------- two syntheses of the field ------------------------------------
    slow("Y1", "Training on the model's own labels rises, then falls.", "arXiv:2603.08660",
         ("ttrl.py", "0"), "LONG8", "late batch_pass@1", -1, .02),
    Claim("Y2", "It sharpens what the start model prefers: problems with a right majority gain more.",
          "arXiv:2603.08660", ("ttrl.py", "0"), "PLAIN", "sharpening", +1, GAIN),
    Claim("Y3", "The step of the collapse tells how well a start model can be trained.", "arXiv:2603.08660",
          note="It takes many start models, and runs that fall from each."),
    few("Y4", "Weaker start models end below their start.", "arXiv:2511.04902",
        ("ttrl.py", "start"), "WEAK", END1, -1, .02, MAKE_WEAK),
    few("Y5", "Leaving out prompts without a clear majority helps.", "arXiv:2511.04902",
        ("scrl.py --no-negatives", "scrl.py --no-negatives --no-selective_positive"), "HARD16", END1, +1,
        .02)]
