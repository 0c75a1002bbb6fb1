"""specdraft: train, measure, quantise and publish drafters for lossless speculative decoding.

The words of this package, each with one meaning:

p, q            the target's and the drafter's distribution of the next token, after the same warping
root            the last committed token; its successor is what is drafted first
depth d         1..gamma, how far below the root a drafted token stands
gamma           draft length of a chain; a tree has a depth and a budget of nodes
alpha           acceptance rate at depth d: rounds in which some candidate at depth d was accepted, over rounds that
                accepted depth d - 1 and were offered a candidate at depth d. Its analytic form at one position of a
                chain is sum_x min(p(x), q(x)), averaged over the positions that decoding really reached
offer o_d       share of the rounds that reached depth d - 1 in which a candidate at depth d was offered
reach r_d       share of all rounds in which depth d was accepted: the product of o_i * alpha_i for i <= d
overlap_d       training's relative of alpha: sum_x min(p, q) at every supervised position, teacher-forced, not
                conditioned on accepted parents. Never reported as alpha
tau             tokens emitted per target pass, the free token included: 1 + sum_d r_d
acceptance ratio  accepted / proposed tokens; never called alpha
c, v(n)         measured cost of a draft step, and of a target pass over n tokens, in target steps of one token
taps            the target layers whose outputs a drafter reads. Tap k is the hidden state after decoder layer k,
                layers counted from 1; 0 is the embedding
supervised      a token that the loss counts: written by the assistant, end-of-turn included
"""

__version__ = "0.1.0"
