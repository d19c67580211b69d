"""Text in and out: the tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from placement.errors import ConfigError


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. A bare tokenizer.json will do. Raises ConfigError that names the folder."""
    try:
        if not (folder / "tokenizer_config.json").exists() and (folder / "tokenizer.json").exists():
            return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model '{folder}': its tokenizer cannot be loaded: {str(error).splitlines()[0]}") from error
