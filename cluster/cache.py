"""What `moetis cache` reads and prints."""

from __future__ import annotations

from rich.table import Table

from placement.cache.score import CacheScore
from placement.errors import ConfigError


def shares_of(text: str) -> list[float]:
    """Shares above 0 and up to 1 from '10%,0.25'. Raises ConfigError."""
    found = []
    for part in text.split(","):
        try:
            share = float(part.strip().removesuffix("%")) / (100 if part.strip().endswith("%") else 1)
        except ValueError:
            share = -1.0
        if not 0 < share <= 1:
            raise ConfigError(f"--slots '{part}': write shares of all experts above 0% and up to 100%, such as 10%,25%")
        found.append(share)
    return found


def numbers_of(text: str, option: str) -> list[int]:
    """Whole numbers from '1,8,32'. Raises ConfigError."""
    found = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise ConfigError(f"{option} '{part}': write whole numbers from 1 on, such as 1,8,32")
        found.append(int(part))
    return found


def cache_table(scores: list[CacheScore]) -> Table:
    """A row a batch and size, a column a policy: its hit rate and what share of Belady's that is."""
    table = Table(title="hit rate of lookups, and % of Belady's optimum on the same lookups", title_justify="left")
    names = list(dict.fromkeys(name for score in scores for name in score.policies))
    for column in ("batch", "slots", "Belady", *names):
        table.add_column(column, justify="right")
    for score in scores:
        cells = [
            f"{score.policies[name]:.3f} {score.of_belady(name):4.0%}" if name in score.policies else "-"
            for name in names
        ]
        table.add_row(f"{score.batch}", f"{score.share:.0%} = {score.num_slots}", f"{score.belady:.3f}", *cells)
    return table
