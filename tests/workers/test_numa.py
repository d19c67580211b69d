"""Which CPUs a worker is bound to, from what sysfs says of two sockets and a GPU on each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workers.numa import bind_near, cpus_near, cpus_to_bind, parse_cpu_list


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for bus, domain in (("0000:3b:00.0", 0), ("0000:d8:00.0", 1), ("0000:01:00.0", -1), ("0000:02:00.0", 7)):
        device = tmp_path / "bus" / "pci" / "devices" / bus
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{domain}\n")
    for domain, cpus in ((0, "0-3,8-11\n"), (1, "4-7,12-15\n")):
        node = tmp_path / "devices" / "system" / "node" / f"node{domain}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpus)
    return tmp_path


def test_a_gpus_cpus_are_those_of_its_socket(sysfs: Path) -> None:
    assert cpus_near("0000:d8:00.0", sysfs) == {4, 5, 6, 7, 12, 13, 14, 15}


@pytest.mark.parametrize("bus", ["0000:01:00.0", "0000:02:00.0", "0000:ff:00.0"])
def test_where_the_machine_does_not_say_nothing_is_bound(sysfs: Path, bus: str) -> None:
    assert cpus_near(bus, sysfs) == frozenset()


def test_only_cpus_that_the_process_may_use_are_taken() -> None:
    assert cpus_to_bind(frozenset({4, 5, 6, 7}), {5, 6, 20}) == {5, 6}


def test_a_process_confined_elsewhere_or_already_near_stays_as_it_is() -> None:
    assert cpus_to_bind(frozenset({4, 5}), {0, 1}) == frozenset()
    assert cpus_to_bind(frozenset({4, 5, 6}), {4, 5}) == frozenset()


def test_cpu_lists_are_read_as_the_kernel_writes_them() -> None:
    assert parse_cpu_list("0-2,5,7-8\n") == {0, 1, 2, 5, 7, 8}
    assert parse_cpu_list("\n") == frozenset()


def test_a_worker_on_a_cpu_is_not_bound(sysfs: Path) -> None:
    assert bind_near(torch.device("cpu"), sysfs) == frozenset()
