"""Compiled code on disk follows the sources."""

from __future__ import annotations

from pathlib import Path

from placement.kernel_cache import drop_stale_kernels


def package_with_kernels(folder: Path) -> Path:
    for place in (folder / "__pycache__", folder / "inner" / "__pycache__"):
        place.mkdir(parents=True)
        (place / "f.nbi").write_bytes(b"index")
        (place / "f.1.nbc").write_bytes(b"code")
    (folder / "one.py").write_text("@nb.njit\ndef one(): ...\n")
    (folder / "plain.py").write_text("x = 1\n")
    return folder / "inner" / "__pycache__" / "f.1.nbc"


def test_a_change_in_one_file_drops_the_code_compiled_for_all_others(tmp_path: Path) -> None:
    cached = package_with_kernels(tmp_path)
    drop_stale_kernels(tmp_path)
    cached.write_bytes(b"code")
    (tmp_path / "one.py").write_text("@nb.njit\ndef one(): return 1\n")
    assert drop_stale_kernels(tmp_path)
    assert not cached.exists()


def test_code_compiled_from_the_files_as_they_are_is_kept(tmp_path: Path) -> None:
    cached = package_with_kernels(tmp_path)
    drop_stale_kernels(tmp_path)
    cached.write_bytes(b"code")
    (tmp_path / "plain.py").write_text("x = 2\n")
    assert not drop_stale_kernels(tmp_path)
    assert cached.exists()


def test_all_that_is_compiled_lies_where_it_is_dropped() -> None:
    root = Path(__file__).parents[2]
    sources = [source for package in ("workers", "cluster") for source in (root / package).rglob("*.py")]
    assert [source for source in sources if "njit" in source.read_text()] == []
