"""What a serving engine counts of speculation, and how a report sets it beside what was counted here."""

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from specdraft.decoding import Round


class Counts(BaseModel):
    """What engines count of chains. A round in which nothing was proposed is no draft."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    """Before an answer is trimmed at its end or at the length cap (E-13, E-28)."""
    per_position: tuple[int, ...] = ()
    """Rounds that accepted the first, the second, ... drafted token: over drafts it is reach, not alpha (E-29)."""

    @classmethod
    def of_rounds(cls, rounds: Iterable[Round], gamma: int) -> Self:
        """Of rounds of chains of at most `gamma` tokens."""
        drafted = [one for one in rounds if one.proposed]
        return cls(
            drafts=len(drafted),
            draft_tokens=sum(one.proposed for one in drafted),
            accepted=sum(one.accepted for one in drafted),
            per_position=tuple(sum(one.accepted >= place for one in drafted) for place in range(1, gamma + 1)),
        )

    @classmethod
    def of_counters(cls, counters: Mapping[str, Any]) -> Self:
        """Of vLLM's counters, by their names without vllm:spec_decode_num_; KeyError for one that is not there."""
        return cls(
            drafts=int(counters["drafts"]),
            draft_tokens=int(counters["draft_tokens"]),
            accepted=int(counters["accepted_tokens"]),
            per_position=tuple(map(int, counters["accepted_tokens_per_pos"])),
        )

    def __add__(self, other: "Counts") -> "Counts":
        return self._with(other, 1)

    def __sub__(self, other: "Counts") -> "Counts":
        return self._with(other, -1)

    def _with(self, other: "Counts", sign: int) -> "Counts":
        places = zip_longest(self.per_position, other.per_position, fillvalue=0)
        return Counts(
            drafts=self.drafts + sign * other.drafts,
            draft_tokens=self.draft_tokens + sign * other.draft_tokens,
            accepted=self.accepted + sign * other.accepted,
            per_position=tuple(one + sign * another for one, another in places),
        )

    @property
    def tau(self) -> float | None:
        """1 + accepted / drafts, as engines report it."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    def __str__(self) -> str:
        return f"{self.drafts} drafts, {self.draft_tokens} drafted, {list(self.per_position)} accepted by position"


class Unequal(BaseModel):
    """A batch of prompts that the engine counts otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: int
    """Index of its first one."""
    ours: Counts
    theirs: Counts


class Served(BaseModel):
    """A serving engine's acceptance beside ours, of the same weights, prompts, draft length and cap, greedy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str
    """Its name and version, and the dtype that it was asked for; or a server's address."""
    system: str
    """The chain that both drafted."""
    prompts: int
    ours: Counts
    theirs: Counts
    unequal: list[Unequal]
    """Where the counts differ."""
    answers: Literal["identical", "ties", "failed"] | None
    """The engine's answers against plain decoding here; None: the server gives no token ids."""
    reason: str
    """What was compared and what differs first, and what may have made it so."""

    @property
    def equal(self) -> bool:
        """Counts of every batch; and answers, where they are known."""
        return not self.unequal and self.answers != "failed"

    @property
    def verdict(self) -> str:
        return "equal" if self.equal else "not equal"

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """What is counted, here and by the engine, for a table."""
        sides = [_cells(counts) for counts in (self.ours, self.theirs)]
        return [(name, sides[0].get(name, "–"), sides[1].get(name, "–")) for name in max(sides, key=len)]


def _cells(counts: Counts) -> dict[str, str]:
    reached = {f"accepted at position {place}": str(n) for place, n in enumerate(counts.per_position, 1)}
    tau = "–" if counts.tau is None else f"{counts.tau:.4f}"
    return {
        "drafts": str(counts.drafts),
        "draft tokens": str(counts.draft_tokens),
        "accepted": str(counts.accepted),
        **reached,
        "tau": tau,
    }
