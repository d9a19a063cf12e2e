"""Exercise 3: SCRL's labels (SCRL Eq. 4, 7 and 8).

A weak majority is no label, and a rare answer that was given with high entropy is a negative one. Answer j
has n_j of the N votes, so the share p_j = n_j / N. A response without an answer, None, counts in N, but is no
answer. H_j is the mean entropy of the responses with answer j, H_bar the mean over all N responses.

    positive   the top answer (of equals the one seen first) if its share p >= tau_pos and
               p - (the second share) > tau_marg, else None
    negative   {j : p_j < tau_neg and H_j >= H_bar}, without the positive label

Worked example, tau_pos = 3/8, tau_marg = tau_neg = 1/8: N = 9, answers [0] * 7 + [1, 2], entropies [0.3] * 7
+ [0.9, 0.2]. Answer 0 has the share 0.78 and leads by 0.67: it is the positive label. H_bar = 0.356, and 1
and 2 have the share 0.11 each. Answer 1 was given with entropy 0.9, more than H_bar, answer 2 with 0.2, less:
(0, {1}).
"""


def pseudo_labels(classes: list[int | None], entropies: list[float], args) -> tuple[int | None, set[int]]:
    """(the positive label or None, the negative labels) of the classes [N] and the entropies [N]. The
    thresholds are args.tau_pos, args.tau_marg and args.tau_neg."""
    raise NotImplementedError
