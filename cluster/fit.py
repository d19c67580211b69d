"""What `moetis fit` reads and prints."""

from __future__ import annotations

import re

from rich.table import Table

from placement.errors import ConfigError
from placement.fit.sizing import GIB, Fit
from workers.doctor import Finding, Verdict

_SHOWN = ("0.50", "0.80", "0.90", "0.95", "1.00")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def amount_of(text: str, option: str) -> int:
    """A whole number from '64K' or '24G' (powers of 1024). Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    amount = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if amount < 1:
        raise ConfigError(f"{option} '{text}': write a number above 0 with K, M, G or T, such as 24G")
    return amount


def fit_table(fit: Fit) -> Table:
    """A row a precision, below a title that says where the GPU's memory goes."""
    title = (
        f"{fit.gpu_bytes / GIB:.1f} GiB of GPU memory = {fit.resident_bytes / GIB:.2f} model without routed experts\n"
        f"+ {fit.kv_bytes / GIB:.2f} KV cache + {fit.workspace_bytes / GIB:.2f} workspace "
        f"+ {fit.left_bytes / GIB:.2f} for slots; {fit.experts} experts; {fit.disk_bytes / GIB:.1f} GiB on disk"
    )
    table = Table(title=title, title_justify="left", caption="tokens/s: upper bounds by the slots' hit rate")
    for column in ("as", "MB", "slots", "of all", "host GiB", *(f"{float(rate):.0%}" for rate in _SHOWN)):
        table.add_column(column, justify="right")
    for row in fit.precisions:
        waves = " (waves)" if row.slots < fit.top_k else ""
        speeds = (_speed(row.tokens_per_s[rate]) for rate in _SHOWN) if row.slots else ("no room",)
        share, host = f"{row.share:.0%}", f"{row.host_bytes / GIB:.1f}"
        table.add_row(row.precision, f"{row.expert_bytes / 1e6:.2f}", f"{row.slots}{waves}", share, host, *speeds)
    return table


def _speed(rate: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= 10 * size:
            return f"{rate / size:.0f}{unit}"
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def doctor_table(findings: list[Finding]) -> Table:
    table = Table()
    for column in ("", "found", "verdict", "advice"):
        table.add_column(column)
    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.ABSENT: "dim"}
    for finding in findings:
        verdict = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.name, finding.found, verdict, finding.advice)
    return table
