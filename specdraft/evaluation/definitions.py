"""What every figure of a report means: each stands in the report itself, under the name that its tables use."""

DEFINITIONS: dict[str, str] = {
    "interval": (
        "95 % interval in brackets: percentile bootstrap over prompts (whole prompts are drawn with replacement, all "
        "turns of a conversation together; for speed, whole batches, each with its plain twin). Absent where fewer "
        "than two prompts (batches) contribute."
    ),
    "round": (
        "One pass of the target over one row: the root and the tokens drafted below it. The first token after a prompt "
        "comes from reading the prompt and belongs to no round."
    ),
    "tau": (
        "Tokens per target pass, the free token included: 1 + the sum of reach over depths. Tokens that an end of text "
        "or the length cap cuts off the last round still count here."
    ),
    "emitted per pass": "Tokens that really entered the output over rounds: tau after the last round was trimmed.",
    "alpha": (
        "Acceptance rate at depth d: rounds in which some candidate at depth d was accepted, over rounds that accepted "
        "depth d - 1 and were offered a candidate at depth d. Without a depth: all depths together."
    ),
    "analytic alpha": (
        "The mean, over the same depths and rounds, of the probability with which a candidate was to be accepted; in a "
        "chain sum_x min(p(x), q(x)). It estimates the same thing as alpha with less noise (for greedy decoding the "
        "two are equal). A warning stands above where the two are further apart than both intervals and chance allow."
    ),
    "offer": "Share of the rounds that reached depth d - 1 in which a candidate at depth d was offered.",
    "reach": "Share of all rounds in which depth d was accepted: the product of offer and alpha up to depth d.",
    "acceptance ratio": (
        "Accepted over proposed tokens, all of a tree's candidates counted. Not alpha: tokens drafted behind a "
        "rejected one, and siblings of an accepted one, count as lost."
    ),
    "tokens/s": "New tokens over wall-clock seconds, prompt reading included.",
    "speed-up": (
        "Tokens/s of speculative over plain decoding: same prompts, same process, same loop, batch by batch in turn."
    ),
    "decode speed-up": "The same without the time for reading prompts, in which drafting cannot help.",
    "time": (
        "Share of the wall-clock seconds: prompts, target passes (head and warping included), drafting (the drafter's "
        "reading of prompts and accepted tokens included), and everything else."
    ),
    "c": "Time of one draft step (one depth of drafting) over the time of a target pass of one token a row.",
    "round cost": (
        "Time of a whole round (drafting, target pass, verification, the drafter's reading of what was accepted) over "
        "that of a step of plain decoding, at this batch size: a round pays where more tokens than this come of it."
    ),
    "v(n)": "Time of a target pass of n tokens a row over the time of a pass of one.",
    "predicted speed-up": (
        "What the decode speed-up should be, from parts timed by themselves and from what was accepted; no second of "
        "the decoding itself goes in. Timed, for 1, 2, 4, ... rows in the middle of their answers: drafting, the "
        "target's pass, verification and commit, the drafter's reading of prompts and accepted tokens. The rounds that "
        "each row needs say how many rows are still there in each round of a batch. The interval is that of the "
        "acceptance, over prompts; the seconds count as known."
    ),
    "predicted / measured": (
        "Predicted over measured decode speed-up: how far to trust the predictions for other shapes."
    ),
    "break-even alpha": (
        "The alpha, equal at every depth, at which a chain of this length neither gains nor loses time, at the timed "
        "cost of a round."
    ),
    "best gamma": (
        "The chain length with the highest tau over the cost of a round, drafting and pass timed for each length; "
        "beyond the measured depths the last depth's acceptance is carried on. 0: do not speculate."
    ),
    "i.i.d. tau": (
        "What tau would be if every drafted token survived with the same chance, the alpha of all depths together, as "
        "the closed form (1 - alpha^(gamma + 1)) / (1 - alpha) has it; offers as they were."
    ),
    "departure from i.i.d.": (
        "tau over i.i.d. tau, less 1. Far from 0, a figure computed from one alpha misleads: use the depths' own."
    ),
    "calibration": (
        "Drafted tokens whose parent was accepted, by the drafter's own probability of them. On the diagonal the "
        "drafter is as often right as it says. Right is the target's own probability of the token (greedy: 1 for its "
        "likeliest, 0 for others). Tokens that were drawn are accepted more often than that: with min(1, p / q)."
    ),
    "calibration error": (
        "Expected calibration error: over the tokens, the mean distance between the drafter's probability and the "
        "target's, each averaged within its tenth. 0 is perfect; bins with few tokens make it larger than it is."
    ),
    "stops paying": (
        "The batch size from which the measured decode speed-up is 1 or less, between two measured sizes on a straight "
        "line over the logarithm of the size."
    ),
    "batch size": (
        "Rows decoded together. At each size that was asked for, all prompts are decoded again, plainly and by every "
        "system, in full batches, two or more; where that takes more rows than there are prompts, prompts are used "
        "again."
    ),
    "lossless, greedy": (
        "Every answer equals plain decoding's token for token. In half precision a pass over several tokens rounds "
        "otherwise than a pass over one, so an answer may part where the target itself has nearly equal best tokens: "
        "where both tokens lie, in float32, within tie_factor * e of the best logit, e being the largest change of any "
        "logit between the target's plain passes in its own dtype and in float32 there. Each parting is listed."
    ),
    "lossless, sampled": (
        "Each emitted token's place in the target's law (its randomised probability integral transform) is uniform on "
        "(0, 1) if and only if tokens follow that law. Tested (Kolmogorov-Smirnov): the places with tokens in order of "
        "p, and of p over the draft law, the mean of the latter, and the places of drawn drafts in the law that the "
        "drafter hands on. Failed below p = 0.001, the smallest p times the number of tests: at most one lossless run "
        "in a thousand fails. A run without these values is not certified."
    ),
    "lossy by choice": (
        "Typical acceptance was asked for: a token x is accepted where p(x) > min(epsilon, delta * exp(-H(p))), H the "
        "entropy of the target's law p, whatever it was drafted from. Answers do not follow the target's law; alpha, "
        "tau and speed are not comparable with those of a lossless run, and analytic alpha is alpha itself."
    ),
    "served": (
        "A serving engine decoded the same prompts greedily with the same weights, draft length and cap, and counted "
        "its drafts (rounds in which something was proposed), draft tokens, and accepted tokens by position; beside "
        "them the same counts of the rounds here. Equal: every batch has the same counts, and the engine's answers, "
        "where it gives their ids, are those of plain decoding here."
    ),
}
