"""The two consoles: results on stdout, everything else on stderr."""

from __future__ import annotations

from rich.console import Console

OUT = Console(highlight=False)
LOG = Console(stderr=True, highlight=False)
