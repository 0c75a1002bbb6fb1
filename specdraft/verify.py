"""The one accept/resample rule. Whatever was drafted, the emitted tokens follow the target's law p.

Speculative sampling (arXiv:2211.17192, arXiv:2302.01318) and its many-candidate forms (SpecInfer, arXiv:2305.09781;
recursive rejection without replacement, arXiv:2402.14160) are the same few lines. At a node let r = p. For each trial
there, in the order in which it was made, a token x drawn from q is

    accepted with probability min(1, r(x) / q(x)),   else   r <- norm(max(r - q, 0)),

and with no trial left the next token is drawn from r. A trial drawn without replacement has for q its law without the
tokens that its group drew before it, renormalised. A trial that was *chosen* has a one-hot q. Greedy decoding is a
one-hot p.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdraft.dice import Dice
from specdraft.tree import ALONE, CHOSEN, ROOT, DraftTree

_NOWHERE = -2  # parent of a trial that is padding or proposes a probe
_STOPPED = -3  # where a row stands that has accepted its last node


class Thresholds(NamedTuple):
    """How likely a token must be for `typical` to accept it: p(x) > min(epsilon, delta * exp(-H(p)))."""

    epsilon: float
    delta: float


class Probed(NamedTuple):
    """What the target says at every node of a tree with probes, for the drafter that planted them."""

    tree: DraftTree
    """As it was verified: a drafter finds its own nodes by their tokens, whatever stands beside them."""
    likeliest: Tensor
    """int64 [batch, 1 + nodes]: the target's likeliest token after the root (index 0) and after each node."""


class Verdict(NamedTuple):
    """What one target pass decided; depth = max(1, the tree's depth), column d - 1 is depth d."""

    path: Tensor
    """int64 [batch, depth]: the accepted nodes from depth 1 on, -1 beyond."""
    accepted: Tensor
    """int64 [batch]: how many nodes were accepted."""
    token: Tensor
    """int64 [batch]: the token emitted after the last accepted node, the next root."""
    offered: Tensor
    """bool [batch, depth]: depth d - 1 was accepted and some candidate stood at depth d."""
    chance: Tensor
    """float [batch, depth]: where offered, the probability that some candidate is accepted, given the tokens of all
    trials but the last: 1 - prod_{i<m} (1 - min(1, r_i(x_i) / q_i(x_i))) * (1 - sum_x min(r_m(x), q_m(x))).
    Its mean is alpha; in a chain it is sum_x min(p(x), q(x)). 0 elsewhere."""
    probed: Probed | None = None
    """Where the tree has probes: what the target says at them. The decoding loop fills it in."""


def verify(tree: DraftTree, p: Tensor, dice: Dice) -> Verdict:
    """Accept a path of the tree and emit one more token, row by row as if each row were alone.

    p is float [batch, 1 + nodes, V], warped like the laws of the tree: p[:, 0] follows the root, p[:, 1 + i] node i.
    Or int64 [batch, 1 + nodes], the ids of a greedy target's argmax, in the place of one-hot laws: then nothing of
    size V is touched, no dice are thrown, and a trial counts the same whether drawn or chosen.

    Raises ValueError, naming row and node, for a law with a NaN or that does not sum to 1, and for a drawn token that
    its own law gives no probability.
    """
    if p.shape[:2] != (tree.batch, 1 + tree.nodes):
        raise ValueError(f"p must begin with [{tree.batch}, {1 + tree.nodes}] (rows, 1 + nodes), found {list(p.shape)}")
    return _sampled(tree, p, dice) if p.is_floating_point() else _greedy(tree, p)


class _Trials(NamedTuple):
    """The draws as verification meets them, each int64 [batch, draws]."""

    node: Tensor
    parent: Tensor
    token: Tensor


def _trials(tree: DraftTree) -> _Trials:
    node = tree.draws.node
    index = node.clamp(min=0)
    real = (node >= 0) & (tree.candidate & tree.present).gather(1, index)
    return _Trials(node, tree.parents.gather(1, index).where(real, _NOWHERE), tree.tokens.gather(1, index))


