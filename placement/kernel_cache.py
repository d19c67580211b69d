"""Compiled code on disk that is older than the sources it was made from is dropped, before any of it is loaded.

numba looks at a function's own file alone: code that had another file's functions compiled into it would go on being
used after that other file had changed, and a plan would be made by half of the old code and half of the new.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from pathlib import Path

STAMP = "kernels.sha256"


def drop_stale_kernels(package: Path) -> bool:
    """Delete numba's cached code below a package folder unless it was made from the files as they are now.

    Returns whether it was dropped. A folder that can't be written to is left as it is.
    """
    digest = sha256()
    for source in sorted(package.rglob("*.py")):
        code = source.read_bytes()
        if b"njit" in code:
            digest.update(source.relative_to(package).as_posix().encode() + b"\0" + code + b"\0")
    stamp, found = package / "__pycache__" / STAMP, digest.hexdigest()
    if stamp.is_file() and stamp.read_text() == found:
        return False
    with suppress(OSError):
        for cached in [*package.rglob("__pycache__/*.nbi"), *package.rglob("__pycache__/*.nbc")]:
            cached.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(found)
    return True