def _blank(tree: DraftTree, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """path, offered and chance of a round in which nothing happened."""
    path = tree.tokens.new_full((tree.batch, max(tree.depth, 1)), -1)
    return path, torch.zeros_like(path, dtype=torch.bool), torch.zeros_like(path, dtype=dtype)


def _greedy(tree: DraftTree, ids: Tensor) -> Verdict:
    trials = _trials(tree)
    path, offered, chance = _blank(tree, torch.float32)
    wanted = trials.token == ids.gather(1, trials.parent.clamp(min=ROOT) + 1)
    at = path.new_full((tree.batch,), ROOT)
    for d in range(tree.depth if trials.node.shape[1] else 0):
        here = trials.parent == at[:, None]
        found, first = (here & wanted).max(1)
        at = trials.node.gather(1, first[:, None]).squeeze(1).where(found, _STOPPED)
        path[:, d], offered[:, d], chance[:, d] = at.clamp(min=-1), here.any(1), found
        if not found.any():
            break
    last = path.amax(1)  # a child's index exceeds its parent's
    return Verdict(path, (path >= 0).sum(1), ids.gather(1, last[:, None] + 1).squeeze(1), offered, chance)


def _sampled(tree: DraftTree, p: Tensor, dice: Dice) -> Verdict:
    trials = _trials(tree)
    path, offered, chance = _blank(tree, p.dtype)
    everyone = torch.arange(tree.batch, device=p.device)
    at = path.new_full((tree.batch,), ROOT)
    r = p[:, 0].clone()
    _check(r, "p", everyone, at)
    for d in range(tree.depth):
        here = trials.parent == at[:, None]
        count = here.sum(1)
        order = here.int().argsort(dim=1, descending=True, stable=True)
        missed = torch.ones_like(r[:, 0])
        at = torch.full_like(at, _STOPPED)
        for i in range(int(count.max()) if tree.batch else 0):
            rows = (count > i).nonzero().squeeze(1)
            slot = order[rows, i]
            x = trials.token[rows, slot, None]
            before, q = r[rows], _law(tree, trials, rows, slot, p)
            acceptance = (before.gather(1, x) / q.gather(1, x)).clamp(max=1).squeeze(1)
            overlap = torch.minimum(before, q).sum(-1).clamp(max=1)
            missed[rows] *= 1 - torch.where(count[rows] == i + 1, overlap, acceptance)
            r[rows] = _residual(before, q)
            # a row that has accepted goes on without coins, for its chance alone
            undecided = at[rows] == _STOPPED
            tossed = rows[undecided]
            heads = dice.accept(acceptance[undecided], tossed.tolist())
            at[tossed[heads]] = trials.node[tossed[heads], slot[undecided][heads]]
        path[:, d], offered[:, d], chance[:, d] = at.clamp(min=-1), count > 0, (1 - missed).where(count > 0, 0)
        moved = (at >= 0).nonzero().squeeze(1)
        if not len(moved):
            break
        r[moved] = p[moved, 1 + at[moved]]
        _check(r[moved], "p", moved, at[moved])
    return Verdict(path, (path >= 0).sum(1), dice.draw(r, everyone.tolist()), offered, chance)


def typical(tree: DraftTree, p: Tensor, thresholds: Thresholds, dice: Dice) -> Verdict:
    """NOT `verify`, and not lossless: accept what the target finds likely enough, whatever it was drafted from.

    Typical acceptance (Medusa, Cai et al. 2024, arXiv 2401.10774, section 2.3.2): a token x stands where

        p(x) > min(epsilon, delta * exp(-H(p))),   H(p) = -sum_x p(x) log p(x),

    and its parent stands. The longest path that stands is accepted, of equally long ones the likeliest under p, and
    one more token is drawn from p. Emitted tokens do not follow p. `Verdict.chance` is 1 at accepted depths, else 0.

    p: float [batch, 1 + nodes, V], as for `verify`. Raises ValueError for greedy ids and for a law that does not sum
    to 1.
    """
    if not p.is_floating_point() or p.shape[:2] != (tree.batch, 1 + tree.nodes):
        raise ValueError(f"p must be laws [{tree.batch}, {1 + tree.nodes}, V], found {p.dtype} {list(p.shape)}")
    rows, (epsilon, delta) = torch.arange(tree.batch, device=p.device), thresholds
    above, sees = tree.parents.clamp(ROOT, max(tree.nodes - 1, ROOT)) + 1, tree.attends()
    likely = p[rows[:, None], above, tree.tokens]
    bound = (torch.xlogy(p, p).sum(-1).exp() * delta).clamp(max=epsilon)  # exp(-H)
    real = tree.candidate & tree.present
    passes = _beside_root(real & (likely > bound.gather(1, above)), True)
    stands = (passes[:, None] | ~sees).all(-1)  # a node sees itself and its ancestors
    depths = (sees.sum(-1) - 1).masked_fill(~stands, -1)
    accepted = depths.amax(1)
    log_likely = _beside_root(likely.clamp(min=torch.finfo(p.dtype).tiny).log(), 0.0)
    chance_of_path = torch.where(sees, log_likely[:, None], 0).sum(-1)
    last = chance_of_path.masked_fill(depths < accepted[:, None], -torch.inf).argmax(1)
    path, offered, chance = _blank(tree, p.dtype)
    on_path = sees[rows, last, 1:]
    row, node = on_path.nonzero(as_tuple=True)
    path[row, depths[row, 1 + node] - 1] = node
    for d in range(tree.depth):
        at = path[:, d - 1] if d else torch.full_like(last, ROOT)
        offered[:, d] = (accepted >= d) & (real & (tree.parents == at[:, None])).any(1)
        chance[:, d] = path[:, d] >= 0
    after = p[rows, last]
    _check(after, "p", rows, last - 1)
    return Verdict(path, accepted, dice.draw(after, rows.tolist()), offered, chance)


def _beside_root(nodes: Tensor, root: float) -> Tensor:
    """A figure of each node [batch, nodes] with the root's in front: [batch, 1 + nodes]."""
    return torch.cat([nodes.new_full((len(nodes), 1), root), nodes], 1)


def _residual(r: Tensor, q: Tensor) -> Tensor:
    """norm(max(r - q, 0)); where nothing is left (r equals q, so rejection has no probability), r itself."""
    rest = (r - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, r)


def _law(tree: DraftTree, trials: _Trials, rows: Tensor, slot: Tensor, p: Tensor) -> Tensor:
    """q [rows, V] that each row's trial in `slot` was drawn from."""
    law, group = tree.draws.law[rows, slot], tree.draws.group[rows, slot]
    node, x = trials.node[rows, slot], trials.token[rows, slot]
    drawn = law != CHOSEN
    q = torch.zeros_like(p[rows, 0]).scatter_(1, x[:, None], 1)
    if drawn.any():
        if tree.laws is None:
            raise ValueError("trials were drawn from laws that the tree does not have")
        q[drawn] = tree.laws[rows[drawn], law[drawn]].to(q)
        _check(q, "q", rows, node)
    parent = tree.parents[rows].gather(1, trials.node[rows].clamp(min=0))
    siblings = (parent == parent.gather(1, slot[:, None])) & (tree.draws.group[rows] == group[:, None])
    before = (torch.arange(parent.shape[1], device=p.device) < slot[:, None]) & (trials.node[rows] >= 0)
    gone = siblings & before & (drawn & (group != ALONE))[:, None]
    if gone.any():
        index, column = gone.nonzero(as_tuple=True)
        q[index, trials.token[rows][index, column]] = 0
        q = torch.where(gone.any(1, keepdim=True), q / q.sum(-1, keepdim=True), q)
    impossible = ~(q.gather(1, x[:, None]).squeeze(1) > 0)
    if impossible.any():
        k = int(impossible.int().argmax())
        raise ValueError(
            f"row {int(rows[k])}, node {int(node[k])}: token {int(x[k])} cannot have been drawn from its law"
        )
    return q


def _check(law: Tensor, name: str, rows: Tensor, nodes: Tensor) -> None:
    total = law.sum(-1)
    bad = ~((total - 1).abs() < 1e-2)
    if bad.any():
        k = int(bad.int().argmax())
        where = "the root" if nodes[k] == ROOT else f"node {int(nodes[k])}"
        raise ValueError(f"row {int(rows[k])}, {where}: {name} is no distribution, it sums to {float(total[k])}")
